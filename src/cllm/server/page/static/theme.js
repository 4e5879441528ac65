// Dark, light, or as the system says.

import { byId, setText } from "./dom.js";

const NAME = "cllm-theme";
const CHOICES = ["auto", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = [];
const colours = new Map();

let choice = CHOICES.includes(localStorage.getItem(NAME)) ? localStorage.getItem(NAME) : "auto";

export const isDark = () => (choice === "auto" ? system.matches : choice === "dark");

/** Call `listener` whenever colours have changed. */
export function onTheme(listener) {
  listeners.push(listener);
}

/** A colour of the style sheet as it is now: "rgb(1, 2, 3)". */
export function cssColour(name) {
  if (!colours.has(name)) {
    const probe = document.querySelector("header");
    probe.style.color = `var(--${name})`;
    colours.set(name, getComputedStyle(probe).color);
    probe.style.color = "";
  }
  return colours.get(name);
}

function apply() {
  if (choice === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
  colours.clear();
  setText(byId("theme"), `Theme: ${choice}`);
  for (const listener of listeners) listener();
}

byId("theme").addEventListener("click", () => {
  choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
  localStorage.setItem(NAME, choice);
  apply();
});
system.addEventListener("change", apply);
apply();

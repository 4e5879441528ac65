// Which of several models the page shows and talks to. With one model there is nothing to choose, and nothing to see.

import { byId, make } from "./dom.js";
import { key } from "./key.js";

const LOOK_S = 5;
const SOON_S = 0.5;
const ON_THE_WAY = ["loading", "unloading"];

class Models {
  constructor() {
    this.chosen = "";
    this.cards = [];
    this.budget = 0;
    this.listeners = [];
    this.viewers = [];
    this.waiting = []; // who waits for the chosen one to be loaded
    this.box = byId("models");
    this.box.addEventListener("change", () => this.choose(this.box.value));
  }

  choose(name) {
    if (name === this.chosen) return;
    this.chosen = name;
    this.tell();
    for (const listener of this.listeners) listener();
    this.letOn();
  }

  /** Another one is chosen. */
  onChange(listener) {
    this.listeners.push(listener);
  }

  /** There is something new to show. */
  onLook(viewer) {
    this.viewers.push(viewer);
  }

  /** What to add to an address. */
  get query() {
    return this.chosen ? `?model=${encodeURIComponent(this.chosen)}` : "";
  }

  /** As far as is known. */
  get isReady() {
    return !this.cards.length || this.stateOf(this.chosen) === "ready";
  }

  stateOf(name) {
    return this.cards.find((card) => card.id === name)?.state;
  }

  /** Resolves once the chosen model is loaded, or another one is chosen. */
  async ready() {
    await new Promise((resolve) => this.waiting.push(resolve));
  }

  /** Look which models there are and what they are doing, now and then. */
  async follow() {
    for (;;) {
      // A key is being asked for: the answer would be the same.
      if (!document.hidden && !byId("key-dialog").open && !(await this.look())) return;
      const isSoon = this.cards.some((card) => ON_THE_WAY.includes(card.state));
      await new Promise((resolve) => setTimeout(resolve, (isSoon ? SOON_S : LOOK_S) * 1000));
    }
  }

  /** False: there is one model, and there will not be more. */
  async look() {
    try {
      const response = await fetch("v1/models", { headers: key.headers(), cache: "no-store" });
      if (!response.ok) return true;
      const { data, memory_budget_bytes: budget } = await response.json();
      if (!data.every((each) => "state" in each)) return false;
      this.cards = data;
      this.budget = budget;
      this.chosen ||= data[0].id;
      this.tell();
      if (this.isReady) this.letOn();
    } catch {
      // The stream says so when the server cannot be reached.
    }
    return true;
  }

  letOn() {
    for (const resolve of this.waiting.splice(0)) resolve();
  }

  tell() {
    const texts = this.cards.map(({ id, state }) => `${id} · ${state}`);
    if (texts.some((text, at) => this.box.options[at]?.text !== text)) {
      this.box.replaceChildren(
        ...this.cards.map(({ id }, at) => {
          const option = make("option", "", texts[at]);
          option.value = id;
          return option;
        }),
      );
    }
    this.box.value = this.chosen;
    this.box.hidden = false;
    for (const viewer of this.viewers) viewer();
  }
}

export const models = new Models();

// Which of several models the page shows and talks to. With one model there is nothing to choose, and nothing to see.

import { byId, make } from "./dom.js";
import { key } from "./key.js";

const LOOK_S = 5;

class Models {
  constructor() {
    this.chosen = "";
    this.listeners = [];
    this.box = byId("models");
    this.box.addEventListener("change", () => {
      this.chosen = this.box.value;
      for (const listener of this.listeners) listener();
    });
  }

  onChange(listener) {
    this.listeners.push(listener);
  }

  /** What to add to an address. */
  get query() {
    return this.chosen ? `?model=${encodeURIComponent(this.chosen)}` : "";
  }

  /** Look which models there are and what they are doing, now and then. */
  async follow() {
    for (;;) {
      if (!document.hidden && !(await this.look())) return;
      await new Promise((resolve) => setTimeout(resolve, LOOK_S * 1000));
    }
  }

  /** False: there is one model, and there will not be more. */
  async look() {
    try {
      const response = await fetch("v1/models", { headers: key.headers(), cache: "no-store" });
      if (!response.ok) return true;
      const { data } = await response.json();
      if (!data.every((each) => "state" in each)) return false;
      this.show(data);
    } catch {
      // The stream says so when the server cannot be reached.
    }
    return true;
  }

  show(cards) {
    this.chosen ||= cards[0].id;
    this.box.replaceChildren(
      ...cards.map(({ id, state }) => {
        const option = make("option", "", `${id} · ${state}`);
        option.value = id;
        option.selected = id === this.chosen;
        return option;
      }),
    );
    this.box.hidden = false;
  }
}

export const models = new Models();

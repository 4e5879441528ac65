// Several models under one budget: what each takes, what it is doing, and loading and unloading by hand.

import { KeyedRows, byId, make, setText } from "./dom.js";
import { CACHED, PRIVATE, cssOf } from "./colour.js";
import { bytes, whole } from "./format.js";
import { key } from "./key.js";
import { models } from "./models.js";
import { problemOf } from "./sse.js";

const OPTIONAL = 4; // a column that a narrow screen has no room for
const IN_MEMORY = ["ready", "unloading"];

export class ModelList {
  constructor() {
    this.busy = new Set(); // those that this page has asked to be loaded or unloaded
    this.rows = new KeyedRows(byId("model-list"), (item) => this.create(item), (row, item) => this.update(row, item));
    models.onLook(() => this.render());
  }

  render() {
    const { cards, budget } = models;
    byId("models-panel").hidden = !cards.length;
    if (!cards.length) return;
    const taken = cards.reduce((sum, card) => sum + bytesOf(card).weights + bytesOf(card).kv, 0);
    const text = `${bytes(taken)} of ${bytes(budget)} taken by weights and K/V`;
    setText(byId("models-facts"), text);
    byId("budget").setAttribute("aria-label", `Memory of all models: ${text}`);
    this.drawBudget(cards, budget);
    this.rows.show(cards.map((card, number) => ({ card, number: number + 1 })), ({ card }) => card.id);
  }

  drawBudget(cards, budget) {
    const parts = cards.flatMap((card, number) => {
      const { weights, kv } = bytesOf(card);
      const of = (size, state, what) => ({ size, colour: cssOf((number + 1) * 4 + state), title: `${card.id}: ${what} ${bytes(size)}` });
      return [of(weights, PRIVATE, "weights"), of(kv, CACHED, "K/V")];
    });
    byId("budget").replaceChildren(
      ...parts
        .filter(({ size }) => size > 0)
        .map(({ size, colour, title }) => {
          const part = make("i");
          part.style.width = `${(100 * size) / budget}%`;
          part.style.backgroundColor = colour;
          part.title = title;
          return part;
        }),
    );
  }

  create({ card }) {
    const node = make("tr");
    const cells = Array.from({ length: 6 }, () => node.appendChild(make("td")));
    cells[OPTIONAL].className = "optional";
    const dot = make("i", "dot");
    const name = make("button", "", card.id);
    name.type = "button";
    name.title = "Show this model and talk to it";
    name.addEventListener("click", () => models.choose(card.id));
    cells[0].appendChild(make("div", "holder")).append(dot, name);
    const change = make("button", "small");
    change.type = "button";
    change.addEventListener("click", () => this.change(card.id));
    cells[5].append(change);
    return { node, cells, dot, name, change };
  }

  update(row, { card, number }) {
    const [, state, weights, kv, requests] = row.cells;
    const isIn = IN_MEMORY.includes(card.state);
    const canChange = ["ready", "unloaded", "failed"].includes(card.state) && !this.busy.has(card.id);
    row.dot.style.backgroundColor = isIn ? cssOf(number * 4 + PRIVATE) : "var(--line)";
    row.name.setAttribute("aria-pressed", String(card.id === models.chosen));
    setText(state, card.pinned && isIn ? `${card.state}, pinned` : card.state);
    state.title = card.error ?? "";
    setText(weights, bytes(card.weights_bytes));
    setText(kv, isIn ? bytes(card.kv_bytes) : "–");
    setText(requests, card.requests ? whole(card.requests) : "–");
    row.change.disabled = !canChange;
    setText(row.change, isIn ? "Unload" : "Load");
  }

  async change(id) {
    const isIn = models.stateOf(id) === "ready";
    this.busy.add(id);
    this.tell("");
    const answer = ask(isIn ? "unload" : "load", id);
    models.look(); // what it is doing meanwhile
    const problem = await answer;
    this.busy.delete(id);
    this.tell(problem);
    await models.look();
  }

  tell(problem) {
    const node = byId("models-problem");
    node.hidden = !problem;
    setText(node, problem);
    this.render();
  }
}

/** What a model takes now. */
function bytesOf(card) {
  return IN_MEMORY.includes(card.state) ? { weights: card.weights_bytes, kv: card.kv_bytes } : { weights: 0, kv: 0 };
}

/** Says what went wrong, or nothing. */
async function ask(what, model) {
  try {
    const response = await fetch(`models/${what}`, {
      method: "POST",
      headers: { "content-type": "application/json", ...key.headers() },
      body: JSON.stringify({ model }),
    });
    return response.ok ? "" : await problemOf(response);
  } catch (error) {
    return error.message;
  }
}

// Who runs and who waits, and how fast they advance.

import { KeyedRows, byId, make, setText } from "./dom.js";
import { PRIVATE, codeOf, cssOf } from "./colour.js";
import { duration, rate, whole } from "./format.js";

const OPTIONAL = [3, 6]; // columns that a narrow screen has no room for

export class Requests {
  constructor(selection) {
    this.selection = selection;
    this.list = [];
    this.rows = new KeyedRows(byId("requests"), (item) => this.create(item), (row, item) => this.update(row, item));
    selection.onChange(() => this.render());
  }

  show(list, inAll) {
    this.list = list;
    setText(byId("requests-facts"), inAll > list.length ? `${list.length} of ${whole(inAll)} shown` : "");
    this.render();
  }

  render() {
    byId("no-requests").hidden = this.list.length > 0;
    this.rows.show(this.list, (request) => request.id);
  }

  /** Numbers under which the selected request holds memory. */
  holdersOf(key) {
    return this.list.find((request) => `request ${request.id}` === key)?.holders ?? [];
  }

  nameOf(number) {
    const owner = this.list.find((request) => request.holders.includes(number));
    return owner ? `request ${owner.id}` : `sequence ${number}`;
  }

  create(request) {
    const node = make("tr");
    const cells = Array.from({ length: 7 }, () => node.appendChild(make("td")));
    for (const column of OPTIONAL) cells[column].className = "optional";
    const dot = make("i", "dot");
    const name = make("button", "", request.id.replace(/^(chatcmpl|cmpl)-/, ""));
    name.type = "button";
    name.title = request.id;
    name.addEventListener("click", () => this.selection.toggle(`request ${request.id}`));
    cells[0].appendChild(make("div", "holder")).append(dot, name);
    const progress = make("progress");
    progress.setAttribute("aria-label", "prompt computed");
    const state = make("span");
    cells[1].append(progress, state);
    return { node, cells, dot, name, progress, state };
  }

  update(row, request) {
    const [, , prompt, cached, out, speed, age] = row.cells;
    row.dot.style.backgroundColor = request.holders.length ? cssOf(codeOf(request.holders[0], PRIVATE)) : "var(--line)";
    row.name.setAttribute("aria-pressed", String(this.selection.key === `request ${request.id}`));
    const readsPrompt = request.running && !request.generated;
    row.progress.hidden = !readsPrompt;
    if (readsPrompt) {
      row.progress.max = request.prompt_tokens;
      row.progress.value = request.computed;
    }
    setText(row.state, !request.running ? "waiting" : readsPrompt ? " prompt" : request.answers > 1 ? `${request.answers} answers` : "answer");
    setText(prompt, whole(request.prompt_tokens));
    setText(cached, whole(request.cached));
    setText(out, whole(request.generated));
    setText(speed, request.running ? rate(request.rate) : "–");
    setText(age, duration(request.age_s));
  }
}

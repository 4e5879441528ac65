// The replicas of a cluster: where each is, what it does and what it holds.

import { KeyedRows, byId, make, setText } from "./dom.js";
import { bytes, percent, rate, whole } from "./format.js";

const OPTIONAL = [1, 4, 6]; // columns that a narrow screen has no room for
const SPAN_S = 2;

export class Replicas {
  constructor() {
    this.paces = new Map();
    this.rows = new KeyedRows(byId("replica-list"), () => this.create(), (row, item) => this.update(row, item));
  }

  /** `list` is undefined where there is no cluster. */
  show(list) {
    document.body.toggleAttribute("data-cluster", Boolean(list));
    byId("replicas-panel").hidden = !list;
    if (!list) return;
    const states = new Map();
    for (const { state } of list) states.set(state, (states.get(state) ?? 0) + 1);
    setText(byId("replicas-facts"), [...states].map(([state, count]) => `${whole(count)} ${state}`).join(", "));
    this.paces = new Map(list.map((replica) => [replica.name, this.paceOf(replica)]));
    this.rows.show(list, (replica) => replica.name);
  }

  /** What a replica reported over the last seconds, by its own clock. */
  paceOf({ name, uptime_s: time, generated_tokens: tokens }) {
    const before = this.paces.get(name) ?? [];
    if (time === undefined || before.at(-1)?.time === time) return before;
    return [...before.filter((each) => each.time >= time - SPAN_S - 1 && each.time < time), { time, tokens }];
  }

  create() {
    const node = make("tr");
    const cells = Array.from({ length: 8 }, () => node.appendChild(make("td")));
    for (const column of OPTIONAL) cells[column].className = "optional";
    const use = make("progress");
    use.setAttribute("aria-label", "K/V in use");
    const size = make("span");
    cells[5].append(use, size);
    return { node, cells, use, size };
  }

  update(row, replica) {
    const [name, node, state, running, waiting, , hits, speed] = row.cells;
    const isKnown = replica.total_bytes !== undefined;
    setText(name, replica.name);
    name.title = replica.name;
    setText(node, replica.node);
    setText(state, replica.state);
    row.use.hidden = !isKnown;
    if (!isKnown) {
      for (const cell of [running, waiting, row.size, hits, speed]) setText(cell, "–");
      return;
    }
    setText(running, whole(replica.running));
    setText(waiting, whole(replica.waiting));
    row.use.max = replica.total_bytes;
    row.use.value = replica.used_bytes;
    setText(row.size, ` ${bytes(replica.used_bytes)}`);
    row.size.title = `${bytes(replica.used_bytes)} in use and ${bytes(replica.cached_bytes)} cached, of ${bytes(replica.total_bytes)}`;
    setText(hits, percent(replica.hit_tokens, replica.query_tokens));
    setText(speed, this.rateOf(replica.name));
  }

  rateOf(name) {
    const pace = this.paces.get(name);
    const [first, last] = [pace[0], pace.at(-1)];
    return last.time > first.time ? rate(Math.max(0, last.tokens - first.tokens) / (last.time - first.time)) : "–";
  }
}

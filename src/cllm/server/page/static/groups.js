// Layers that differ in what they keep: what each group takes, holds and has kept.

import { KeyedRows, byId, make, setText } from "./dom.js";
import { bytes, whole } from "./format.js";
import { tellApart } from "./colour.js";

const NAMES = {
  full: ({ window }) => (window ? `attend to ${whole(window)} tokens and keep all` : "attend to everything"),
  window: ({ window }) => `attend to the last ${whole(window)} tokens`,
  state: () => "carry a state",
};

export class Groups {
  constructor() {
    this.costs = [];
    this.rows = new KeyedRows(byId("groups"), (group) => this.create(group), (row, group) => this.update(row, group));
  }

  /** What the model's groups of layers take. */
  restart(costs = []) {
    this.costs = costs;
    const several = costs.length > 1;
    tellApart(several);
    document.body.dataset.groups = several ? costs.map(({ kind }) => kind).join(" ") : "";
  }

  show(kv) {
    const held = new Map(kv.groups.map((group) => [group.kind, group]));
    const shown = this.costs.filter((cost) => held.has(cost.kind));
    this.rows.show(shown.map((cost) => ({ ...cost, ...held.get(cost.kind), kv })), ({ kind }) => kind);
  }

  create({ kind }) {
    const node = make("tr");
    const cells = Array.from({ length: 6 }, () => node.appendChild(make("td")));
    cells[2].className = "optional";
    const name = make("span");
    const texts = [3, 4].map((column) => {
      const text = make("span");
      cells[column].append(make("i", `swatch ${kind}-${column - 2}`), text);
      return text;
    });
    cells[0].append(name);
    return { cells, name, node, texts };
  }

  update({ cells, name, texts }, group) {
    const isFull = group.kind === "full";
    setText(name, NAMES[group.kind](group));
    setText(cells[1], whole(group.layers));
    setText(cells[2], isFull ? `${bytes(group.bytes_per_token)} a token` : `up to ${bytes(group.bytes_per_sequence)} a request`);
    setText(texts[0], bytes(group.used * group.block_bytes));
    setText(texts[1], bytes(group.evictable * group.block_bytes));
    setText(cells[5], isFull ? "–" : snapshots(group.kv));
  }
}

function snapshots(kv) {
  return `${whole(kv.snapshots)} kept, ${whole(kv.snapshots_used)} used, ${whole(kv.snapshots_dropped)} dropped`;
}

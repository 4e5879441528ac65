// The tree of prefixes: what is cached, how often it was found again, who uses it now.

import { KeyedRows, byId, make, setText } from "./dom.js";
import { CACHED, SHARED, codeOf, cssOf } from "./colour.js";
import { bytes, whole } from "./format.js";

const DEEPEST_INDENT = 8;

export class PrefixTree {
  constructor(selection) {
    this.selection = selection;
    this.prefixes = [];
    this.bytesPerToken = 0;
    this.rows = new KeyedRows(byId("tree"), (item) => this.create(item), (row, item) => this.update(row, item));
    selection.onChange(() => this.render());
  }

  show(prefixes, inAll, bytesPerToken) {
    this.prefixes = inOrder(prefixes);
    this.bytesPerToken = bytesPerToken;
    setText(byId("tree-facts"), inAll > prefixes.length ? `the ${prefixes.length} largest of ${whole(inAll)}` : "");
    this.render();
  }

  render() {
    byId("no-prefixes").hidden = this.prefixes.length > 0;
    this.rows.show(this.prefixes, ({ prefix }) => prefix.number);
  }

  /** The selected prefix and all that goes on from it. */
  holdersOf(key) {
    const found = [];
    for (const { prefix } of this.prefixes) {
      if (key === `prefix ${prefix.number}` || found.includes(prefix.parent)) found.push(prefix.number);
    }
    return found;
  }

  nameOf(number) {
    const found = this.prefixes.find(({ prefix }) => prefix.number === number)?.prefix;
    if (!found) return `prefix ${number}`;
    return `${label(found)}, ${whole(found.tokens)} tokens, ${whole(found.hits)} hits, ${whole(found.users)} users${found.snapshots ? `, ${whole(found.snapshots)} snapshots` : ""}${found.pins ? ", pinned" : ""}`;
  }

  /** How the prompt begins that a prefix is the end of. */
  beginningOf(number) {
    const known = new Map(this.prefixes.map(({ prefix }) => [prefix.number, prefix]));
    let found = known.get(number);
    if (!found) return `prefix ${number}`;
    while (known.has(found.parent)) found = known.get(found.parent);
    return found.text ? label(found) : `prefix ${number}`;
  }

  create({ prefix }) {
    const node = make("tr");
    const cells = Array.from({ length: 6 }, () => node.appendChild(make("td")));
    cells[2].className = "optional";
    cells[3].className = "grouped";
    const indent = make("span", "indent");
    const dot = make("i", "dot");
    const name = make("button");
    name.type = "button";
    name.addEventListener("click", () => this.selection.toggle(`prefix ${prefix.number}`));
    cells[0].appendChild(make("div", "holder")).append(indent, dot, name);
    return { node, cells, indent, dot, name };
  }

  update(row, { prefix, depth }) {
    const [, tokens, size, snapshots, hits, users] = row.cells;
    row.indent.style.setProperty("--depth", Math.min(depth, DEEPEST_INDENT));
    row.dot.style.backgroundColor = cssOf(codeOf(prefix.number, prefix.users ? SHARED : CACHED));
    row.name.setAttribute("aria-pressed", String(this.selection.key === `prefix ${prefix.number}`));
    row.name.title = [depth && `level ${depth + 1}`, prefix.name && `ends with block ${prefix.name}`].filter(Boolean).join(", ");
    setText(row.name, label(prefix));
    setText(tokens, whole(prefix.tokens));
    setText(size, bytes(prefix.tokens * this.bytesPerToken));
    setText(snapshots, prefix.snapshots ? whole(prefix.snapshots) : "–");
    setText(hits, whole(prefix.hits));
    setText(users, [prefix.users ? whole(prefix.users) : "", prefix.pins ? "pinned" : ""].filter(Boolean).join(", ") || "–");
  }
}

function label(prefix) {
  return prefix.text ? prefix.text.replace(/\s+/g, " ").trim() : `prefix ${prefix.number}`;
}

/** Parents before their children, the largest first. */
function inOrder(prefixes) {
  const known = new Set(prefixes.map((prefix) => prefix.number));
  const children = new Map();
  for (const prefix of prefixes) {
    const parent = known.has(prefix.parent) ? prefix.parent : 0;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(prefix);
  }
  const ordered = [];
  const stack = [{ list: sorted(children.get(0)), depth: 0 }];
  while (stack.length) {
    const { list, depth } = stack[stack.length - 1];
    const prefix = list.shift();
    if (!prefix) {
      stack.pop();
      continue;
    }
    ordered.push({ prefix, depth });
    stack.push({ list: sorted(children.get(prefix.number)), depth: depth + 1 });
  }
  return ordered;
}

function sorted(prefixes = []) {
  return [...prefixes].sort((one, other) => other.tokens - one.tokens || one.number - other.number);
}

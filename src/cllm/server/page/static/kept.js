// What outlives requests: K/V on disk and in host memory, and prefixes that are pinned.

import { KeyedRows, byId, make, setText } from "./dom.js";
import { CACHED, cssOf } from "./colour.js";
import { bytes, span, whole } from "./format.js";
import { key } from "./key.js";
import { models } from "./models.js";
import { problemOf } from "./sse.js";

const DAMAGE = ["damaged", "torn", "misplaced"];
const OPTIONAL = 2; // a column that a narrow screen has no room for
const SOURCES = {
  warm: ["warm", "kv.warm, or POST /kv/warm"],
  request: ["mark", "cache_control in a request"],
};

export class Kept {
  constructor(tree, selection) {
    this.tree = tree;
    this.selection = selection;
    this.now = 0;
    this.rows = new KeyedRows(byId("pins"), (pin) => this.create(pin), (row, pin) => this.update(row, pin));
    selection.onChange(() => this.render());
    this.pins = [];
  }

  show({ disk, pins }, now) {
    this.now = now.time;
    this.showDisk(disk, now.kv.disk);
    this.showHost(now.kv.host);
    this.showPins(pins);
    setText(byId("kept-facts"), now.kv.disk.loading ? `${whole(now.kv.disk.loading)} loading` : "");
  }

  showDisk(details, numbers) {
    const isKept = Boolean(details && numbers.limit_bytes);
    byId("disk-bar").hidden = !isKept;
    if (!isKept) {
      setText(byId("disk-size"), "nothing is kept");
      setText(byId("disk-facts"), "K/V of prompts end with the server (kv.disk.enabled).");
      byId("disk-trouble").hidden = true;
      return;
    }
    bar("disk", numbers);
    const damaged = DAMAGE.reduce((sum, kind) => sum + (details.counts[kind] ?? 0), 0);
    const parts = [
      ...loadsOf(numbers),
      numbers.queued_bytes ? `${bytes(numbers.queued_bytes)} being written` : "nothing being written",
      `written ${bytes(numbers.written_bytes)}, read ${bytes(numbers.read_bytes)}`,
      ...(damaged ? [`damaged files found ${whole(damaged)}`] : []),
      details.directory,
    ];
    setText(byId("disk-facts"), parts.join(" · "));
    const trouble = byId("disk-trouble");
    trouble.hidden = !details.trouble;
    setText(trouble, details.trouble ? `Nothing is written now: ${details.trouble}` : "");
  }

  showHost(numbers) {
    const isKept = Boolean(numbers?.limit_bytes);
    byId("host").hidden = !isKept;
    if (!isKept) return;
    bar("host", numbers);
    const copied = `copied there ${bytes(numbers.out_bytes)}, back ${bytes(numbers.in_bytes)}`;
    setText(byId("host-facts"), [...loadsOf(numbers), copied].join(" · "));
  }

  showPins(pins) {
    this.pins = [...(pins?.prefixes ?? [])].sort((one, other) => (one.until ?? Infinity) - (other.until ?? Infinity) || other.tokens - one.tokens);
    const limit = pins?.limit_bytes ?? 0;
    setText(byId("pins-size"), limit ? `${bytes(pins.pinned_bytes)} of ${bytes(limit)}` : "none may be");
    this.render();
  }

  render() {
    byId("no-pins").hidden = this.pins.length > 0;
    byId("pins-table").hidden = !this.pins.length;
    this.rows.show(this.pins, (pin) => pin.id);
  }

  create(pin) {
    const node = make("tr");
    const cells = Array.from({ length: 6 }, () => node.appendChild(make("td")));
    cells[OPTIONAL].className = "optional";
    const dot = make("i", "dot");
    const name = make("button");
    name.type = "button";
    name.addEventListener("click", () => this.selection.toggle(row.selects));
    cells[0].appendChild(make("div", "holder")).append(dot, name);
    const end = make("button", "small", "Unpin");
    end.type = "button";
    end.title = "It stays cached, and may be evicted.";
    end.addEventListener("click", () => this.end(pin.id, end));
    cells[5].append(end);
    const row = { node, cells, dot, name, selects: "" };
    return row;
  }

  update(row, pin) {
    const [, tokens, size, by, left] = row.cells;
    const [source, meaning] = SOURCES[pin.source] ?? [pin.source, ""];
    const isHere = pin.prefix !== null;  // otherwise it is being computed again, or on a replica
    row.selects = `prefix ${pin.prefix}`;
    row.dot.style.backgroundColor = isHere ? cssOf(pin.prefix * 4 + CACHED) : "transparent";
    row.name.disabled = !isHere;
    row.name.setAttribute("aria-pressed", String(isHere && this.selection.key === row.selects));
    setText(row.name, isHere ? this.tree.beginningOf(pin.prefix) : placesOf(pin));
    setText(tokens, whole(pin.tokens));
    setText(size, bytes(pin.bytes));
    setText(by, source);
    by.title = meaning;
    setText(left, pin.until === null ? "no end" : span(pin.until - this.now));
  }

  async end(id, button) {
    const problem = byId("pins-problem");
    button.disabled = true;
    let text = "";
    try {
      const response = await fetch(`kv/warm/${encodeURIComponent(id)}${models.query}`, { method: "DELETE", headers: key.headers() });
      if (!response.ok && response.status !== 404) text = await problemOf(response);
    } catch (error) {
      text = error.message;
    }
    button.disabled = false;
    problem.hidden = !text;
    setText(problem, text);
  }
}

/** Of a pin that is not in the tree of this page. */
function placesOf({ state, replicas }) {
  if (state !== "pinned") return "being computed again";
  return replicas.length === 1 ? `on ${replicas[0]}` : `on ${whole(replicas.length)} replicas`;
}

function bar(name, { bytes: used, limit_bytes: limit }) {
  const node = byId(`${name}-bar`);
  node.max = limit;
  node.value = used;
  setText(byId(`${name}-size`), `${bytes(used)} of ${bytes(limit)}`);
}

function loadsOf({ loads, loaded_tokens: tokens, failed_loads: failed }) {
  const text = `loaded ${whole(tokens)} tokens in ${whole(loads)} ${loads === 1 ? "load" : "loads"}`;
  return [failed ? `${text}, ${whole(failed)} of which brought less than expected` : text];
}

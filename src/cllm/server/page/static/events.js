// What happens to memory and to requests, as it happens. Counters go up; the list says by how much and when.

import { byId, make, setText } from "./dom.js";
import { bytes, clock, whole } from "./format.js";

const MOST = 200;
const TOGETHER_S = { request: 15 }; // what is usual must not crowd out the rest
const USUALLY_S = 2;

const plural = (count, one) => `${whole(count)} ${one}${count === 1 ? "" : "s"}`;

// How each counter reads; all of them are sums since the server started.
const KINDS = [
  { kind: "compaction", read: (now) => now.kv.compactions, say: (count) => plural(count, "compaction") },
  { kind: "move", read: (now) => now.kv.moved_bytes, say: (count) => `${bytes(count)} moved` },
  { kind: "release", read: (now) => now.kv.released_bytes, say: (count) => `${bytes(count)} given back to the OS` },
  { kind: "release", read: (now) => now.kv.prepared_bytes, say: (count) => `${bytes(count)} taken ahead from the OS` },
  { kind: "eviction", read: (now) => now.kv.evictions * now.kv.bytes_per_unit, say: (count) => `${bytes(count)} of cached prefixes evicted` },
  { kind: "eviction", read: (now) => now.kv.snapshots_dropped, say: (count) => `${plural(count, "snapshot")} dropped` },
  { kind: "disk", read: (now) => now.kv.disk.loaded_tokens, say: (count) => `${plural(count, "token")} loaded from disk` },
  { kind: "disk", read: (now) => now.kv.disk.written_bytes, say: (count) => `${bytes(count)} written to disk` },
  { kind: "pressure", read: (now) => now.kv.disk.failed_loads, say: (count) => `${plural(count, "load")} from disk brought less than expected: the rest is computed` },
  { kind: "host", read: (now) => now.kv.host?.loaded_tokens ?? 0, say: (count) => `${plural(count, "token")} brought back from host memory` },
  { kind: "pin", read: (now) => now.kv.pins_refused, say: (count) => `${plural(count, "pin")} refused` },
  { kind: "pressure", read: (now) => now.kv.allocation_failures, say: (count) => `${plural(count, "request")} had to wait for memory` },
  { kind: "pressure", read: (now) => now.preemptions, say: (count) => `${plural(count, "preemption")}: memory given to others, recomputed later` },
  { kind: "pressure", read: (now) => now.rebuilds, say: (count) => `the backend's context was rebuilt${count > 1 ? ` ${count} times` : ""}` },
  { kind: "request", read: (now) => (now.finished.stop ?? 0) + (now.finished.length ?? 0), say: (count) => `${plural(count, "request")} answered` },
  { kind: "request", read: (now) => now.finished.cancelled ?? 0, say: (count) => `${plural(count, "request")} cancelled` },
  { kind: "pressure", read: (now) => (now.finished.error ?? 0) + (now.finished.timeout ?? 0), say: (count) => `${plural(count, "request")} failed` },
];

export class Events {
  constructor() {
    this.list = byId("events");
    this.before = null;
    this.open = new Map();
    this.inAll = 0;
    this.add(Date.now() / 1000, { kind: "page", say: () => "watching" }, 1);
  }

  /** Compare with the event before. */
  follow(now) {
    const counts = KINDS.map((each) => each.read(now));
    if (this.before) {
      KINDS.forEach((each, index) => {
        const more = counts[index] - this.before[index];
        if (more > 0) this.add(now.time, each, more);
      });
    }
    this.before = counts;
  }

  /** The stream begins anew, perhaps from another server: there is nothing to compare with. */
  restart() {
    this.before = null;
    this.open.clear();
  }

  /** The same again within a moment goes into the same line. */
  add(time, what, count) {
    let entry = this.open.get(what);
    if (!entry || time - entry.time > (TOGETHER_S[what.kind] ?? USUALLY_S)) {
      entry = { time, count: 0, node: make("li") };
      entry.node.dataset.kind = what.kind;
      entry.text = make("span");
      entry.node.append(make("time", "", clock(time)), entry.text);
      this.list.prepend(entry.node);
      this.open.set(what, entry);
      this.inAll += 1;
      while (this.list.childElementCount > MOST) this.list.lastElementChild.remove();
    }
    entry.count += count;
    setText(entry.text, what.say(entry.count));
  }
}

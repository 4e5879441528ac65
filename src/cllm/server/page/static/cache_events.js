// What comes into the prefix tree and leaves it, by the names of blocks. A chain that grows is one line that grows.

import { byId, make, setText } from "./dom.js";
import { clock, whole } from "./format.js";

const MOST = 60;
const TOGETHER_S = { stored: 15, removed: 2 };
const OTHERS = { cleared: "the cache was cleared", gap: "more happened than can be shown" };

export class CacheEvents {
  constructor() {
    this.list = byId("cache-events");
    this.restart();
  }

  /** The stream restarts: new events need not follow on earlier ones. */
  restart() {
    this.growing = new Map(); // lines by the name of their last block
    this.removed = null;
  }

  follow(entries, now, blockTokens) {
    const { blocks_stored: stored, blocks_removed: removed } = now.kv;
    const facts = byId("cache-events-facts");
    facts.hidden = this.list.hidden = false;
    setText(facts, `Blocks stored ${whole(stored)}, removed ${whole(removed)} since the start`);
    for (const entry of entries) {
      if (entry.kind === "stored") this.store(entry, now.time, blockTokens);
      else if (entry.kind === "removed") this.remove(entry, now.time, blockTokens);
      else this.other(entry, now.time);
    }
    while (this.list.childElementCount > MOST) this.list.lastElementChild.remove();
  }

  store({ blocks, name, parent }, time, blockTokens) {
    const known = this.growing.get(parent);
    const line = known && time - known.time < TOGETHER_S.stored ? known : this.line("stored", time);
    this.growing.delete(parent);
    this.growing.set(name, line);
    for (const [end, { time: began }] of this.growing) if (time - began >= TOGETHER_S.stored) this.growing.delete(end);
    this.say(line, "stored", blocks, name, blockTokens);
  }

  remove({ blocks, name }, time, blockTokens) {
    if (!this.removed || time - this.removed.time >= TOGETHER_S.removed) this.removed = this.line("removed", time);
    this.say(this.removed, "removed", blocks, name, blockTokens);
  }

  other({ kind }, time) {
    setText(this.line(kind, time).text, OTHERS[kind] ?? kind);
    this.restart();
  }

  say(line, kind, blocks, name, blockTokens) {
    line.blocks += blocks;
    setText(line.text, `${kind} ${whole(line.blocks)} ${line.blocks === 1 ? "block" : "blocks"}, ${whole(line.blocks * blockTokens)} tokens `);
    line.text.append(make("code", "", name));
  }

  line(kind, time) {
    const line = { time, blocks: 0, node: make("li"), text: make("span") };
    line.node.dataset.kind = kind;
    line.node.append(make("time", "", clock(time)), line.text);
    this.list.prepend(line.node);
    return line;
  }
}

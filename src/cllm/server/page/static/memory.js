// Memory over the last minutes: what the cache uses and holds, what is taken from the OS, and the process as a whole.

import { byId, setText } from "./dom.js";
import { bytes } from "./format.js";
import { cssColour, onTheme } from "./theme.js";

const SHORTEST_SPAN_S = 30;
const SPAN_S = 180;
const MOST = 2048;

export class MemoryChart {
  constructor() {
    this.canvas = byId("memory");
    this.context = this.canvas.getContext("2d");
    this.samples = [];
    onTheme(() => this.request());
    new ResizeObserver(() => this.request()).observe(this.canvas);
  }

  add(now, takenBytes) {
    const unit = now.kv.bytes_per_unit;
    const sample = {
      time: now.time,
      used: now.kv.referenced * unit,
      cached: now.kv.evictable * unit,
      arena: takenBytes,
      process: now.resident_bytes ?? 0,
      budget: now.kv.total * unit,
    };
    this.samples.push(sample);
    if (this.samples.length > MOST) this.samples.splice(0, MOST / 4);
    for (const name of ["used", "cached", "arena", "process", "budget"]) setText(byId(`m-${name}`), bytes(sample[name]));
    this.request();
  }

  request() {
    this.requested ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.requested = undefined;
    const scale = window.devicePixelRatio || 1;
    const width = this.canvas.clientWidth;
    const height = this.canvas.clientHeight;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    const last = this.samples[this.samples.length - 1];
    if (!last || !width || !height) return;
    const { context } = this;
    context.scale(scale, scale);
    const span = Math.min(SPAN_S, Math.max(SHORTEST_SPAN_S, last.time - this.samples[0].time));
    const shown = this.samples.filter((sample) => sample.time >= last.time - span);
    let most = Math.max(...shown.map((sample) => Math.max(sample.process, sample.arena, sample.used + sample.cached)));
    if (last.budget < 1.7 * most) most = Math.max(most, last.budget);
    most *= 1.08;
    const x = (sample) => width - ((last.time - sample.time) / span) * width;
    const y = (value) => height - (value / most) * height;
    const ticks = this.grid(width, height, most);
    this.area(shown, x, (sample) => y(sample.used + sample.cached), height, cssColour("held"));
    this.area(shown, x, (sample) => y(sample.used), height, cssColour("used"));
    this.line(shown, x, (sample) => y(sample.arena), cssColour("arena"));
    if (last.process) this.line(shown, x, (sample) => y(sample.process), cssColour("process"));
    if (last.budget <= most) this.line([{ at: 0 }, { at: width }], (end) => end.at, () => y(last.budget), cssColour("budget"), [5, 4]);
    this.label(ticks);
    const covered = span < 60 ? `last ${Math.round(span)} s` : `last ${Math.round(span / 60)} min`;
    setText(byId("memory-facts"), last.budget <= most ? covered : `${covered}; the budget is higher than what is drawn`);
    this.canvas.setAttribute("aria-label", `Memory over time: ${bytes(last.used)} of K/V in use, ${bytes(last.cached)} cached${last.process ? `, process ${bytes(last.process)} resident` : ""}`);
  }

  /** Lines at round values; returns where they are. */
  grid(width, height, most) {
    const { context } = this;
    const ticks = [];
    context.strokeStyle = cssColour("line");
    context.lineWidth = 1;
    context.setLineDash([]);
    const step = niceStep(most / 4);
    for (let value = step; value < most; value += step) {
      const at = Math.round(height - (value / most) * height) + 0.5;
      context.beginPath();
      context.moveTo(0, at);
      context.lineTo(width, at);
      context.stroke();
      ticks.push({ text: bytes(value), at });
    }
    return ticks;
  }

  /** Above everything that was drawn, so that they can be read. */
  label(ticks) {
    const { context } = this;
    context.font = "11px system-ui, sans-serif";
    for (const { text, at } of ticks) {
      const top = Math.max(at - 14, 0);
      context.globalAlpha = 0.75;
      context.fillStyle = cssColour("panel");
      context.fillRect(0, top, context.measureText(text).width + 6, 13);
      context.globalAlpha = 1;
      context.fillStyle = cssColour("muted");
      context.fillText(text, 2, top + 10);
    }
  }

  area(samples, x, y, floor, colour) {
    const { context } = this;
    context.fillStyle = colour;
    context.beginPath();
    context.moveTo(x(samples[0]), floor);
    for (const sample of samples) context.lineTo(x(sample), y(sample));
    context.lineTo(x(samples[samples.length - 1]), floor);
    context.fill();
  }

  line(samples, x, y, colour, dash = []) {
    const { context } = this;
    context.strokeStyle = colour;
    context.lineWidth = 1.5;
    context.setLineDash(dash);
    context.beginPath();
    for (const sample of samples) context.lineTo(x(sample), y(sample));
    context.stroke();
  }
}

/** The largest round number of bytes that is not above `value`. */
function niceStep(value) {
  return 2 ** Math.floor(Math.log2(Math.max(value, 1)));
}

// The memory as a map: a pixel per cell in an image of its own, which the canvas shows enlarged. Only what changed is
// painted, once per frame.

import { byId, setText } from "./dom.js";
import { CACHED, PRIVATE, SHARED, STATE, WINDOW, groupOf, holderOf, pixelOf, rgbOf, rgbOfCss, stateOf } from "./colour.js";
import { cssColour, onTheme } from "./theme.js";
import { whole } from "./format.js";

const LARGEST_CELL = 15;
const GLOW_MS = 600;
const MOST_GLOWING = 400;
const HELD = { [CACHED]: "cached, not in use", [SHARED]: "shared and in use", [PRIVATE]: "private" };
const KEPT = { [CACHED]: "kept snapshot", [SHARED]: "kept snapshot and in use", [PRIVATE]: "running" };
const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class ArenaMap {
  constructor(arena, nameOf) {
    this.arena = arena;
    this.nameOf = nameOf; // what a holder is called
    this.canvas = byId("map");
    this.context = this.canvas.getContext("2d", { alpha: false });
    this.image = document.createElement("canvas");
    this.imageContext = this.image.getContext("2d", { alpha: false });
    this.columns = 0;
    this.highlighted = new Set();
    this.glowing = []; // [start, end, since]
    this.cursor = -1;
    this.requested = 0;
    this.frame = 0;
    this.frameTimes = [];
    onTheme(() => this.recolour());
    new ResizeObserver(() => this.resize()).observe(this.canvas.parentElement);
    this.listen();
    this.recolour();
  }

  /** Cells in these ranges have changed. */
  changed(ranges, isNew) {
    if (isNew) {
      this.resize();
      return;
    }
    const now = performance.now();
    for (let at = 0; at < ranges.length; at += 2) {
      this.paint(ranges[at], ranges[at + 1]);
      if (!calm.matches && this.glowing.length < MOST_GLOWING) this.glowing.push([ranges[at], ranges[at + 1], now]);
    }
    this.request();
  }

  highlight(holders) {
    this.highlighted = new Set(holders);
    this.pixels.clear();
    this.paint(0, this.arena.cells);
    this.request();
  }

  recolour() {
    this.pixels = new Map();
    this.background = cssColour("panel");
    this.mark = cssColour("mark");
    this.ready = pixelOf(rgbOfCss(cssColour("ready")));
    this.released = pixelOf(rgbOfCss(cssColour("released")));
    if (this.columns) {
      this.buffer.fill(pixelOf(rgbOfCss(this.background))); // beyond the last cell, too
      this.paint(0, this.arena.cells);
      this.request();
    }
  }

  /** Cells as large as all of them fit; where not even pixels are enough, one pixel stands for several cells. */
  resize() {
    const { cells } = this.arena;
    const scale = window.devicePixelRatio || 1;
    const width = Math.floor(this.canvas.parentElement.clientWidth * scale);
    if (!cells || !width) return;
    const height = Math.floor(Math.min(420, Math.max(180, window.innerHeight * 0.42)) * scale);
    this.perPixel = Math.max(1, Math.ceil(cells / (width * height)));
    const shown = Math.ceil(cells / this.perPixel);
    let size = Math.max(1, Math.min(Math.floor(LARGEST_CELL * scale), Math.floor(Math.sqrt((width * height) / shown))));
    while (size > 1 && Math.ceil(shown / Math.floor(width / size)) * size > height) size -= 1;
    this.size = size;
    this.columns = Math.floor(width / size);
    this.rows = Math.ceil(shown / this.columns);
    this.canvas.width = width;
    this.canvas.height = this.rows * size;
    this.canvas.style.height = `${(this.rows * size) / scale}px`;
    this.image.width = this.columns;
    this.image.height = this.rows;
    this.data = this.imageContext.createImageData(this.columns, this.rows);
    this.buffer = new Uint32Array(this.data.data.buffer);
    this.buffer.fill(pixelOf(rgbOfCss(this.background)));
    this.glowing = [];
    this.paint(0, cells);
    this.request();
  }

  paint(start, end) {
    if (!this.columns) return;
    const { codes, extentCells } = this.arena;
    const { buffer, perPixel } = this;
    const first = Math.floor(start / perPixel);
    const last = Math.ceil(end / perPixel);
    for (let pixel = first; pixel < last; pixel += 1) {
      let cell = pixel * perPixel;
      const stop = Math.min(cell + perPixel, this.arena.cells);
      while (cell < stop - 1 && codes[cell] === 0) cell += 1;
      const code = codes[cell];
      if (code) buffer[pixel] = this.pixelFor(code);
      else if (this.arena.isResident(cell)) buffer[pixel] = this.ready;
      else {
        // Most of a large arena is like this: fill up to the end of the extent at once.
        const extentEnd = (Math.floor(cell / extentCells) + 1) * extentCells;
        buffer[pixel] = this.released;
        if (perPixel === 1) {
          while (pixel + 1 < last && pixel + 1 < extentEnd && codes[pixel + 1] === 0) buffer[(pixel += 1)] = this.released;
        }
      }
    }
    const top = Math.floor(first / this.columns);
    const bottom = Math.ceil(last / this.columns);
    this.top = this.top === undefined ? top : Math.min(this.top, top);
    this.bottom = this.bottom === undefined ? bottom : Math.max(this.bottom, bottom);
  }

  pixelFor(code) {
    let pixel = this.pixels.get(code);
    if (pixel === undefined) {
      let rgb = rgbOf(code);
      if (this.highlighted.size && !this.highlighted.has(holderOf(code))) {
        const back = rgbOfCss(this.background);
        rgb = rgb.map((value, channel) => Math.round(value * 0.25 + back[channel] * 0.75));
      }
      pixel = pixelOf(rgb);
      if (this.pixels.size > 50000) this.pixels.clear();
      this.pixels.set(code, pixel);
    }
    return pixel;
  }

  request() {
    if (!this.requested) this.requested = requestAnimationFrame((now) => this.draw(now));
  }

  draw(now) {
    this.requested = 0;
    if (!this.columns) return;
    const began = performance.now();
    if (this.top !== undefined) {
      this.imageContext.putImageData(this.data, 0, 0, 0, this.top, this.columns, this.bottom - this.top);
      this.top = this.bottom = undefined;
    }
    const { context, size } = this;
    context.imageSmoothingEnabled = false;
    context.fillStyle = this.background;
    context.fillRect(this.columns * size, 0, this.canvas.width, this.canvas.height);
    context.drawImage(this.image, 0, 0, this.columns * size, this.rows * size);
    this.drawGlow(now);
    if (size >= 5) this.drawGrid();
    if (this.cursor >= 0) this.drawCursor();
    this.frameTimes.push(performance.now() - began);
    if (this.frameTimes.length > 1000) this.frameTimes.shift();
    if (this.glowing.length) this.request();
  }

  drawGrid() {
    const { context, size } = this;
    context.fillStyle = this.background;
    for (let column = 1; column <= this.columns; column += 1) context.fillRect(column * size - 1, 0, 1, this.canvas.height);
    for (let row = 1; row <= this.rows; row += 1) context.fillRect(0, row * size - 1, this.canvas.width, 1);
  }

  drawGlow(now) {
    const { context } = this;
    this.glowing = this.glowing.filter(([, , since]) => now - since < GLOW_MS);
    context.fillStyle = this.mark;
    for (const [start, end, since] of this.glowing) {
      context.globalAlpha = 0.45 * (1 - Math.max(0, now - since) / GLOW_MS);
      this.fillCells(Math.floor(start / this.perPixel), Math.ceil(end / this.perPixel));
    }
    context.globalAlpha = 1;
  }

  fillCells(start, end) {
    const { context, size, columns } = this;
    for (let at = start; at < end; ) {
      const row = Math.floor(at / columns);
      const stop = Math.min(end, (row + 1) * columns);
      context.fillRect((at % columns) * size, row * size, (stop - at) * size, size);
      at = stop;
    }
  }

  drawCursor() {
    const { context, size, columns } = this;
    const place = Math.floor(this.cursor / this.perPixel);
    const reach = Math.max(size, 5);
    context.strokeStyle = this.mark;
    context.lineWidth = 2;
    context.strokeRect((place % columns) * size + (size - reach) / 2, Math.floor(place / columns) * size + (size - reach) / 2, reach, reach);
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointermove", (event) => this.pointAt(event));
    canvas.addEventListener("pointerdown", (event) => this.pointAt(event));
    canvas.addEventListener("pointerleave", () => this.moveCursor(-1));
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
      const target = { Home: 0, End: this.arena.cells - 1 }[event.key] ?? (step && Math.max(this.cursor, 0) + step * this.perPixel);
      if (target === undefined) return;
      event.preventDefault();
      this.moveCursor(Math.min(Math.max(target, 0), this.arena.cells - 1));
    });
  }

  pointAt(event) {
    const scale = this.canvas.width / this.canvas.clientWidth;
    const column = Math.min(this.columns - 1, Math.floor((event.offsetX * scale) / this.size));
    const row = Math.floor((event.offsetY * scale) / this.size);
    const cell = (row * this.columns + column) * this.perPixel;
    this.moveCursor(cell < this.arena.cells ? cell : -1);
  }

  moveCursor(cell) {
    this.cursor = cell;
    this.request();
    if (cell >= 0) setText(byId("map-cell"), this.describe(cell));
  }

  describe(cell) {
    const code = this.arena.codes[cell];
    const name = `Cell ${whole(cell)}`;
    if (!code) return `${name}: free, ${this.arena.isResident(cell) ? "ready to be used" : "its memory is returned to the OS"}`;
    const group = { [WINDOW]: "window, ", [STATE]: "state, " }[groupOf(code)] ?? "";
    const state = (group ? KEPT : HELD)[stateOf(code)];
    return `${name}: ${group}${state}; ${this.nameOf(holderOf(code), stateOf(code))}`;
  }
}

// The memory as this page knows it: a code for every cell, a bit for every extent, and how many there are of each kind.

import { CACHED, FULL, PRIVATE, SHARED, groupOf, stateOf } from "./colour.js";

export class Arena {
  constructor() {
    this.cells = 0;
    this.extentCells = 1;
    this.codes = new Int32Array(0);
    this.resident = new Uint8Array(0);
    this.takenCells = 0; // those in extents whose memory is taken from the OS
    this.counts = { private: 0, shared: 0, cached: 0, apart: 0, ready: 0, released: 0 };
  }

  /** Take in an event; returns the changed ranges of cells as [start, end, start, end, …]. */
  apply(event) {
    const isNew = "cells" in event;
    if (isNew) this.reset(event);
    const changed = event.map ? this.fill(event.map) : [];
    if (event.resident) this.fillResident(event.resident, isNew ? null : changed);
    if (isNew || changed.length) this.count();
    return isNew ? [0, this.cells] : changed;
  }

  isResident(cell) {
    const extent = Math.floor(cell / this.extentCells);
    return (this.resident[extent >> 3] >> (extent & 7)) & 1;
  }

  reset(event) {
    this.cells = event.cells;
    this.extentCells = event.extent_cells;
    this.codes = new Int32Array(event.cells);
  }

  fill(map) {
    const lengths = int32(map.lengths);
    const codes = int32(map.codes);
    const starts = map.starts && int32(map.starts);
    const changed = [];
    let next = 0;
    for (let run = 0; run < codes.length; run += 1) {
      const start = starts ? starts[run] : next;
      next = start + lengths[run];
      this.codes.fill(codes[run], start, next);
      if (changed.length && changed[changed.length - 1] === start) changed[changed.length - 1] = next;
      else changed.push(start, next);
    }
    return changed;
  }

  fillResident(packed, changed) {
    const bits = bytesOf(packed);
    if (changed) {
      for (let byte = 0; byte < bits.length; byte += 1) {
        const flipped = bits[byte] ^ this.resident[byte];
        for (let bit = 0; flipped >> bit; bit += 1) {
          if ((flipped >> bit) & 1) {
            const start = (byte * 8 + bit) * this.extentCells;
            changed.push(start, Math.min(start + this.extentCells, this.cells));
          }
        }
      }
    }
    this.resident = bits;
  }

  count() {
    const states = [0, 0, 0, 0];
    let ofOthers = 0; // cells of layers that do not keep all tokens
    let ready = 0;
    let residentCells = 0;
    const { codes, extentCells, resident } = this;
    for (let start = 0, extent = 0; start < this.cells; start += extentCells, extent += 1) {
      const end = Math.min(start + extentCells, this.cells);
      const isResident = (resident[extent >> 3] >> (extent & 7)) & 1;
      const freeBefore = states[0];
      for (let cell = start; cell < end; cell += 1) {
        const code = codes[cell];
        if (groupOf(code) === FULL) states[stateOf(code)] += 1;
        else ofOthers += 1;
      }
      if (isResident) {
        ready += states[0] - freeBefore;
        residentCells += end - start;
      }
    }
    this.takenCells = residentCells;
    this.counts = {
      private: states[PRIVATE],
      shared: states[SHARED],
      cached: states[CACHED],
      apart: ofOthers,
      ready,
      released: states[0] - ready,
    };
  }
}

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at += 1) bytes[at] = text.charCodeAt(at);
  return bytes;
}

function int32(base64) {
  return new Int32Array(bytesOf(base64).buffer);
}

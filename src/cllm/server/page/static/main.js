// Puts the parts together: the stream feeds the arena, and everything shows what it says.

import { byId, setText } from "./dom.js";
import { Arena } from "./arena.js";
import { ArenaMap } from "./map.js";
import { Chat } from "./chat.js";
import { Events } from "./events.js";
import { Kept } from "./kept.js";
import { MemoryChart } from "./memory.js";
import { ModelList } from "./model_list.js";
import { Groups } from "./groups.js";
import { PRIVATE } from "./colour.js";
import { PrefixTree } from "./tree.js";
import { Replicas } from "./replicas.js";
import { Requests } from "./requests.js";
import { Selection } from "./selection.js";
import { CacheEvents } from "./cache_events.js";
import { bytes, percent, rate, whole } from "./format.js";
import { follow } from "./stream.js";
import { models } from "./models.js";
import { onTheme } from "./theme.js";

const RATE_SPAN_S = 2;

const arena = new Arena();
const selection = new Selection();
const requests = new Requests(selection);
const tree = new PrefixTree(selection);
const map = new ArenaMap(arena, (number, state) => (state === PRIVATE ? requests : tree).nameOf(number));
const groups = new Groups();
const chart = new MemoryChart();
const events = new Events();
const kept = new Kept(tree, selection);
const cacheEvents = new CacheEvents();
const replicas = new Replicas();
const shown = { geometry: null, prefixes: [], requests: [], kept: {}, replicas: undefined };
let pace = [];

selection.onChange(() => map.highlight([...requests.holdersOf(selection.key), ...tree.holdersOf(selection.key)]));
onTheme(() => {
  requests.render();
  tree.render();
  list.render();
});
const list = new ModelList();
const chat = new Chat();
models.follow();

follow((kind, event) => {
  const isWhole = kind === "whole";
  if (isWhole) {
    shown.geometry = { layout: event.layout, cellTokens: event.cell_tokens, cellBytes: event.cell_bytes };
    shown.blockTokens = event.block_tokens;
    groups.restart(event.groups);
    shown.replicas = event.replicas;
    setText(byId("model"), event.model);
    setText(byId("backend"), `${event.backend}, context ${whole(event.context)}`);
    events.restart();
    cacheEvents.restart();
    chat.showDefaults();
    pace = [];
  }
  const { now } = event;
  const ranges = arena.apply(event);
  if (ranges.length) map.changed(ranges, isWhole);
  shown.prefixes = event.prefixes ?? shown.prefixes;
  shown.requests = event.requests ?? shown.requests;
  shown.kept = event.kept ?? shown.kept;
  shown.replicas = event.replicas ?? shown.replicas;
  const { cellBytes, cellTokens } = shown.geometry;
  tree.show(shown.prefixes, now.prefixes, cellBytes / cellTokens);
  requests.show(shown.requests, now.requests);
  kept.show(shown.kept, now);
  replicas.show(shown.replicas);
  cacheEvents.follow(event.cache_events ?? [], now, shown.blockTokens);
  const takenBytes = shown.replicas ? now.kv.resident_bytes : arena.takenCells * cellBytes;
  chart.add(now, takenBytes);
  groups.show(now.kv);
  events.follow(now);
  showCounts(shown.geometry);
  showFigures(now);
  showOrder(now);
});

function showCounts({ layout, cellTokens, cellBytes }) {
  const unit = layout === "paged" ? "blocks" : "cells";
  setText(byId("map-facts"), `${whole(arena.cells)} ${unit} of ${whole(cellTokens)} tokens, ${bytes(cellBytes)} each`);
  const parts = [];
  for (const [name, count] of Object.entries(arena.counts)) {
    setText(byId(`n-${name}`), whole(count));
    parts.push(`${name} ${percent(count, arena.cells)}`);
  }
  byId("map").setAttribute("aria-label", `Map of KV memory, ${whole(arena.cells)} ${unit}: ${parts.join(", ")}`);
}

function showFigures(now) {
  pace = [...pace.filter((each) => each.time > now.time - RATE_SPAN_S), { time: now.time, tokens: now.generated_tokens }];
  const first = pace[0];
  const seconds = now.time - first.time;
  setText(byId("rate"), seconds > 0 ? rate((now.generated_tokens - first.tokens) / seconds) : "–");
  setText(byId("running"), whole(now.running));
  setText(byId("waiting"), whole(now.waiting));
  setText(byId("hit-rate"), percent(now.kv.hit_tokens, now.kv.query_tokens));
  setText(byId("kv-used"), bytes(now.kv.referenced * now.kv.bytes_per_unit));
}

/** How orderly memory is, and what was done about it since the server started. */
function showOrder({ kv, dropped_tokens: dropped }) {
  const parts = [
    `live sequences ${percent(kv.contiguity, 1)} contiguous`,
    `free runs ${whole(kv.free_segments)}, largest ${bytes(kv.largest_free_span * kv.bytes_per_unit)}`,
    `extents in use ${whole(kv.extents_used)}, needed ${whole(kv.extents_needed)}`,
    `given back ${bytes(kv.released_bytes)}`,
    `tokens dropped by windows ${whole(dropped)}`,
    `upkeep failures ${whole(kv.upkeep_failures)}`,
  ];
  setText(byId("map-order"), parts.join(" · "));
}

"""Views of the engine as server-sent events: `whole`, or `change` for watchers that have the view before it.

Both hold one JSON object; `change` leaves out what has not changed.

    version             goes up by one with every event
    model, backend      names
    groups              layers with equal needs: how many, and what they take
    layout, cell_tokens, cell_bytes, cells, extent_cells, context
    map                 runs of equal cells: {"lengths", "codes"} of all of them, or with "starts" of those that changed
    resident            a bit for every extent of `extent_cells` cells: its memory is taken from the OS
    prefixes            the largest nodes of the prefix tree
    requests            running ones first; `holders` are the numbers of its sequences
    kept                what `/kv` has in `details` of the disk and of pins
    replicas            of a cluster, each; there is no map then
    cache_events        what was stored in and removed from the prefix tree since the version before; not in `whole`
    now                 plain numbers: counters of the engine and the cache, resident bytes of the process

Columns of numbers are base64 of little-endian 32-bit integers: a hundred thousand of them cost a millisecond, as JSON
more than ten. The code of a cell is its holder's number times four plus its state: `CACHED`, `SHARED` or `PRIVATE`, and
above the bits of the number the group of layers that it belongs to, as numbered in `GROUPS`. 0 is free.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cllm.engine.stats import EngineView, RequestView
from cllm.kv.groups import GroupKind
from cllm.kv.view import FREE, GroupCells, KVView, PrefixView
from cllm.server.page.cache_events import short_name

CACHED, SHARED, PRIVATE = 1, 2, 3
GROUPS: dict[GroupKind, int] = {"full": 0, "window": 1, "state": 2}
GROUP_BIT = 29
_NUMBERS = (1 << GROUP_BIT - 2) - 1
"""A holder's number is shown in as many bits as the code of a cell leaves."""
_TEXT_LENGTH = 120

Cells = NDArray[np.int32]
TokenCounts = NDArray[np.integer[Any]]
TextOf = Callable[[Sequence[int]], str]


class Frame(NamedTuple):
    """What a watcher that has read everything knows."""

    version: int
    view: EngineView
    names: Mapping[str, Any]
    geometry: Mapping[str, Any]
    codes: Cells
    resident: str
    prefixes: list[dict[str, Any]]
    requests: list[dict[str, Any]]
    kept: Mapping[str, Any]
    replicas: Sequence[Mapping[str, Any]] | None
    cache_events: Sequence[Mapping[str, Any]]
    now: Mapping[str, Any]


class Source(NamedTuple):
    """What a frame is made of."""

    version: int
    view: EngineView
    names: Mapping[str, Any]
    now: Mapping[str, Any]
    text_of: TextOf | None
    """Turns the tokens that a prefix begins with into text; None where they are not shown."""
    kept: Mapping[str, Any] = {}
    cache_events: Sequence[Mapping[str, Any]] = ()
    replicas: Sequence[Mapping[str, Any]] | None = None


def frame_of(before: Frame | None, source: Source) -> Frame:
    """The frame after `before`. Parts that have not changed are the same objects."""
    version, view, names, now, text_of, kept, cache_events, replicas = source
    kv = view.kv
    now = {**now, "prefixes": kv.prefixes_in_all, "requests": view.requests_in_all}
    if before is not None and before.view is view:
        return before._replace(version=version, now=now, kept=kept, replicas=replicas, cache_events=cache_events)
    return Frame(
        version=version,
        view=view,
        names=names,
        geometry=_geometry(kv),
        codes=codes_of(kv),
        resident=_base64(np.packbits(kv.resident, bitorder="little")),
        prefixes=[_prefix(prefix, text_of) for prefix in kv.prefixes],
        requests=_requests(view),
        kept=kept,
        replicas=replicas,
        cache_events=cache_events,
        now=now,
    )


def whole(frame: Frame) -> bytes:
    return _event(
        "whole",
        {
            "version": frame.version,
            **frame.names,
            **frame.geometry,
            "map": _columns(*_runs(frame.codes)),
            "resident": frame.resident,
            "prefixes": frame.prefixes,
            "requests": frame.requests,
            "kept": frame.kept,
            **({} if frame.replicas is None else {"replicas": frame.replicas}),
            "now": frame.now,
        },
    )


def change(before: Frame, after: Frame) -> bytes:
    if before.geometry != after.geometry:
        return whole(after)
    content: dict[str, Any] = {"version": after.version, "now": after.now}
    if after.codes is not before.codes and (changed := _changes(before.codes, after.codes)):
        content["map"] = changed
    for part in ("resident", "prefixes", "requests", "kept", "replicas"):
        if (value := getattr(after, part)) != getattr(before, part):
            content[part] = value
    if after.cache_events:
        content["cache_events"] = after.cache_events
    return _event("change", content)


def codes_of(view: KVView) -> Cells:
    lengths, holders = _runs(view.holders)
    states = np.full(len(holders), CACHED, np.int32)
    states[np.isin(holders, _array(view.used_prefixes))] = SHARED
    states[np.isin(holders, _array(sequence.number for sequence in view.sequences))] = PRIVATE
    codes = ((holders & _NUMBERS) << 2) | states
    codes[holders == FREE] = 0
    codes = np.repeat(codes, lengths)
    for group in view.groups:
        codes[group.cells] = _codes_of_group(codes[group.cells], group)
    return codes


def _codes_of_group(codes: Cells, group: GroupCells) -> Cells:
    """What a prefix keeps may be in use though the prefix is not, and the other way round."""
    kept = (codes & ~3) | np.where(group.used, np.int32(SHARED), np.int32(CACHED))
    coded: Cells = np.where(codes & 3 == PRIVATE, codes, kept) | np.int32(GROUPS[group.kind] << GROUP_BIT)
    return coded


def _runs(cells: Cells) -> tuple[TokenCounts, Cells]:
    """How long each run of equal cells is, and what is in it."""
    starts = np.flatnonzero(np.diff(cells, prepend=~cells[:1]))
    return np.diff(starts, append=len(cells)), cells[starts]


def _changes(before: Cells, after: Cells) -> dict[str, str] | None:
    """Runs of cells that changed, or all cells where that is shorter."""
    changed = np.flatnonzero(before != after)
    if not len(changed):
        return None
    values = after[changed]
    breaks = np.flatnonzero((np.diff(changed) != 1) | (np.diff(values) != 0)) + 1
    first = np.concatenate(([0], breaks))
    runs = _runs(after)
    if 3 * len(first) > 2 * len(runs[0]):
        return _columns(*runs)
    lengths = np.diff(first, append=len(changed))
    return {"starts": _base64_of_int32(changed[first]), **_columns(lengths, values[first])}


def _columns(lengths: TokenCounts, codes: Cells) -> dict[str, str]:
    return {"lengths": _base64_of_int32(lengths), "codes": _base64_of_int32(codes)}


def _geometry(view: KVView) -> dict[str, Any]:
    return {
        "layout": view.layout,
        "cell_tokens": view.cell_tokens,
        "cell_bytes": view.cell_bytes,
        "cells": len(view.holders),
        "extent_cells": view.extent_cells,
    }


def _prefix(prefix: PrefixView, text_of: TextOf | None) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "number": prefix.number & _NUMBERS,
        "parent": prefix.parent & _NUMBERS,
        "tokens": prefix.tokens,
        "hits": prefix.hits,
        "users": prefix.users,
        "pins": prefix.pins,
        "snapshots": prefix.snapshots,
        "name": short_name(prefix.name),
    }
    if text_of is not None:
        shown["text"] = text_of(prefix.first_tokens)[:_TEXT_LENGTH]
    return shown


def _requests(view: EngineView) -> list[dict[str, Any]]:
    holders: dict[str, list[int]] = {}
    for sequence in view.kv.sequences:
        holders.setdefault(sequence.request_id, []).append(sequence.number & _NUMBERS)
    return [_request(request, holders.get(request.id, [])) for request in view.requests]


def _request(request: RequestView, holders: list[int]) -> dict[str, Any]:
    rounded = {"rate": round(request.rate, 1), "age_s": round(request.age_s, 1)}
    return {**request._asdict(), **rounded, "holders": holders}


def _array(numbers: Iterable[int]) -> Cells:
    return np.fromiter(numbers, np.int32)


def _base64_of_int32(numbers: NDArray[Any]) -> str:
    return _base64(numbers.astype("<i4"))


def _base64(values: NDArray[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


def _event(name: str, content: Mapping[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(content, separators=(',', ':'))}\n\n".encode()

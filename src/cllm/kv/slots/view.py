"""The view of slots and store. Made on the engine's thread, so its cost hardly depends on what is cached."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from operator import attrgetter

import numpy as np

from cllm.kv.ops import SlotGeometry
from cllm.kv.slots.index import CacheEntry
from cllm.kv.view import FIRST_TOKENS, MOST_NODES, MOST_PREFIXES, KVView, PrefixView, SequenceView

CELL_TOKENS = 64
_MOST_NUMBER = np.iinfo(np.int32).max


def slots_view(
    slots: Sequence[CacheEntry | None], saved: Sequence[CacheEntry], geometry: SlotGeometry, token_bytes: int
) -> KVView:
    """Slots in a row, each an extent of cells, including those not allocated. They share nothing, so every ended
    sequence, held in a slot or saved, is a prefix of its own."""
    per_slot = -(-geometry.slot_tokens // CELL_TOKENS)
    cells = np.zeros((geometry.slots, per_slot), np.int32)
    held: list[CacheEntry] = []
    sequences: list[SequenceView] = []
    for row, entry in zip(cells, slots, strict=False):
        if entry is None:
            continue
        number, tokens = number_of(entry), entry.length
        if (owner := entry.owner) is None:
            held.append(entry)
        else:
            tokens = owner.held
            sequences.append(SequenceView(number, owner.request_id, len(owner.tokens), owner.num_computed))
        row[: -(-tokens // CELL_TOKENS)] = number
    ended = [*held, *saved[:MOST_NODES]]
    return KVView(
        layout="slots",
        cell_tokens=CELL_TOKENS,
        cell_bytes=CELL_TOKENS * token_bytes,
        holders=cells.reshape(-1),
        resident=np.arange(geometry.slots) < len(slots),
        extent_cells=per_slot,
        prefixes=tuple(map(_prefix_view, nlargest(MOST_PREFIXES, ended, key=attrgetter("length")))),
        prefixes_in_all=len(held) + len(saved),
        used_prefixes=frozenset(),
        sequences=tuple(sequences),
    )


def number_of(entry: CacheEntry) -> int:
    """As a holder of cells."""
    return 1 + entry.number % _MOST_NUMBER


def _prefix_view(entry: CacheEntry) -> PrefixView:
    first: list[int] = []
    for node in reversed(list(entry.path())):
        first += memoryview(node.key[: (FIRST_TOKENS - len(first)) * 4]).cast("i")
        if len(first) >= FIRST_TOKENS:
            break
    return PrefixView(number_of(entry), 0, entry.length, entry.hits, 0, tuple(first), int(entry.pinned))

"""The slots and the store as a picture. It is made on the engine's thread, so it costs little whatever is cached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nlargest
from itertools import islice
from operator import attrgetter

import numpy as np

from cllm.kv.holders import Entry
from cllm.kv.ops import SlotGeometry
from cllm.kv.view import FIRST_TOKENS, MOST_NODES, MOST_PREFIXES, KVView, PrefixView, SequenceView

CELL_TOKENS = 64
_MOST_NUMBER = np.iinfo(np.int32).max


def picture(
    slots: Sequence[Entry | None], saved: Iterable[Entry], saved_in_all: int, geometry: SlotGeometry, token_bytes: int
) -> KVView:
    """Slots in a row, each an extent of cells, those included that are not taken. Nothing is shared between them, so
    every sequence that has ended, held in a slot or saved, is a prefix of its own."""
    per_slot = -(-geometry.slot_tokens // CELL_TOKENS)
    cells = np.zeros((geometry.slots, per_slot), np.int32)
    held: list[Entry] = []
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
    ended = [*held, *islice(saved, MOST_NODES)]
    return KVView(
        layout="slots",
        cell_tokens=CELL_TOKENS,
        cell_bytes=CELL_TOKENS * token_bytes,
        holders=cells.reshape(-1),
        resident=np.arange(geometry.slots) < len(slots),
        extent_cells=per_slot,
        prefixes=tuple(map(_prefix_view, nlargest(MOST_PREFIXES, ended, key=attrgetter("length")))),
        prefixes_in_all=len(held) + saved_in_all,
        used_prefixes=frozenset(),
        sequences=tuple(sequences),
    )


def number_of(entry: Entry) -> int:
    """As a holder of cells."""
    return 1 + entry.number % _MOST_NUMBER


def _prefix_view(entry: Entry) -> PrefixView:
    first: list[int] = []
    for node in reversed(list(entry.path())):
        first += memoryview(node.key[: (FIRST_TOKENS - len(first)) * 4]).cast("i")
        if len(first) >= FIRST_TOKENS:
            break
    return PrefixView(number_of(entry), 0, entry.length, entry.hits, 0, tuple(first), int(entry.pinned))

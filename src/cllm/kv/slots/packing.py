"""A saved sequence with its snapshots, as one piece of bytes for the disk.

saved bytes  snapshot  snapshot …   tokens, bytes; tokens, bytes; …   its tokens, number of snapshots
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cllm.kv.ops import SavedKV

MOST_PACKED = 3
"""Snapshots that go with a sequence: the first, which others may begin with, and the last two."""

_NUMBER = np.dtype(np.int64).itemsize


def pack(saved: SavedKV, tokens: int, snapshots: Mapping[int, SavedKV]) -> SavedKV:
    places = sorted(snapshots)
    places = [*places[:1], *places[1:][-(MOST_PACKED - 1) :]]
    states = [snapshots[place] for place in places]
    numbers = [number for place, state in zip(places, states, strict=True) for number in (place, state.nbytes)]
    tail = np.array([*numbers, tokens, len(places)], np.int64).view(np.uint8)
    return np.concatenate((saved, *states, tail))


def unpack(payload: SavedKV) -> tuple[int, dict[int, SavedKV]]:
    """How many tokens the saved bytes hold, and the snapshots; `payload`, an array of its own, is cut to the saved
    bytes. Raises `ValueError` if it is not what `pack` made."""
    tokens, count = _numbers(payload, payload.nbytes, 2)
    end = payload.nbytes - 2 * _NUMBER * (1 + count)
    numbers = _numbers(payload, payload.nbytes - 2 * _NUMBER, 2 * count)
    snapshots: dict[int, SavedKV] = {}
    for place, size in reversed(list(zip(numbers[::2], numbers[1::2], strict=True))):
        if not 0 < size <= end or not 0 < place <= tokens:
            raise ValueError("its snapshots are not where they should be")
        snapshots[place] = payload[end - size : end].copy()
        end -= size
    payload.resize(end, refcheck=False)
    return tokens, snapshots


def _numbers(payload: SavedKV, end: int, count: int) -> list[int]:
    start = end - count * _NUMBER
    if start < 0 or count < 0:
        raise ValueError("it is too short for its snapshots")
    found: list[int] = payload[start:end].copy().view(np.int64).tolist()
    return found

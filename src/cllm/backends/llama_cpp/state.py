"""A saved sequence that does not depend on how many slots there are.

llama.cpp writes a header, and then for each part of the memory (layers with a sliding window have a part of their own)
how many streams it has and the number of cells of every stream: zero for all but the sequence's own, whose cells
follow its number:

    header  streams  0  0  cells  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒  0  0  0    streams  0  0  cells  ▒▒▒▒▒▒▒▒  0  0  0

and reads only what comes from a memory with as many streams. When it reads, it does not matter which stream the cells
are in. So of a memory with one part we keep them as in the first of the most streams that there can be, and hand over
the beginning:

    header  streams  cells  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒  0  0  0  0  0  0 …

Of several parts we keep their cells, and where each part ends, and put them together when they are handed over.
Recurrent layers have no streams: what llama.cpp writes of them does not depend on the slots, and comes last.
`LlamaCppBackend.resizes_slots` tries whether a version of llama.cpp does it like this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cllm.errors import BackendError
from cllm.kv.ops import SavedKV

_NUMBER = np.dtype(np.uint32).itemsize
_HEADER = 2 * _NUMBER
MOST_PARTS = 2


class StateSize(NamedTuple):
    """The sizes of what llama.cpp writes of a sequence."""

    whole: int
    partial: int
    """The part of layers with a sliding window, or of recurrent ones, with a header."""


def portable_state(empty: SavedKV, slots: int, most_slots: int, recurrent: int = 0) -> PortableState:
    """`empty` is what llama.cpp writes of an empty sequence while there are `slots`; `recurrent`: how much of that,
    with a header, is of recurrent layers."""
    if recurrent == empty.size:
        return RecurrentState()
    if recurrent:
        if empty[_HEADER : empty.size - recurrent + _HEADER].view(np.uint32).tolist() != [slots, *[0] * slots]:
            raise BackendError("llama.cpp saves sequences in an unknown format")
        return PartedState(streams_in_last=False)
    parts, odd = divmod(empty.size - _HEADER, _NUMBER * (1 + slots))
    expected = [slots, *[0] * slots] * parts
    if odd or not 1 <= parts <= MOST_PARTS or empty[_HEADER:].view(np.uint32).tolist() != expected:
        raise BackendError("llama.cpp saves sequences in an unknown format")
    return WholeState(most_slots) if parts == 1 else PartedState()


class PortableState:
    """The content of slots in our form."""

    form: str
    """Equal ones can load each other's."""

    def save(self, read: Callable[[SavedKV], None], size: StateSize, shortest: int, slot: int, slots: int) -> SavedKV:
        """What `read` writes of a slot, in our form. `shortest`: see `SlotOps`."""
        raise NotImplementedError

    def for_slots(self, saved: SavedKV, slots: int) -> SavedKV:
        """The state as llama.cpp reads it with this number of slots. Valid until the next call."""
        raise NotImplementedError

    def shortest(self, saved: SavedKV) -> int:
        return 0


class WholeState(PortableState):
    """The state of a memory with one part: nothing is copied."""

    def __init__(self, most_slots: int) -> None:
        self._most_slots = most_slots
        self.form = f"{most_slots} slots at most"

    def save(self, read: Callable[[SavedKV], None], size: StateSize, shortest: int, slot: int, slots: int) -> SavedKV:
        before, after = _NUMBER * slot, _NUMBER * (slots - 1 - slot)
        room = np.empty(size.whole - after + _NUMBER * (self._most_slots - 1), np.uint8)
        read(room[: size.whole])
        _check(room[_HEADER : size.whole], slot, slots)
        room[size.whole - after :] = 0
        saved = room[before:]
        saved[:_HEADER] = room[:_HEADER].copy()
        return saved

    def for_slots(self, saved: SavedKV, slots: int) -> SavedKV:
        saved[_HEADER : _HEADER + _NUMBER].view(np.uint32)[0] = slots
        return saved[: saved.size - _NUMBER * (self._most_slots - slots)]


class RecurrentState(PortableState):
    """The state of recurrent layers alone: as llama.cpp writes it."""

    form = "a state"

    def save(self, read: Callable[[SavedKV], None], size: StateSize, shortest: int, slot: int, slots: int) -> SavedKV:
        saved = np.empty(size.whole, np.uint8)
        read(saved)
        return saved

    def for_slots(self, saved: SavedKV, slots: int) -> SavedKV:
        return saved


class PartedState(PortableState):
    """The state of a memory with two parts: header, size of the first one's cells, `shortest`, cells of both."""

    _NUMBERS = 2 * np.dtype(np.uint64).itemsize

    def __init__(self, *, streams_in_last: bool = True) -> None:
        """Otherwise the last part is that of recurrent layers."""
        self._streams_in_last = streams_in_last
        self.form = "two parts" if streams_in_last else "cells and a state"

    def save(self, read: Callable[[SavedKV], None], size: StateSize, shortest: int, slot: int, slots: int) -> SavedKV:
        state = np.empty(size.whole, np.uint8)
        read(state)
        start, head, rest = size.whole - size.partial + _HEADER, _NUMBER * (1 + slot), _NUMBER * (slots - 1 - slot)
        cells = []
        for part, streams in ((state[_HEADER:start], True), (state[start:], self._streams_in_last)):
            if streams:
                _check(part, slot, slots)
            cells.append(part[head : part.size - rest] if streams else part)
        numbers = np.array([cells[0].size, shortest], np.uint64).view(np.uint8)
        return np.concatenate([state[:_HEADER], numbers, *cells])

    def for_slots(self, saved: SavedKV, slots: int) -> SavedKV:
        start = _HEADER + self._NUMBERS
        first = start + int(self._numbers(saved)[0])
        streams, rest = np.array([slots], np.uint32).view(np.uint8), np.zeros(_NUMBER * (slots - 1), np.uint8)
        last: Sequence[SavedKV] = (streams, saved[first:], rest) if self._streams_in_last else (saved[first:],)
        return np.concatenate((saved[:_HEADER], streams, saved[start:first], rest, *last))

    def shortest(self, saved: SavedKV) -> int:
        return int(self._numbers(saved)[1])

    def _numbers(self, saved: SavedKV) -> NDArray[np.uint64]:
        return saved[_HEADER : _HEADER + self._NUMBERS].view(np.uint64)


def _check(part: SavedKV, slot: int, slots: int) -> None:
    """Checks that only the slot's own stream has cells."""
    head, rest = _NUMBER * (1 + slot), _NUMBER * (slots - 1 - slot)
    if part[:head].view(np.uint32).tolist() != [slots, *[0] * slot] or part[part.size - rest :].any():
        raise BackendError("llama.cpp saves sequences in an unknown format")

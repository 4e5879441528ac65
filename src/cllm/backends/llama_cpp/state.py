"""A saved sequence that does not depend on how many slots there are.

llama.cpp writes a header, then how many streams of memory there are, then the number of cells of every stream: zero
for all but the sequence's own, whose cells follow its number:

    header  streams  0  0  cells  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒  0  0  0

and reads only what comes from a memory with as many streams. When it reads, it does not matter which stream the cells
are in. So we keep them as in the first of the most streams that there can be, and hand over the beginning:

    header  streams  cells  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒  0  0  0  0  0  0 …

A model whose memory has several parts is saved differently; `LlamaCppBackend.resizes_slots` tries it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cllm.errors import BackendError
from cllm.kv.ops import SavedKV

_NUMBER = np.dtype(np.uint32).itemsize


class PortableState:
    """`size_of_empty` is what llama.cpp writes of an empty sequence while there are `slots`."""

    def __init__(self, size_of_empty: int, slots: int, most_slots: int) -> None:
        self._head = size_of_empty - _NUMBER * (1 + slots)
        self._most_slots = most_slots

    def save(self, read: Callable[[SavedKV], None], size: int, slot: int, slots: int) -> SavedKV:
        """What `read` writes of a slot, `size` bytes, in our form."""
        head, before, after = self._head, _NUMBER * slot, _NUMBER * (slots - 1 - slot)
        room = np.empty(size - after + _NUMBER * (self._most_slots - 1), np.uint8)
        read(room[:size])
        numbers = room[head : head + _NUMBER + before].view(np.uint32).tolist()
        if numbers != [slots, *[0] * slot] or room[size - after : size].any():
            raise BackendError("llama.cpp saves sequences in an unknown format")
        room[size - after :] = 0
        saved = room[before:]
        saved[:head] = room[:head].copy()
        return saved

    def for_slots(self, saved: SavedKV, slots: int) -> SavedKV:
        """The state as llama.cpp reads it with this number of slots. Valid until the next call."""
        saved[self._head : self._head + _NUMBER].view(np.uint32)[0] = slots
        return saved[: saved.size - _NUMBER * (self._most_slots - slots)]

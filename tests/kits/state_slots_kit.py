"""Slots that carry a state beside their cells, as llama.cpp keeps hybrid models, and a manager on them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm.backends.base import Chunk
from cllm.backends.fake import FakeBackend, _FakeSlots
from cllm.errors import BackendError, UnsupportedOperationError
from cllm.kv.ops import SavedKV, SlotGeometry
from cllm.kv.sizing import most_bytes
from cllm.kv.slots.manager import SlotKVManager
from kv_kit import BYTES_PER_TOKEN

STATE_BYTES = 1024


class StateSlots(_FakeSlots):
    """The state is the list of tokens that it has seen, so that a wrong one is noticed when it is used."""

    carries_state = True
    no_shift = "the state cannot be cut"

    def resize(self, slots: int) -> None:
        super().resize(slots)
        self._states: list[list[int]] = [[] for _ in range(slots)]

    def write(self, chunk: Chunk, tokens: NDArray[np.int32]) -> None:
        self._check(chunk.slot)
        assert chunk.start == len(self._states[chunk.slot]), "a state goes on from where it is"
        super().write(chunk, tokens)
        self._states[chunk.slot] += tokens.tolist()

    def _check(self, slot: int) -> None:
        cells = self._cells[slot]
        assert self._states[slot] == [cells[position] for position in range(len(cells))], "another sequence's state"

    def length(self, slot: int) -> int:
        return min(len(self._states[slot]), super().length(slot))

    def shortest(self, slot: int, *, moved: bool = False) -> int:
        return self.length(slot)

    def remove(self, slot: int, start: int, end: int | None = None) -> None:
        if end is not None or 0 < start < self.length(slot):
            raise UnsupportedOperationError("a state cannot be cut")
        super().remove(slot, start)
        if start == 0:
            self._states[slot] = []

    def save(self, slot: int) -> SavedKV:
        self._check(slot)
        return super().save(slot)

    def load(self, slot: int, saved: SavedKV) -> None:
        super().load(slot, saved)
        self._states[slot] = [self._cells[slot][position] for position in sorted(self._cells[slot])]

    def snapshot(self, slot: int) -> SavedKV:
        self._check(slot)
        state = self._states[slot]
        return np.array(state + [-1] * (STATE_BYTES // 4 - len(state)), np.int32).view(np.uint8)

    def restore(self, slot: int, snapshot: SavedKV, length: int) -> None:
        state = snapshot.view(np.int32)[:length].tolist()
        if len(state) < length or -1 in state:
            raise BackendError("the snapshot was taken elsewhere")
        self._states[slot] = state
        super().remove(slot, length)
        self._check(slot)


def state_slots(
    count: int = 4, slot_tokens: int = 64, *, store_sequences: int = 4, at_start: int | None = None, **options: Any
) -> tuple[FakeBackend, SlotKVManager]:
    """`store_sequences`: as many whole ones as bytes fit beside the slots."""
    backend = FakeBackend()
    geometry = SlotGeometry(count, slot_tokens, at_start=at_start)
    backend.allocate(geometry)
    ops = StateSlots(geometry)
    backend._memory = ops
    sizes = {"bytes_per_token": BYTES_PER_TOKEN, "state_bytes": STATE_BYTES}
    store_bytes = store_sequences * most_bytes(slot_tokens, BYTES_PER_TOKEN, STATE_BYTES)
    return backend, SlotKVManager(ops, geometry, **sizes, **({"store_bytes": store_bytes} | options))

"""Memory operations on llama.cpp's sequences; a slot is a sequence id, each with a stream of its own."""

from __future__ import annotations

import ctypes
from array import array
from functools import partial

import numpy as np

from cllm.backends.base import Chunk
from cllm.backends.llama_cpp.context import Context
from cllm.backends.llama_cpp.state import PortableState, StateSize, portable_state
from cllm.errors import BackendError, UnsupportedOperationError
from cllm.kv.ops import SavedKV
from cllm.machine import mib, read_memory_limits, tightest

_BYTES = ctypes.POINTER(ctypes.c_uint8)
_WINDOWS_ONLY = 1
"""llama.cpp's flag for the state of layers with a sliding window alone."""


class LlamaSlotOps:
    """`cllm.kv.ops.SlotOps` on one context; it stays valid when the context is rebuilt.

    What is saved can be loaded into any slot, and if it is `portable`, also when there are more or fewer of them.
    """

    def __init__(self, context: Context, *, type_k: str = "f16", portable: bool = False, slot_bytes: int = 0) -> None:
        self._context = context
        self._type_k = type_k
        self._slot_bytes = slot_bytes
        self._library = context.library
        self._scratch: SavedKV = np.empty(0, np.uint8)
        self._shifted = False
        """Whether there are keys that llama.cpp still has to rotate."""
        self._form: PortableState | None = None
        if portable:  # the context is new, so its slots are empty
            empty: SavedKV = np.empty(self._state_size(0), np.uint8)
            self._read(0, empty)
            self._form = portable_state(empty, context.slots, self._library.max_sequences)

    @property
    def no_shift(self) -> str | None:
        if self._type_k == "q4_0":
            return (
                "llama.cpp rotates cached keys again at every shift, which 4-bit keys do not survive; "
                "set resources.kv_type_k to q8_0 or f16"
            )
        if self._library.can_shift(self._context.memory):
            return None
        if self._context.window:
            return "layers with a sliding window keep only what is in it, unless kv.window.recent is set at the start"
        return "llama.cpp cannot shift positions of this model"

    def length(self, slot: int) -> int:
        last: int = self._library.position_max(self._context.memory, self._checked(slot))
        return last + 1

    def shortest(self, slot: int, *, moved: bool = False) -> int:
        first: int = self._library.position_min(self._context.memory, self._checked(slot))
        window, length = self._context.window, self.length(slot)
        if moved and 0 < window < length:  # llama.cpp saves of a window what the next position attends to
            return length - 1
        return first + window - 1 if first > 0 else 0

    def shortest_saved(self, saved: SavedKV) -> int:
        return 0 if self._form is None else self._form.shortest(saved)

    def remove(self, slot: int, start: int, end: int | None = None) -> None:
        if end is None and 0 < start < self.shortest(slot):
            raise BackendError(f"slot {slot} has dropped what layers with a window attend to before position {start}")
        removed = self._library.sequence_remove(
            self._context.memory, self._checked(slot), start, -1 if end is None else end
        )
        if not removed:
            raise BackendError(f"llama.cpp cannot remove positions [{start}, {end}) of slot {slot} of this model")

    def copy(self, source: int, target: int) -> None:
        """Through bytes: llama.cpp's own copy moves the whole stream, used or not, and only at the next decode, when
        the source may hold something else already."""
        size = self._state_size(source)
        if size > len(self._scratch):
            self._scratch = np.empty(2 * size, np.uint8)  # what is not used is never touched, so costs nothing
        self._read(source, self._scratch[:size])
        self._load(target, self._scratch[:size])

    @property
    def form(self) -> str:
        """The format of saved sequences: equal ones can load each other's."""
        return f"{self._context.slots} slots" if self._form is None else self._form.form

    def save(self, slot: int) -> SavedKV:
        size = self._state_size(slot)
        if self._form is not None:
            windows: int = self._library.state_size_ext(self._context.pointer, slot, _WINDOWS_ONLY)
            read, shortest = partial(self._read, slot), self.shortest(slot, moved=True)
            return self._form.save(read, StateSize(size, windows), shortest, slot, self._context.slots)
        saved: SavedKV = np.empty(size, np.uint8)
        self._read(slot, saved)
        return saved

    def load(self, slot: int, saved: SavedKV) -> None:
        self._load(slot, saved if self._form is None else self._form.for_slots(saved, self._context.slots))

    def _load(self, slot: int, saved: SavedKV) -> None:
        self._library.log.clear()
        address = saved.ctypes.data_as(_BYTES)
        taken: int = self._library.state_set(self._context.pointer, address, saved.size, self._checked(slot))
        if taken != saved.size:
            reason = self._library.log.reason()
            raise BackendError(f"llama.cpp cannot load {saved.size} saved bytes into slot {slot}: {reason}")

    def shift(self, slot: int, start: int, end: int | None, delta: int) -> None:
        memory = self._context.memory
        if (reason := self.no_shift) is not None:
            raise UnsupportedOperationError(reason)
        if self.length(slot) + delta > self._context.slot_tokens:
            raise BackendError(f"shifting slot {slot} by {delta} leads to negative positions")
        self._library.sequence_add(memory, slot, start, -1 if end is None else end, delta)
        self._shifted = True

    def settle(self) -> None:
        """Have llama.cpp rotate the keys of shifted slots now.

        It does so at the beginning of a decode, so one token is computed and removed again. Nothing may read the
        keys before, and no abort may leave them half rotated, or rotated twice.
        """
        if not self._shifted:
            return
        slot = min(range(self._context.slots), key=self.length)
        end = self.length(slot)
        with self._context.uninterrupted():
            self._context.decode([Chunk(array("i", [0]), end, False, slot)])
        self._shifted = False  # only now: a decode that failed has rotated nothing
        self.remove(slot, end)

    def no_room(self, slots: int) -> str | None:
        # llama.cpp writes to all of it, so the system would rather end the process than refuse it.
        more, limit = (slots - self._context.slots) * self._slot_bytes, tightest(read_memory_limits())
        return f"{slots} slots need {mib(more)} more, which exceeds {limit}" if more > limit.free else None

    def resize(self, slots: int) -> None:
        if (reason := self.no_room(slots)) is not None:
            raise BackendError(reason)
        self._context.close()
        self.forget()
        self._context.open(slots)

    def forget(self) -> None:
        """The context is new and empty."""
        self._shifted = False
        self._scratch = np.empty(0, np.uint8)

    def _state_size(self, slot: int) -> int:
        self.settle()
        size: int = self._library.state_size(self._context.pointer, self._checked(slot))
        return size

    def _read(self, slot: int, into: SavedKV) -> None:
        self._library.log.clear()
        written = self._library.state_get(self._context.pointer, into.ctypes.data_as(_BYTES), into.size, slot)
        if written != into.size:
            raise BackendError(f"llama.cpp cannot save slot {slot}: {self._library.log.reason()}")

    def _checked(self, slot: int) -> int:
        # llama.cpp ends the process on an id it does not know.
        if not 0 <= slot < self._context.slots:
            raise BackendError(f"slot {slot} does not exist: there are {self._context.slots}")
        return slot

"""Memory operations on llama.cpp's sequences; a slot is a sequence id, each with a stream of its own."""

from __future__ import annotations

import ctypes
from array import array
from functools import partial

import numpy as np

from cllm.backends.base import Chunk
from cllm.backends.llama_cpp.context import Context
from cllm.backends.llama_cpp.declarations import CONSTANTS
from cllm.backends.llama_cpp.state import PortableState, StateSize, portable_state
from cllm.errors import BackendError, UnsupportedOperationError
from cllm.kv.ops import SavedKV
from cllm.machine import mib, read_memory_limits, tightest

_BYTES = ctypes.POINTER(ctypes.c_uint8)
_ALL, _PARTIAL = CONSTANTS["LLAMA_STATE_SEQ_FLAGS_NONE"], CONSTANTS["LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY"]
"""llama.cpp's flags for all that it keeps of a sequence, and for what cannot be cut back: layers with a sliding window
and recurrent ones."""
NO_CUT = "the state of recurrent layers cannot be cut, and llama.cpp keeps that of the last position only"


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
            most, recurrent = self._library.max_sequences, self._size(0, _PARTIAL) if self.carries_state else 0
            self._form = portable_state(self._read(0, _ALL), context.slots, most, recurrent)

    @property
    def carries_state(self) -> bool:
        return self._context.carries_state

    @property
    def no_shift(self) -> str | None:
        if self.carries_state:
            return NO_CUT
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
        if self.carries_state:
            return self.length(slot)
        first: int = self._library.position_min(self._context.memory, self._checked(slot))
        window, length = self._context.window, self.length(slot)
        if moved and 0 < window < length:  # llama.cpp saves of a window what the next position attends to
            return length - 1
        return first + window - 1 if first > 0 else 0

    def shortest_saved(self, saved: SavedKV) -> int:
        return 0 if self._form is None else self._form.shortest(saved)

    def remove(self, slot: int, start: int, end: int | None = None) -> None:
        if self.carries_state and (start or end is not None):
            if start < (length := self.length(slot)):
                raise UnsupportedOperationError(f"cannot cut slot {slot} of {length} positions at {start}: {NO_CUT}")
            return
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
        size = self._size(source, _ALL)
        if size > len(self._scratch):
            self._scratch = np.empty(2 * size, np.uint8)  # what is not used is never touched, so costs nothing
        self._read_into(source, self._scratch[:size])
        self._load(target, self._scratch[:size])

    @property
    def form(self) -> str:
        """The format of saved sequences: equal ones can load each other's."""
        return f"{self._context.slots} slots" if self._form is None else self._form.form

    def save(self, slot: int) -> SavedKV:
        if self._form is None:
            return self._read(slot, _ALL)
        size = StateSize(self._size(slot, _ALL), self._size(slot, _PARTIAL))
        read, shortest = partial(self._read_into, slot), self.shortest(slot, moved=True)
        return self._form.save(read, size, shortest, slot, self._context.slots)

    def load(self, slot: int, saved: SavedKV) -> None:
        self._load(slot, saved if self._form is None else self._form.for_slots(saved, self._context.slots))

    def snapshot(self, slot: int) -> SavedKV:
        return self._read(slot, _PARTIAL)

    def restore(self, slot: int, snapshot: SavedKV, length: int) -> None:
        self._load(slot, snapshot, _PARTIAL)
        removed = self._library.sequence_remove(self._context.memory, slot, length, -1)
        if not removed or self.length(slot) != length:
            raise BackendError(f"llama.cpp cannot put slot {slot} back to position {length}")

    def _load(self, slot: int, saved: SavedKV, flags: int = _ALL) -> None:
        self._library.log.clear()
        address = saved.ctypes.data_as(_BYTES)
        taken: int = self._library.state_set(self._context.pointer, address, saved.size, self._checked(slot), flags)
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

    def _size(self, slot: int, flags: int) -> int:
        self.settle()
        size: int = self._library.state_size(self._context.pointer, self._checked(slot), flags)
        return size

    def _read(self, slot: int, flags: int) -> SavedKV:
        into: SavedKV = np.empty(self._size(slot, flags), np.uint8)
        self._read_into(slot, into, flags)
        return into

    def _read_into(self, slot: int, into: SavedKV, flags: int = _ALL) -> None:
        self._library.log.clear()
        address = into.ctypes.data_as(_BYTES)
        written = self._library.state_get(self._context.pointer, address, into.size, slot, flags)
        if written != into.size:
            raise BackendError(f"llama.cpp cannot save slot {slot}: {self._library.log.reason()}")

    def _checked(self, slot: int) -> int:
        # llama.cpp ends the process on an id it does not know.
        if not 0 <= slot < self._context.slots:
            raise BackendError(f"slot {slot} does not exist: there are {self._context.slots}")
        return slot

"""Buffers for blocks that wait to be written. They are reused: page faults cost more than the copying."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

AHEAD_BYTES = 16 << 20
"""Buffers allocated ahead by the writer's thread, to save the engine's thread the time."""


class Staging:
    """The writer's queue limits how many copies exist at once; up to `keep` bytes of buffers stay until `clear`."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._kept = 0
        self._free: dict[int, list[memoryview]] = {}
        self._lock = threading.Lock()
        self._wanted = 0
        """The size of buffers to allocate ahead, because there were none."""

    def copies(self, blocks: Sequence[memoryview]) -> list[memoryview]:
        return [self._copy(block) for block in blocks]

    def _copy(self, block: memoryview) -> memoryview:
        with self._lock:
            free = self._free.get(len(block))
            copy = free.pop() if free else None
            self._kept -= len(block) if copy is not None else 0
        if copy is None:
            return memoryview(bytearray(block))
        copy[:] = block
        return copy

    def give_back(self, copies: Sequence[memoryview]) -> None:
        """Return buffers that are no longer read."""
        with self._lock:
            for copy in copies:
                if self._kept + len(copy) <= self._keep:
                    self._free.setdefault(len(copy), []).append(copy)
                    self._kept += len(copy)

    def ready(self, size: int) -> int:
        """How many buffers of this size are ready. If there are none, `prepare` allocates some."""
        with self._lock:
            ready = len(self._free.get(size, ()))
            if not ready:
                self._wanted = size
            return ready

    def prepare(self, in_use: int) -> int:
        """Allocate one more buffer, if one is wanted and `in_use` bytes of copies leave room for it; returns its size.
        Releases the GIL."""
        size = self._wanted
        if size and not self._fits(size, in_use):
            self._drop_others(size, in_use)
        if not size or not self._fits(size, in_use):
            self._wanted = 0
            return 0
        fresh = np.empty(size, np.uint8)
        fresh.fill(0)
        self.give_back([fresh.data])
        return size

    def _fits(self, size: int, in_use: int) -> bool:
        return self._may_be_taken(size, in_use + self._kept)

    def _may_be_taken(self, size: int, beside: int) -> bool:
        return not beside or beside + size <= min(AHEAD_BYTES, self._keep)

    def _drop_others(self, wanted: int, in_use: int) -> None:
        """Another model's buffers use the whole limit: free some, if there is none of the wanted size."""
        with self._lock:
            if self._free.get(wanted) or not self._may_be_taken(wanted, in_use):
                return
            for size, copies in self._free.items():
                while copies and not self._fits(wanted, in_use):
                    copies.pop()
                    self._kept -= size

    def clear(self) -> None:
        """Free all buffers."""
        with self._lock:
            self._free = {}
            self._kept = 0

    @property
    def kept(self) -> int:
        return self._kept

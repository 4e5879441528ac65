"""Loads: cached content on its way back from disk or from host memory.

A load has a sequence of its own, which holds the cached prefix and the blocks being read, as a running sequence would.
When reading ends, the blocks that arrived intact join the prefix tree and the sequence is released. Waiting sequences
then find them like any other cached prefix: several can wait for one load, and one that stops waiting has nothing to
give back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import monotonic, sleep
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cllm.kv.sequence import KVSequence, PendingLoad


class Transfer(Protocol):
    """What the reader says about a load."""

    @property
    def done(self) -> bool: ...

    @property
    def loaded(self) -> int:
        """How many blocks, from the first on, arrived intact."""

    def cancel(self) -> None: ...


class LoadingSequence(KVSequence):
    """Holds the memory of a load. Its tokens are those of the prefix that will be cached if the load succeeds."""

    __slots__ = ()
    counts_as_query = False


class Load(PendingLoad):
    __slots__ = (
        "abandoned", "buffers", "deadline", "finished", "first", "holder", "more", "names", "requester", "transfer",
    )  # fmt: skip

    def __init__(
        self,
        requester: KVSequence | None,
        holder: LoadingSequence | None = None,
        *,
        first: int = 0,
        names: Sequence[bytes] = (),
        deadline: float = 0.0,
    ) -> None:
        self.requester = requester
        self.holder = holder
        self.first = first
        """The first of the holder's blocks that is read."""
        self.names = frozenset(names)
        self.deadline = deadline
        """Nobody waits longer than this."""
        self.buffers: Sequence[NDArray[np.uint8]] = ()
        self.transfer: Transfer | None = None
        self.finished = holder is None
        self.abandoned = False
        """Nobody waits any more, but the reader still owns the blocks."""
        self.more = False
        """All of it arrived, and a slower tier may have what follows."""

    @property
    def arrived(self) -> bool:
        return self.transfer is not None and self.transfer.done

    def end(self) -> None:
        """Drop the buffers: whoever remembers this load must not keep their memory alive."""
        self.finished, self.buffers, self.transfer = True, (), None

    def cancel(self) -> None:
        self.abandoned = True
        if self.transfer is not None:
            self.transfer.cancel()


NO_LOAD = Load(None)
"""No tier has anything worth waiting for."""


class LoadQueue:
    """The loads under way, and whether a sequence should wait for one.

    `find` starts the load that a sequence should wait for, or names one that is under way. None: ask again, there is no
    room or the tiers are not ready. `finish` adds what arrived intact to the cache.
    """

    def __init__(
        self, find: Callable[[KVSequence], Load | None], finish: Callable[[Load], None], clock: Callable[[], float]
    ) -> None:
        self._find = find
        self._finish = finish
        self._clock = clock
        self._loads: list[Load] = []

    def __len__(self) -> int:
        return len(self._loads)

    def __iter__(self) -> Iterator[Load]:
        return iter(self._loads)

    def add(self, load: Load) -> None:
        self._loads.append(load)

    def bringing(self, name: bytes) -> Load | None:
        """The load that brings this block."""
        return next((load for load in self._loads if name in load.names), None)

    def fetch(self, sequence: KVSequence) -> bool:
        """As `KVManager.fetch`."""
        self.collect()
        load = sequence.load
        assert load is None or isinstance(load, Load)
        if load is not None and not load.finished:
            if not load.abandoned:
                return True
            sequence.load = NO_LOAD  # computing is safer now
            return False
        if load is NO_LOAD or (load is not None and load.requester is sequence and not load.more):
            return False  # what arrived is in the cache; the rest is computed
        late = any(other.abandoned for other in self._loads)
        sequence.load = load = NO_LOAD if late else self._find(sequence)
        return load is not None and not load.finished

    def collect(self) -> None:
        """Finish loads that have arrived, and abandon those past their deadline."""
        if not self._loads:
            return
        now = self._clock()
        for load in list(self._loads):
            if load.arrived:
                self._loads.remove(load)
                self._finish(load)
            elif now >= load.deadline and not load.abandoned:
                load.cancel()

    def due_at(self) -> float | None:
        """The next deadline."""
        return min((load.deadline for load in self._loads if not load.abandoned), default=None)

    def end(self, seconds: float, flush: Callable[[], None]) -> None:
        """Cancel all loads and wait for the reader, at most `seconds` of real time."""
        for load in self._loads:
            load.cancel()
        until = monotonic() + seconds
        while self._loads and monotonic() < until:
            flush()
            self.collect()
            sleep(0.001)

    def forget(self) -> None:
        """The memory they were for is gone; the reader keeps its buffers until it is done."""
        for load in self._loads:
            load.cancel()
            load.end()
        self._loads = []

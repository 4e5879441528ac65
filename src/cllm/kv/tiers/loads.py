"""Blocks on their way into the arena, from disk or from host memory.

A load has a sequence of its own, which holds the cached prefix and the blocks being read, as a running sequence would.
When reading ends, the blocks that arrived intact join the prefix tree and the sequence is released. Waiting sequences
then find them like any other cached prefix: several can wait for one load, and one that stops waiting has nothing to
give back.
"""

from __future__ import annotations

from collections.abc import Sequence
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

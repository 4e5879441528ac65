"""Blocks on their way into the arena, from disk or from the host's memory.

A load has a sequence of its own: it holds the prefix that is in memory already and the blocks that are being read, as
running sequences do. When reading is done, what is right of it joins the tree and the sequence ends. So whoever waited
finds the blocks as he finds all others, several may wait for one load, and who does not wait any more has nothing to
give back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cllm.kv.sequence import Awaited, KVSequence

UNKNOWN_SPEED = 4.0
"""How many times as long as expected a load may take, while it is not known how long computing would."""

GRACE_S = 0.1
"""How much later than computing would have been a load may be before nobody waits for it any more."""


def patience(expected_s: float, computing_s: float, *, measured: bool) -> float | None:
    """How long to wait for a load that is expected to take so long, instead of computing (0: not known how long that
    takes). None: it is better not to. While it is not measured how fast loads are, they are tried."""
    if computing_s and measured and expected_s >= computing_s:
        return None
    return max(2 * expected_s, computing_s) + GRACE_S if computing_s else UNKNOWN_SPEED * expected_s + 1.0


class Arriving(Protocol):
    """What a reader tells of a load."""

    @property
    def done(self) -> bool: ...

    @property
    def loaded(self) -> int:
        """How many blocks, from the first on, are right."""

    def cancel(self) -> None: ...


class Incoming(KVSequence):
    """Holds the memory of a load. Its tokens are all that is in memory when that has succeeded."""

    __slots__ = ()
    counts_as_query = False


class Load(Awaited):
    __slots__ = ("asker", "buffers", "first", "holder", "late", "more", "names", "over", "ticket", "until")

    def __init__(
        self,
        asker: KVSequence | None,
        holder: Incoming | None = None,
        *,
        first: int = 0,
        names: Sequence[bytes] = (),
        until: float = 0.0,
    ) -> None:
        self.asker = asker
        self.holder = holder
        self.first = first
        """The first of the holder's blocks that is read."""
        self.names = frozenset(names)
        self.until = until
        """Nobody waits for it longer than this."""
        self.buffers: Sequence[NDArray[np.uint8]] = ()
        self.ticket: Arriving | None = None
        self.over = holder is None
        self.late = False
        """Nobody waits for it any more, though the blocks are the reader's until it says so."""
        self.more = False
        """All of it came, and what follows may be found further down."""

    @property
    def arrived(self) -> bool:
        return self.ticket is not None and self.ticket.done

    def end(self) -> None:
        """It keeps no memory from going, then, however long somebody remembers it."""
        self.over, self.buffers, self.ticket = True, (), None

    def cancel(self) -> None:
        self.late = True
        if self.ticket is not None:
            self.ticket.cancel()


NOTHING = Load(None)
"""There is nothing anywhere that is worth waiting for."""

"""Blocks on their way from disk into the arena.

A load has a sequence of its own: it holds the prefix that is in memory already and the blocks that are being read, as
running sequences do. When reading is done, what is right of it joins the tree and the sequence ends. So whoever waited
finds the blocks as he finds all others, several may wait for one load, and who does not wait any more has nothing to
give back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cllm.kv.disk.reader import Ticket
from cllm.kv.sequence import Awaited, KVSequence


class Incoming(KVSequence):
    """Holds the memory of a load. Its tokens are all that is in memory when that has succeeded."""

    __slots__ = ()
    counts_as_query = False


class Load(Awaited):
    __slots__ = ("asker", "buffers", "first", "holder", "late", "names", "over", "ticket", "until")

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
        self.ticket: Ticket | None = None
        self.over = holder is None
        self.late = False
        """Nobody waits for it any more, though the blocks are the reader's until it says so."""

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
"""There is nothing on disk that is worth waiting for."""

"""What the cache has to know of a sequence."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any


class KVSequence:
    """Tokens, how many of them are computed, and the memory that holds those.

    Invariant: positions [0, num_computed) are in memory, contiguous, and spell tokens[:num_computed]. What lies beyond
    is work that a coming step will do. The memory fields belong to the manager; nobody else writes them.
    """

    __slots__ = ("blocks", "entry", "indexed", "node", "num_computed", "number", "slot", "tokens")

    counts_as_query = True
    """Whether the hit rate counts an admission now. What a sequence finds of its own work, after it had to give its
    memory up, is no hit."""

    request_id = ""
    """Whose it is, for who looks at the cache."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: array[int] = tokens[:] if isinstance(tokens, array) else array("i", tokens)
        self.forget_memory()

    def forget_memory(self) -> None:
        """It holds none (any more)."""
        self.num_computed = 0
        # Paged: the block table, the index node where this sequence's shared part ends, and the blocks in that part;
        # and its number as a holder of the others.
        self.blocks: list[int] = []
        self.node: Any = None
        self.indexed = 0
        self.number = 0
        # Slots: the slot number and the manager's record of it.
        self.slot = -1
        self.entry: Any = None

    @property
    def admitted(self) -> bool:
        return self.node is not None or self.entry is not None

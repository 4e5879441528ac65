"""What the cache has to know of a sequence."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from cllm.kv.window import Window


class Holding:
    """What a manager writes down of the memory that a sequence holds. Each has its own kind, and looks at no other."""

    __slots__ = ()


class Awaited:
    """Something that is brought from elsewhere for a sequence, or was. Managers have their own kinds of that, too."""

    __slots__ = ()


class KVSequence:
    """Tokens, how many of them are computed, and the memory that holds those.

    Invariant: positions [0, num_computed) are in memory, contiguous, and spell tokens[:num_computed], unless some of
    them were dropped: then memory spells tokens[:kept] and what follows the dropped ones. What lies beyond is work that
    a coming step will do. The memory fields belong to the manager; nobody else writes them.
    """

    __slots__ = (
        "blocks",
        "dropped",
        "holding",
        "hole",
        "kept",
        "load",
        "num_computed",
        "room",
        "slot",
        "space",
        "tokens",
        "window",
    )

    counts_as_query = True
    """Whether the hit rate counts an admission now. What a sequence finds of its own work, after it had to give its
    memory up, is no hit."""

    request_id = ""
    """Whose it is, for who looks at the cache."""

    def __init__(self, tokens: Sequence[int], window: Window | None = None, space: bytes = b"") -> None:
        """Sequences share what they have in common with others of their `space`, and with nobody else."""
        self.tokens: array[int] = tokens[:] if isinstance(tokens, array) else array("i", tokens)
        self.window = window
        self.space = space
        self.forget_memory()

    def forget_memory(self) -> None:
        """It holds none (any more)."""
        self.restart()
        self.holding: Holding | None = None
        # What is being brought from disk for it, or was, while it waits.
        self.load: Awaited | None = None
        # Where its memory is, as the backend is told in every step: the table of its blocks, or the number of its slot.
        self.blocks: list[int] = []
        self.slot = 0
        # Positions before this one can be written without asking for more memory, from `end` on.
        self.room = 0

    def restart(self) -> None:
        """Nothing of it is computed (any more), whatever memory it has."""
        self.num_computed = 0
        # Computed tokens that are no longer in memory; they followed the first `kept`. Those of the hole were removed,
        # and what follows them was not shifted yet.
        self.dropped = 0
        self.kept = 0
        self.hole = 0

    @property
    def admitted(self) -> bool:
        return self.holding is not None

    @property
    def held(self) -> int:
        """Computed tokens that are in memory."""
        return self.num_computed - self.dropped - self.hole

    @property
    def end(self) -> int:
        """The position in memory of the next token."""
        return self.num_computed - self.dropped

    @property
    def intact(self) -> bool:
        """Whether memory spells all that was computed, so that others may share it."""
        return self.dropped == 0 and self.hole == 0

    @property
    def prefix(self) -> array[int]:
        """What of it others may have computed: the tokens before the first of them is dropped. The last one of these is
        always its own to compute."""
        return self.tokens if self.window is None else self.tokens[: self.window.capacity]

    @property
    def needed(self) -> int:
        """Tokens that memory must have room for to compute all that are known."""
        known = len(self.tokens)
        return known if self.window is None else min(known, self.window.capacity)

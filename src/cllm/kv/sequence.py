"""What the cache knows about a sequence."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from cllm.kv.groups import LocalTable, StateTable
from cllm.kv.window import Window

STATE_BLOCKS = 8
"""While a prompt is computed, its state is known at the end of at least one in so many blocks."""


class KVAllocation:
    """A manager's record of the memory that a sequence holds. Each manager has its own subclass."""

    __slots__ = ()


class PendingLoad:
    """A load from another tier that a sequence waits for, or waited for. Managers have their own subclass."""

    __slots__ = ()


class KVSequence:
    """Tokens, how many of them are computed, and the memory that holds those.

    Invariant: positions [0, num_computed) are in memory, contiguous, and hold the K/V of tokens[:num_computed]. If
    tokens were dropped, memory holds tokens[:kept] and what follows the dropped ones. Tokens past num_computed are
    work for a later step. Only the manager writes the memory fields.
    """

    __slots__ = (
        "allocation",
        "asked",
        "blocks",
        "dropped",
        "hole",
        "in_parts",
        "kept",
        "known",
        "load",
        "local",
        "marks",
        "num_computed",
        "rebuilt",
        "room",
        "slot",
        "space",
        "state",
        "tokens",
        "window",
    )

    counts_as_query = True
    """Whether an admission counts towards the hit rate. A preempted sequence that finds its own work again is no
    hit."""

    request_id = ""
    """The request it belongs to, for views of the cache."""

    asks_along: bool = False
    """Whether something is wanted of every token that is computed, so that all layers must be exact for each."""

    places: Sequence[int] = ()
    """After how many tokens other sequences will go on from it, as far as is known beforehand."""

    to_pin: Sequence[int] = ()
    """The places among them where it will be pinned."""

    def __init__(self, tokens: Sequence[int], window: Window | None = None, space: bytes = b"") -> None:
        """Sequences share cached prefixes only within their `space` (one per tenant)."""
        self.tokens: array[int] = tokens[:] if isinstance(tokens, array) else array("i", tokens)
        self.window = window
        self.space = space
        self.forget_memory()

    def forget_memory(self) -> None:
        """It no longer holds any."""
        self.restart()
        self.allocation: KVAllocation | None = None
        # The load it waits for, or waited for.
        self.load: PendingLoad | None = None
        # Where its memory is, for the backend's steps: its block table, or its slot.
        self.blocks: list[int] = []
        self.slot = 0
        self.local: LocalTable | None = None
        self.state: StateTable | None = None
        # After how many tokens a snapshot of local blocks and states is due, the next one last.
        self.marks: list[int] = []
        # Whether it may have memory for only some of its known tokens; `grow` gives more.
        self.in_parts = False
        # How many tokens it had when it was admitted: its prompt, above all.
        self.asked = 0
        # How much of it the cache had for layers that attend to everything, when it was admitted: more than it could go
        # on from where others kept too little.
        self.known = 0
        # Up to so many tokens, only layers with a window are computed, again; until then not all of theirs is exact.
        self.rebuilt = 0
        # Positions [end, room) can be written without asking for more memory.
        self.room = 0

    def restart(self) -> None:
        """Nothing of it is computed any more; it keeps its memory."""
        self.num_computed = 0
        # Computed tokens that are no longer in memory; they followed the first `kept`. Tokens in the hole were removed,
        # but what follows them was not shifted yet.
        self.dropped = 0
        self.kept = 0
        self.hole = 0

    @property
    def admitted(self) -> bool:
        return self.allocation is not None

    def until_stop(self, count: int, unit: int) -> int:
        """How many of the next `count` tokens a step may compute. A state is known only where a step ends: that is
        where a snapshot is due, or else at the end of one of these blocks; in a prompt not of every one, because a step
        that computes few tokens could compute many more."""
        if self.state is None:
            return count
        start = self.num_computed
        due = self.marks[-1] if self.marks else start + count
        end = min(start + count, due)
        whole = end - end % unit
        may_wait = due <= len(self.tokens) and end - self.state.known_at_end(unit) < STATE_BLOCKS * unit
        return (end if whole <= start or (self.marks and may_wait) else whole) - start

    @property
    def held(self) -> int:
        """Computed tokens in memory."""
        return self.num_computed - self.dropped - self.hole

    @property
    def end(self) -> int:
        """The next token's position in memory."""
        return self.num_computed - self.dropped

    @property
    def intact(self) -> bool:
        """Whether memory holds everything that was computed, so that others can share it."""
        return self.dropped == 0 and self.hole == 0

    @property
    def prefix(self) -> array[int]:
        """The tokens that may be found in the cache: those before the first is dropped. The last one is always
        computed."""
        return self.tokens if self.window is None else self.tokens[: self.window.capacity]

    @property
    def needed(self) -> int:
        """Tokens that need room in memory to compute all known ones."""
        known = len(self.tokens)
        return known if self.window is None else min(known, self.window.capacity)

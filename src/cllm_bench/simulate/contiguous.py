"""One span of memory per sequence, as before there were blocks, with the ways to tidy up that were proposed for it.

    arena   [AAAAAA····|BBB··|      |CCCCCCC·|  |DD····|        ]       · reserved and not used yet

A sequence must lie in one piece, so free memory between sequences may be enough in sum and still useless.

    none      nothing moves; a sequence that does not fit waits
    holes     sequences from the end move into holes in front that they fit into
    compact   all move to the beginning, in order; everything free is one piece afterwards

Tidying happens when an allocation would fail although there is memory enough, never for nothing.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Literal

from cllm.kv.sequence import KVAllocation, KVSequence
from cllm.kv.usage import KVUsage
from cllm_bench.simulate.managers import NEVER, Refusals, SimulatedManager

Tidying = Literal["none", "holes", "compact"]

GROWTH_TOKENS = 16
"""A sequence that outgrows its span asks for this many tokens more at a time."""

_BY_START = attrgetter("start")


class Segment(KVAllocation):
    """The span of one sequence: [start, start + size)."""

    __slots__ = ("owner", "size", "start")

    def __init__(self, start: int, size: int, owner: KVSequence) -> None:
        self.start = start
        self.size = size
        self.owner = owner

    @property
    def end(self) -> int:
        return self.start + self.size


def segment_of(sequence: KVSequence) -> Segment:
    holding = sequence.allocation
    assert isinstance(holding, Segment)
    return holding


class ContiguousKVManager(SimulatedManager):
    verifies = False

    def __init__(
        self,
        tokens: int,
        *,
        bytes_per_token: int,
        tidying: Tidying,
        reserve: Callable[[KVSequence], int],
    ) -> None:
        """`reserve` says how long a sequence is expected to become when it is admitted."""
        self.max_tokens = tokens
        self.unit_tokens = NEVER
        # Filling holes can go on when others have grown, so trying again is not without effect.
        self.refuses_steadily = tidying != "holes"
        self._bytes_per_token = bytes_per_token
        self._tidying = tidying
        self._reserve = reserve
        self._segments: list[Segment] = []
        self._free = tokens
        self._refusals = Refusals(0, 0)
        self._moved_bytes = self._tidied = self._queried = self._peak = 0

    # -- the interface -----------------------------------------------------------------------------------------

    def peek(self, key: bytes, space: bytes = b"") -> int:
        return 0

    def admit(self, sequence: KVSequence) -> int | None:
        size = min(max(self._reserve(sequence), len(sequence.tokens)), self.max_tokens)
        start = self._find(size)
        if start is None:
            self._refuse(size)
            return None
        segment = Segment(start, size, sequence)
        insort(self._segments, segment, key=_BY_START)
        self._take(size)
        sequence.allocation = segment
        sequence.num_computed = 0
        self._queried += len(sequence.tokens)
        return 0

    def arrange(self) -> None:
        """Sequences are where they are."""

    def grow(self, sequence: KVSequence, count: int) -> bool:
        segment = segment_of(sequence)
        needed = sequence.num_computed + count
        if needed <= segment.size:
            return True
        sizes = (min(needed + GROWTH_TOKENS - 1, self.max_tokens), needed) if needed <= self.max_tokens else ()
        for size in sizes:
            if self._extend(segment, size) or (self._tidying != "none" and self._move_to_grow(segment, size)):
                return True
        self._refuse(needed - segment.size)
        return False

    def commit(self, sequence: KVSequence) -> None:
        """Nothing is shared."""

    def verify(self, sequence: KVSequence) -> None:
        """There is no second account."""

    def rewind(self, sequence: KVSequence) -> None:
        """What was written is written again."""

    def fork(self, parent: KVSequence, child: KVSequence) -> bool:
        raise NotImplementedError("traces have one answer per request")

    def release(self, sequence: KVSequence, *, keep: bool = True) -> None:
        segment = segment_of(sequence)
        self._segments.remove(segment)
        self._free += segment.size
        sequence.forget_memory()

    def maintain(self, budget_s: float) -> bool:
        """Memory is tidied when somebody needs it; when idle, there is nothing in it."""
        return False

    def reset(self) -> None:
        for segment in self._segments:
            segment.owner.forget_memory()
        self._segments = []
        self._free = self.max_tokens

    def usage(self) -> KVUsage:
        spans = [span for _, span in self._holes()]
        return KVUsage(
            layout="contiguous",
            unit_tokens=1,
            bytes_per_unit=self._bytes_per_token,
            total=self.max_tokens,
            free=self._free,
            evictable=0,
            referenced=self.max_tokens - self._free,
            peak=self._peak,
            sequences_running=len(self._segments),
            sequences_held=len(self._segments),
            free_segments=len(spans),
            largest_free_span=max(spans, default=0),
            evictions=0,
            allocation_failures=self._refusals.total,
            compactions=self._tidied,
            moved_bytes=self._moved_bytes,
            query_tokens=self._queried,
            hit_tokens=0,
        )

    def details(self) -> dict[str, Any]:
        return {"segments": [{"start": segment.start, "size": segment.size} for segment in self._segments]}

    def examine(self) -> Iterator[int]:
        end = taken = 0
        for segment in self._segments:
            if segment.start < end:
                raise AssertionError("two sequences overlap, or are out of order")
            if segment.owner.allocation is not segment or segment.owner.num_computed > segment.size:
                raise AssertionError("a sequence is not where its segment says, or longer than that")
            end = segment.end
            taken += segment.size
            yield segment.size
        if end > self.max_tokens or taken != self.max_tokens - self._free:
            raise AssertionError(f"{taken} tokens of memory are taken, {self.max_tokens - self._free} counted")

    # -- for the simulation ------------------------------------------------------------------------------------

    def grow_due(self, sequence: KVSequence) -> int:
        return segment_of(sequence).size - sequence.num_computed

    def commit_due(self, sequence: KVSequence) -> int:
        return NEVER

    @property
    def refusals(self) -> Refusals:
        return self._refusals

    @refusals.setter
    def refusals(self, value: Refusals) -> None:
        self._refusals = value

    @property
    def moved_bytes(self) -> int:
        return self._moved_bytes

    def stored(self) -> tuple[int, int]:
        return sum(len(segment.owner.tokens) for segment in self._segments), self.max_tokens - self._free

    # -- finding room ------------------------------------------------------------------------------------------

    def _holes(self) -> list[tuple[int, int]]:
        """Free spans as (start, size), from the beginning."""
        holes = []
        end = 0
        for segment in self._segments:
            if segment.start > end:
                holes.append((end, segment.start - end))
            end = segment.end
        if end < self.max_tokens:
            holes.append((end, self.max_tokens - end))
        return holes

    def _first_fit(self, size: int) -> int | None:
        return next((start for start, span in self._holes() if span >= size), None)

    def _find(self, size: int) -> int | None:
        """Where `size` tokens fit, tidying up first if that can help."""
        start = self._first_fit(size)
        if start is not None or self._free < size or self._tidying == "none":
            return start
        if self._tidying == "holes":
            self._fill_holes()
        else:
            self._compact()
        return self._first_fit(size)

    def _take(self, size: int) -> None:
        self._free -= size
        self._peak = max(self._peak, self.max_tokens - self._free)

    def _refuse(self, size: int) -> None:
        total, fragmented = self._refusals
        self._refusals = Refusals(total + 1, fragmented + (self._free >= size))

    # -- growing and moving ------------------------------------------------------------------------------------

    def _extend(self, segment: Segment, size: int) -> bool:
        """Grow in place, if what follows is free."""
        index = self._segments.index(segment)
        following = self._segments[index + 1].start if index + 1 < len(self._segments) else self.max_tokens
        if segment.start + size > following:
            return False
        self._take(size - segment.size)
        segment.size = size
        return True

    def _move_to_grow(self, segment: Segment, size: int) -> bool:
        """Give a sequence `size` tokens by moving it, or others."""
        if self._relocate(segment, size):
            return True
        if self._free < size - segment.size:
            return False
        if self._tidying == "compact":
            self._compact(segment, size)
            return True
        self._fill_holes()
        return self._extend(segment, size) or self._relocate(segment, size)

    def _relocate(self, segment: Segment, size: int) -> bool:
        """Move one sequence to where it has `size` tokens; its own old span does not count as free."""
        start = self._first_fit(size)
        if start is None:
            return False
        self._segments.remove(segment)
        self._take(size - segment.size)
        segment.size = size
        self._move(segment, start)
        insort(self._segments, segment, key=_BY_START)
        return True

    def _move(self, segment: Segment, start: int) -> None:
        if segment.start != start:
            segment.start = start
            self._moved_bytes += segment.owner.num_computed * self._bytes_per_token

    def _compact(self, growing: Segment | None = None, size: int = 0) -> None:
        """Everything to the beginning; behind `growing`, which has `size` tokens from now on, the rest makes room."""
        before = self._moved_bytes
        if growing is not None:
            self._take(size - growing.size)
            growing.size = size
        end = 0
        for segment in self._segments:
            self._move(segment, end)
            end += segment.size
        self._tidied += self._moved_bytes > before

    def _fill_holes(self) -> None:
        """From the last sequence on: each goes into the first hole in front of it that it fits into."""
        before = self._moved_bytes
        for segment in reversed(list(self._segments)):
            start = self._first_fit(segment.size)
            if start is not None and start < segment.start:
                self._segments.remove(segment)
                self._move(segment, start)
                insort(self._segments, segment, key=_BY_START)
        self._tidied += self._moved_bytes > before

"""The real KV managers as a simulation uses them, and what it must know of one to skip calls that do nothing."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

from cllm.kv.manager import KVManager
from cllm.kv.ops import BlockGeometry
from cllm.kv.paged.block_table import allocation_of
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.sequence import KVSequence
from cllm.kv.slots.manager import SlotKVManager
from cllm_bench.simulate.backend import SimulatedBlocks

NEVER = 1 << 62


class Refusals(NamedTuple):
    """Allocations that found no room, each time they were asked for."""

    total: int
    fragmented: int
    """Refused although there was memory enough, but not in one piece."""


class SimulatedManager(KVManager):
    """A KV manager that tells when its next call matters.

    While all sequences decode, most calls of `grow` and `commit` do nothing; a simulation that knows which ones can
    leave the others out, and nothing changes.
    """

    forwards = True
    """Whether `grow_due` and `commit_due` are known."""

    refuses_steadily = True
    """Whether an admission that was refused is refused again, with no other effect, until a sequence ends."""

    @abstractmethod
    def grow_due(self, sequence: KVSequence) -> int:
        """Tokens that can be computed before `grow(sequence, 1)` has something to do."""

    @abstractmethod
    def commit_due(self, sequence: KVSequence) -> int:
        """Tokens after whose computation `commit` has something to do; at least 1."""

    @property
    def untidy(self) -> bool:
        """Whether `maintain` will have something to do although nothing happened since the last time."""
        return False

    @property
    @abstractmethod
    def refusals(self) -> Refusals: ...

    @refusals.setter
    @abstractmethod
    def refusals(self, value: Refusals) -> None: ...

    @property
    @abstractmethod
    def moved_bytes(self) -> int: ...

    @abstractmethod
    def stored(self) -> tuple[int, int]:
        """Tokens that running sequences consist of so far, and the tokens of memory that is taken for them."""


class UnfragmentedManager(SimulatedManager):
    """The counters of a real manager, whose memory is enough whenever enough of it is free."""

    _refused: int = 0
    _moved_bytes: int

    @property
    def refusals(self) -> Refusals:
        return Refusals(self._refused, 0)

    @refusals.setter
    def refusals(self, value: Refusals) -> None:
        self._refused = value.total

    @property
    def moved_bytes(self) -> int:
        return self._moved_bytes


class SimulatedPaged(PagedKVManager, UnfragmentedManager):
    """Block tables; with `sharing` prefixes are found again, without it memory is freed when its sequence ends."""

    def __init__(
        self,
        geometry: BlockGeometry,
        *,
        bytes_per_token: int,
        sharing: bool,
        eviction_threshold: float,
        eviction_policy: str,
        watermark: float,
    ) -> None:
        # The clock stands still: it would only time evictions, and have free spans counted, which takes longer the
        # more blocks there are.
        super().__init__(
            SimulatedBlocks(),
            geometry,
            bytes_per_token=bytes_per_token,
            eviction_threshold=eviction_threshold,
            eviction_policy=eviction_policy,
            watermark=watermark,
            clock=lambda: 0.0,
        )
        self._sharing = sharing
        if not sharing:
            self.unit_tokens = NEVER

    def admit(self, sequence: KVSequence) -> int | None:
        cached = super().admit(sequence)
        self._refused += cached is None
        return cached

    def grow(self, sequence: KVSequence, count: int) -> bool:
        grown = super().grow(sequence, count)
        self._refused += not grown
        return grown

    def commit(self, sequence: KVSequence) -> None:
        if self._sharing:
            super().commit(sequence)

    def grow_due(self, sequence: KVSequence) -> int:
        return len(sequence.blocks) * self.block_size - sequence.num_computed

    def commit_due(self, sequence: KVSequence) -> int:
        return (
            (allocation_of(sequence).indexed + 1) * self.block_size - sequence.num_computed if self._sharing else NEVER
        )

    @property
    def untidy(self) -> bool:
        return self._threshold_excess() > 0

    def stored(self) -> tuple[int, int]:
        size = self.block_size
        taken = self._referenced() * size
        slack = sum(len(sequence.blocks) * size - len(sequence.tokens) for sequence in self._running.values())
        return taken - slack, taken


class RollingWindow(SimulatedPaged):
    """A sequence keeps its first tokens (sinks) and the most recent ones; its blocks are used in turn.

    Any sequence fits into `blocks_per_sequence` blocks. Nothing is shared: what is overwritten cannot be found again.
    """

    def __init__(
        self, geometry: BlockGeometry, *, bytes_per_token: int, watermark: float, window: int, sinks: int
    ) -> None:
        super().__init__(
            geometry,
            bytes_per_token=bytes_per_token,
            sharing=False,
            eviction_threshold=1.0,
            eviction_policy="lru",
            watermark=watermark,
        )
        self.kept_tokens = window + sinks
        # One block more than the window fills, because the oldest one is given up as a whole.
        self.blocks_per_sequence = -(-self.kept_tokens // self.block_size) + 1
        self.max_tokens = NEVER

    def grow_due(self, sequence: KVSequence) -> int:
        return NEVER if len(sequence.blocks) >= self.blocks_per_sequence else super().grow_due(sequence)

    def stored(self) -> tuple[int, int]:
        size = self.block_size
        taken = (self._pool.total - self._pool.free) * size
        return sum(min(len(s.tokens), len(s.blocks) * size) for s in self._running.values()), taken

    def _blocks_for(self, tokens: int) -> int:
        return min(super()._blocks_for(tokens), self.blocks_per_sequence)

    def _check_table(self, sequence: KVSequence) -> None:
        if len(sequence.blocks) < self._blocks_for(sequence.num_computed):
            raise AssertionError("a sequence has computed more than its window holds")


class SimulatedSlotManager(SlotKVManager, UnfragmentedManager):
    """llama.cpp's layout. Every call may matter, so nothing is skipped."""

    forwards = False
    refuses_steadily = False

    def admit(self, sequence: KVSequence) -> int | None:
        cached = super().admit(sequence)
        self._refused += cached is None
        return cached

    def grow_due(self, sequence: KVSequence) -> int:
        return 0

    def commit_due(self, sequence: KVSequence) -> int:
        return 1

    def stored(self) -> tuple[int, int]:
        running = [entry.owner for entry in self._slots if entry is not None and entry.owner is not None]
        return sum(len(owner.tokens) for owner in running), len(running) * self._geometry.slot_tokens

"""A cache over the fake backend with a store on disk below it, and sequences that go through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm.backends.base import Chunk
from cllm.backends.fake import FakeBackend
from cllm.errors import BackendError
from cllm.kv.block_names import fingerprint
from cllm.kv.disk.files import Files
from cllm.kv.disk.store import DiskStore
from cllm.kv.ops import BlockBytes, BlockGeometry, BlockOps, SlotGeometry, SlotOps
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.sequence import KVSequence
from cllm.kv.sizing import most_bytes
from cllm.kv.slots.manager import SlotKVManager
from cllm.kv.tiers.disk_tier import DiskTier
from cllm.kv.tiers.host_tier import HostTier
from disk_kit import make_store
from step_of import rows_of

QUEUE_BYTES = 1 << 20
BLOCK = 4
MODEL = fingerprint(b"the fake model", {"block_tokens": BLOCK})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Cache:
    """One server's: its memory, its manager, its store, and those who wait and run."""

    kv: PagedKVManager

    def __init__(self, directory: Path, *, limit: int = 1 << 20, files: Files | None = None, **options: Any) -> None:
        self.clock = Clock()
        self.backend = FakeBackend()
        self.kv = self.make_kv(**options)
        # A queue of 64 MiB would have room for half a million of these small blocks, and memory is taken for each.
        self.store: DiskStore = make_store(
            directory, limit=limit, files=files, monotonic=self.clock, queue_bytes=QUEUE_BYTES
        )
        sizes = {"block_tokens": BLOCK, "block_bytes": 2 * 4 * BLOCK}
        self.tier = DiskTier(self.store, **sizes, least_tokens=2 * BLOCK, worth_tokens=3 * BLOCK)
        self.kv.use_disk(self.tier)
        model_store = self.store.open_model(MODEL, **sizes, about={"model": "fake"})
        self.store.work()
        self.tier.attach(model_store)
        self.waiting: list[KVSequence] = []
        self.running: list[KVSequence] = []
        self.cached: dict[int, int] = {}
        """What sequences found when they were admitted."""

    def make_kv(self, blocks: int = 24, **options: Any) -> Any:
        geometry = BlockGeometry(blocks, BLOCK)
        self.backend.allocate(geometry)
        ops = self.backend.ops
        assert isinstance(ops, BlockOps) and isinstance(ops, BlockBytes)
        return PagedKVManager(ops, geometry, bytes_per_token=8, clock=self.clock, **options)

    def lose(self, units: int) -> None:
        """Memory is needed: so many blocks of what is cached go."""
        self.kv.room.evict(units)

    def ask(self, tokens: list[int], space: bytes = b"") -> KVSequence:
        sequence = KVSequence(tokens, space=space)
        self.waiting.append(sequence)
        return sequence

    def admit(self) -> None:
        """As the planner does: who waits for the disk is passed over, who finds no room ends the round."""
        for sequence in list(self.waiting):
            if self.kv.fetch(sequence):
                continue
            cached = self.kv.admit(sequence)
            if cached is None:
                return
            self.waiting.remove(sequence)
            self.running.append(sequence)
            self.cached[id(sequence)] = cached
            self.assert_right(sequence)

    def compute(self, sequence: KVSequence, count: int) -> None:
        end = min(sequence.num_computed + count, len(sequence.tokens))
        tokens = sequence.tokens[sequence.num_computed : end]
        if tokens:
            start = sequence.num_computed
            rows_of(self.backend, [Chunk(tokens, start, True, sequence.slot, sequence.blocks)])
            sequence.num_computed = end
            self.kv.commit(sequence)

    def finish(self, sequence: KVSequence) -> None:
        self.running.remove(sequence)
        self.kv.release(sequence)

    def run(self, tokens: list[int], space: bytes = b"") -> int:
        """One sequence from the beginning to the end; what it found in the cache."""
        sequence = self.ask(tokens, space)
        for _ in range(100):
            self.admit()
            if sequence in self.running:
                break
            self.work()
        assert sequence in self.running, "it was never admitted"
        self.compute(sequence, len(tokens))
        self.assert_right(sequence)
        self.finish(sequence)
        return self.cached.pop(id(sequence))

    def settle(self) -> None:
        """Whatever is to be written or loaded is."""
        for _ in range(100):
            self.clock.now += 10.0
            if not (self.kv.maintain(1.0) or self.kv.loading):
                break
            self.work()
        self.work()
        self.kv.maintain(0.0)

    def work(self) -> None:
        """Whatever goes on beside the engine does."""
        self.store.work()

    def forget(self) -> None:
        """Memory is lost, and renewed."""
        self.backend.rebuild()
        self.kv.reset()
        self.waiting += self.running
        self.running = []

    def assert_right(self, sequence: KVSequence) -> None:
        """The sequence's memory holds its tokens and nothing else."""
        chunk = Chunk(sequence.tokens[:0], 0, False, sequence.slot, sequence.blocks)
        memory = self.backend.memory
        held = memory.read(chunk, sequence.num_computed)
        assert held.tolist() == sequence.tokens[: sequence.num_computed].tolist()
        assert not np.any(memory.dropped_before(chunk, sequence.num_computed))

    def assert_sound(self) -> None:
        self.kv.check()
        usage = self.kv.usage()
        assert usage.free + usage.evictable + usage.referenced == usage.total
        assert usage.sequences_running == len(self.running)
        for sequence in self.running:
            self.assert_right(sequence)


class LateCopy:
    """A copy that is made when it has to be, or when the test says so, of what is there by then."""

    seconds = 1e-6

    def __init__(self, rows: LateRows, copy: Callable[[], None]) -> None:
        self._rows = rows
        self._copy: Callable[[], None] | None = copy

    def make(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy()

    def drop(self) -> None:
        self._copy = lambda: None

    @property
    def done(self) -> bool:
        self._rows.call()
        return self._copy is None


class LateRows:
    """The host's memory beside the fake backend, whose copies are as late as they may be: a block that is overwritten
    before it was waited for spoils what was to be kept of it."""

    def __init__(self, backend: FakeBackend, most_rows: int, at_once: int = 64) -> None:
        self.most_rows = most_rows
        self.rows = 0
        self.calls = 0
        self.fail_at = 0
        self.waits_fail = False
        self.under_way: list[LateCopy] = []
        self._at_once = at_once
        self._backend = backend
        ops = backend.ops
        assert isinstance(ops, BlockBytes)
        self.row_bytes = ops.block_bytes
        self._memory = np.full((most_rows, self.row_bytes), 255, np.uint8)

    def call(self) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            raise BackendError("no copies")

    def want_more(self, count: int) -> None:
        self.rows = min(self.rows + self._at_once, self.most_rows)

    def copy_out(self, blocks: Sequence[int], rows: Sequence[int]) -> LateCopy:
        blocks, rows = list(blocks), list(rows)
        assert len(blocks) == len(rows) and all(0 <= row < self.rows for row in rows)

        def copy() -> None:
            for row, content in zip(rows, self._ops.read_blocks(blocks), strict=True):
                self._memory[row] = content

        return self._ask(copy)

    def copy_in(self, rows: Sequence[int], blocks: Sequence[int], after: Sequence[LateCopy]) -> LateCopy:
        blocks, rows = list(blocks), list(rows)

        def copy() -> None:
            for each in after:
                each.make()
            for row, content in zip(rows, self._ops.landing(blocks), strict=True):
                content[:] = self._memory[row]

        return self._ask(copy)

    def _ask(self, copy: Callable[[], None]) -> LateCopy:
        self.call()
        self.under_way.append(LateCopy(self, copy))
        return self.under_way[-1]

    def wait_for(self, copying: LateCopy) -> None:
        if self.waits_fail:
            self.call()
        copying.make()

    def row(self, number: int) -> NDArray[np.uint8]:
        return self._memory[number]

    @property
    def _ops(self) -> BlockBytes:
        ops = self._backend.ops
        assert isinstance(ops, BlockBytes)
        return ops

    def work(self, count: int | None = None, *, newest: bool = False) -> None:
        """Copies of the two directions overtake each other."""
        for _ in range(len(self.under_way) if count is None else min(count, len(self.under_way))):
            self.under_way.pop(-1 if newest else 0).make()

    def drop(self) -> None:
        """The backend's memory is renewed."""
        for each in self.under_way:
            each.drop()
        self.under_way = []


class HostCache(Cache):
    """With the host's memory between arena and disk, or without a disk."""

    def __init__(self, directory: Path, *, host_rows: int = 12, rows_at_once: int = 64, **options: Any) -> None:
        super().__init__(directory, **options)
        self.rows = LateRows(self.backend, host_rows, rows_at_once)
        self.host = HostTier(self.rows, block_tokens=BLOCK, least_tokens=2 * BLOCK)
        self.kv.use_host(self.host)

    def work(self) -> None:
        super().work()
        self.rows.work()

    def settle(self) -> None:
        for _ in range(6):  # what is written is copied before
            super().settle()

    def forget(self) -> None:
        self.rows.drop()
        super().forget()


class SlotCache(Cache):
    """A cache with slots."""

    kv: SlotKVManager  # type: ignore[assignment]

    def make_kv(self, slots: int = 3, store_tokens: int = 200, **options: Any) -> Any:
        geometry = SlotGeometry(slots, 64)
        self.backend.allocate(geometry)
        ops = self.backend.ops
        assert isinstance(ops, SlotOps)
        size = most_bytes(store_tokens, 8)
        return SlotKVManager(ops, geometry, bytes_per_token=8, store_bytes=size, clock=self.clock, **options)

    def assert_sound(self) -> None:
        super().assert_sound()
        coming = sum(buffer.nbytes for load in self.kv.loads.queue for buffer in load.buffers)
        assert self.kv.places.coming_bytes == coming
        assert self.kv.places.store.bytes + coming <= self.kv.places.store_bytes

    def lose(self, units: int) -> None:
        """Held sequences go to the store, and some of those, or all, go from there."""
        for slot, entry in enumerate(self.kv.places.slots):
            if entry is not None and entry.owner is None:
                self.kv.room.vacate(slot)
        self.kv.room.make_room(0, max(0, self.kv.places.store.bytes - 40 * units))

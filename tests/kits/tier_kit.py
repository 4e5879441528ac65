"""A cache over the fake backend with a store on disk below it, and sequences that go through them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cllm.backends.base import Chunk
from cllm.backends.fake import FakeBackend
from cllm.kv.block_names import fingerprint
from cllm.kv.disk.files import Files
from cllm.kv.disk.store import DiskStore
from cllm.kv.ops import BlockBytes, BlockGeometry, BlockOps
from cllm.kv.paged.local import LocalShape
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.sequence import KVSequence
from cllm.kv.tiers.disk_tier import DiskTier
from disk_kit import make_store
from kv_kit import assert_states, chunk_of
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

    def __init__(
        self,
        directory: Path,
        *,
        limit: int = 1 << 20,
        files: Files | None = None,
        window: int = 0,
        states: int = 0,
        **options: Any,
    ) -> None:
        """`window`: of two layers beside the full one; `states`: cells of a state."""
        self.clock = Clock()
        self.window = window
        self.backend = FakeBackend(window=window, states=states)
        if window or states:
            options["local"] = LocalShape(window, cells=2 if window else 0, ahead=16, state=states)
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
        while (start := sequence.num_computed) < end:
            if sequence.in_parts and start == sequence.room and not self.kv.grow(sequence, 1):
                break
            there = min(end, sequence.room) if sequence.in_parts else end
            count = sequence.until_stop(there - start, BLOCK)
            rows_of(self.backend, [chunk_of(sequence, count)])
            sequence.num_computed += count
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
        chunk = Chunk(sequence.tokens[:0], 0, False, sequence.slot, sequence.blocks, local=sequence.local)
        memory = self.backend.memory
        held = memory.read(chunk, sequence.num_computed)
        assert held.tolist() == sequence.tokens[: sequence.num_computed].tolist()
        assert not np.any(memory.dropped_before(chunk, sequence.num_computed))
        if self.window:
            # The next token does not see the first of the last `window` ones.
            assert memory.local_differences(chunk, sequence.num_computed, self.window - 1) == 0
        assert_states(self.backend, self.kv)

    def assert_sound(self) -> None:
        self.kv.check()
        usage = self.kv.usage()
        assert usage.free + usage.evictable + usage.referenced == usage.total
        assert usage.sequences_running == len(self.running)
        for sequence in self.running:
            self.assert_right(sequence)

"""The state machine of KV managers, with memory that comes and goes and blocks that are moved."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from cllm.backends.fake import FakeBackend
from cllm.kv.manager import KVManager
from cllm.kv.ops import BlockGeometry, BlockOps
from cllm.kv.paged.compaction import MovePlan, plan_fill, plan_lift, plan_slide
from cllm.kv.paged.local import LocalShape
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.paged.upkeep import UpkeepSettings
from kv_kit import BYTES_PER_TOKEN, ManagerMachine

PLANS: list[MovePlan] = [plan_fill, plan_slide, plan_lift]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def elastic(
    blocks: int = 48, *, extent: int = 4, idle_blocks: int = 8, ahead_blocks: int = 4, states: int = 0, **options: Any
) -> tuple[FakeBackend, PagedKVManager, Clock]:
    """Blocks of 4 tokens; memory goes back after 10 s. `states`: cells of a state."""
    backend, clock = FakeBackend(states=states), Clock()
    if states:
        options["local"] = LocalShape(state=states)
    geometry = BlockGeometry(blocks, 4)
    backend.allocate(geometry)
    assert isinstance(backend.ops, BlockOps)
    block_bytes = 4 * BYTES_PER_TOKEN
    settings = UpkeepSettings(
        release_after_s=10.0,
        idle_bytes=idle_blocks * block_bytes,
        ahead_bytes=ahead_blocks * block_bytes,
        compaction=options.pop("compaction", "auto"),
    )
    kv = PagedKVManager(
        backend.ops,
        geometry,
        bytes_per_token=BYTES_PER_TOKEN,
        extent_blocks=extent,
        upkeep=settings,
        clock=clock,
        **options,
    )
    return backend, kv, clock


def settle(kv: KVManager) -> int:
    """Upkeep until there is no more to do; how many calls that took."""
    calls = 0
    while kv.maintain(1e-3):
        calls += 1
        assert calls < 1000, "upkeep does not come to an end"
    return calls


class UpkeepMachine(ManagerMachine):
    """The manager's machine, with everything that upkeep does at any moment; memory must spell the tokens all along,
    and what is computed equal a lone run."""

    options: ClassVar[dict[str, Any]] = {"compaction": "auto"}

    def build(self) -> tuple[FakeBackend, KVManager]:
        self.backend, self.paged, self.clock = elastic(24, eviction_threshold=0.9, **self.options)
        return self.backend, self.paged

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 11.0]), budget_s=st.sampled_from([1e-9, 3e-8, 1e-3]))
    def time_passes(self, seconds: float, budget_s: float) -> None:
        self.clock.now += seconds
        self.kv.maintain(budget_s)

    @rule(plan=st.sampled_from(PLANS), blocks=st.integers(1, 8))
    def move(self, plan: MovePlan, blocks: int) -> None:
        before = self.cached()
        self.paged.upkeep.compactor.slice(plan, blocks, 1.0)
        assert self.cached() == before

    @rule(extents=st.integers(1, 3))
    def give_back(self, extents: int) -> None:
        upkeep = self.paged.upkeep
        if run := upkeep._highest_run(extents):
            assert upkeep.release(run)

    @rule()
    def prepare(self) -> None:
        self.paged.upkeep._prepare(self.clock.now)

    @rule()
    def settle(self) -> None:
        if not self.live:
            self.clock.now += 11.0
            settle(self.paged)
            assert self.paged.upkeep_at() is None
            usage = self.paged.usage()
            assert (usage.extents_used + usage.extents_ready) * 4 <= max(8, 4 * usage.extents_needed)

    def cached(self) -> dict[bytes, list[int]]:
        """What the memory of every node of the tree spells."""
        arena = self.backend.memory._arena  # type: ignore[union-attr]
        return {
            b"".join(bytes(part.key) for part in reversed(list(node.path()))): arena[node.value].ravel().tolist()
            for node in self.paged.arena.prefixes.tree.nodes()
        }

    @invariant()
    def memory_of_the_tree_spells_its_tokens(self) -> None:
        for path, held in self.cached().items():
            assert list(memoryview(path).cast("i"))[-len(held) :] == held

    @invariant()
    def the_picture_is_right(self) -> None:
        view = self.paged.view()
        numbers = {sequence.number for sequence in view.sequences} | {prefix.number for prefix in view.prefixes}
        assert set(view.holders.tolist()) <= numbers | {0}
        held, free_map = view.holders != 0, np.frombuffer(self.paged.arena.pool.free_map, np.uint8)
        total = self.paged.arena.pool.total
        assert np.array_equal(held[:total], free_map[:total] == 0) and not held[total:].any()
        assert view.prefixes_in_all == len(view.prefixes)
        assert view.used_prefixes == {prefix.number for prefix in view.prefixes if prefix.users}
        assert all(prefix.parent in numbers | {0} for prefix in view.prefixes)

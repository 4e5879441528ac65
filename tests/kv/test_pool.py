"""The block pool against a plain model of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cllm.kv.paged.compaction import MovePlan, in_calls, plan_fill, plan_lift, plan_slide
from cllm.kv.paged.extents import FRESH, GENERATION, PROMPT, READY, extent_blocks
from cllm.kv.paged.fragmentation import contiguity, extents_needed, measure
from cllm.kv.paged.free_runs import FreeRuns
from cllm.kv.paged.pool import BlockPool
from cllm.kv.sequence import KVSequence
from thorough import sampled

TOTAL = 24


def check(pool: BlockPool, held: list[int]) -> None:
    """All of `examine` at once; `held` has one item per holder."""
    counted = np.bincount(np.array(held, np.int64), minlength=pool.total).astype(np.int32)
    for _ in pool.examine(counted, pool.total):
        pass


class PoolMachine(RuleBasedStateMachine):
    """`held` has one item per reference, as the pool's users would have."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.held: list[int] = []

    @initialize(extent=st.integers(1, TOTAL + 1), apart=st.booleans())
    def build(self, extent: int, apart: bool) -> None:
        self.pool = BlockPool(TOTAL, extent, apart=apart)

    @rule(count=st.integers(0, TOTAL + 4), after=st.integers(-1, TOTAL - 1), generated=st.booleans())
    def allocate(self, count: int, after: int, generated: bool) -> None:
        free = TOTAL - len(set(self.held))
        blocks = (self.pool.extend if generated else self.pool.allocate)(count, 7, after)
        if count > free:
            assert blocks is None
        else:
            assert blocks is not None and len(set(blocks)) == count
            assert not set(blocks) & set(self.held)
            assert all(self.pool.holders[block] == 7 for block in blocks)
            self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.share(block)
        self.held.append(block)
        assert self.pool.is_shared(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.held)))
        dropped, self.held = self.held[:count], self.held[count:]
        self.pool.release(dropped)

    @rule(plan=st.sampled_from([plan_fill, plan_slide, plan_lift]), most=st.integers(1, TOTAL))
    def move(self, plan: MovePlan, most: int) -> None:
        for call in in_calls(plan(self.pool.free_map, most)):
            self.pool.move(call)
            places = {source + i: target + i for source, target, count in call for i in range(count)}
            self.held = [places.get(block, block) for block in self.held]

    @rule(extent=st.integers(0, TOTAL - 1))
    def take_or_give_back(self, extent: int) -> None:
        extents = self.pool.extents
        state = extents.states[extent] if extent < extents.count else None
        if state == FRESH:
            extents.take(extent)
        elif state == READY:
            extents.give_back(extent)

    @invariant()
    def counts_agree(self) -> None:
        check(self.pool, self.held)
        assert self.pool.free == TOTAL - len(set(self.held))

    @invariant()
    def spans_agree(self) -> None:
        line = "".join("x" if block in self.held else "." for block in range(TOTAL))
        spans = [span for span in line.split("x") if span]
        assert measure(self.pool, ())[:2] == (len(spans), max(map(len, spans), default=0))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=sampled(60), stateful_step_count=40, deadline=None)


def test_fresh_blocks_are_adjacent() -> None:
    assert BlockPool(8).allocate(5) == [0, 1, 2, 3, 4]


def test_double_release_is_an_error() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(ValueError, match="released more often"):
        pool.release(blocks)


def test_a_free_block_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="free"):
        BlockPool(2).share(1)


def test_check_notices_a_lost_block() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(AssertionError, match="reference counts"):
        check(pool, [0])


# -- placement -----------------------------------------------------------------------------------------------------


def kinds(pool: BlockPool) -> list[int]:
    return list(pool.extents.kinds)


def test_a_prompt_gets_the_lowest_run_it_fits_into() -> None:
    pool = BlockPool(16, 4)
    for _ in range(4):
        pool.allocate(4)
    pool.release([1, 2, 5, 6, 7, 12, 13, 14])
    assert pool.allocate(3) == [5, 6, 7]
    assert pool.allocate(2) == [1, 2]
    assert measure(pool, ())[:2] == (1, 3)


def test_a_prompt_that_fits_nowhere_gets_the_longest_runs() -> None:
    pool = BlockPool(16, 4)
    pool.allocate(16)
    pool.release([1, 3, 4, 8, 9, 10, 14])
    assert pool.allocate(6) == [1, 3, 4, 8, 9, 10]


@pytest.mark.parametrize("extents", [8, 5_000])
def test_finding_a_place_takes_no_longer_where_there_is_more_memory(
    extents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 16
    pool = BlockPool(extents * size, size)
    pool.allocate(pool.total)
    pool.release([block for block in range(pool.total) if block % size == 3])
    assert pool.allocate(1) == [3]
    looked_at: list[int] = []
    runs_in = FreeRuns._runs_in

    def counted(runs: FreeRuns, extent: int) -> tuple[int, int, int]:
        looked_at.append(extent)
        return runs_in(runs, extent)

    monkeypatch.setattr(FreeRuns, "_runs_in", counted)
    last = pool.total - size
    pool.release([last + 4, last + 5])
    assert pool.allocate(3) == [last + 3, last + 4, last + 5]
    assert pool.allocate(2) == [size + 3, 2 * size + 3]
    assert set(looked_at) == {0, 1, extents - 1} and len(looked_at) <= 6


def test_a_prompt_goes_on_behind_its_prefix() -> None:
    pool = BlockPool(16, 4)
    pool.allocate(8)
    pool.release([0, 1, 2, 3])
    assert pool.allocate(3, after=7) == [8, 9, 10]
    assert pool.allocate(3, after=2) == [0, 1, 2], "the place behind it is too small"


def test_generated_blocks_live_apart_from_prompts() -> None:
    pool = BlockPool(16, 4)
    pool.allocate(4)
    assert pool.extend(1, after=3) == [4]
    assert pool.allocate(3) == [8, 9, 10], "not beside the generated block, though it would fit"
    assert pool.extend(2, after=10) == [11, 5], "the rest of its own extent, then where generated blocks are"
    assert kinds(pool) == [PROMPT, GENERATION, PROMPT, 0]


def test_an_answer_goes_on_in_place_where_it_can() -> None:
    pool = BlockPool(16, 8)
    first, second = pool.extend(1), pool.extend(1)
    assert (first, second) == ([0], [1])
    assert pool.extend(2, after=1) == [2, 3]


def test_kinds_mix_rather_than_fail() -> None:
    pool = BlockPool(8, 4)
    pool.allocate(3)
    assert pool.extend(5) == [4, 5, 6, 7, 3]
    pool.release([4, 5, 6])
    assert pool.allocate(3) == [4, 5, 6]


def test_an_extent_that_is_taken_is_used_before_a_fresh_one() -> None:
    pool = BlockPool(16, 4)
    pool.extents.take(2)
    assert pool.extend(1) == [8]


def test_any_place_will_do_without_placement() -> None:
    pool = BlockPool(16, 4, apart=False)
    pool.allocate(4)
    assert pool.extend(1, after=9) == [4] and pool.allocate(2) == [5, 6]
    pool.release([1])
    assert pool.allocate(2) == [1, 7]


def test_extents_are_large_for_pages_and_small_for_small_arenas() -> None:
    assert extent_blocks(10_000, 368_640) == 22
    assert extent_blocks(10_000, 1 << 30) == 1
    assert extent_blocks(80, 32) == 10
    assert extent_blocks(1_000_000, 32) == 512
    assert extent_blocks(3, 32) == 1


def test_contiguity_and_needed_extents() -> None:
    pool = BlockPool(16, 4)
    pool.allocate(5)
    assert extents_needed(pool) == 2
    tables = []
    for blocks in ([1, 2, 3], [9, 7], [4], []):
        sequence = KVSequence([])
        sequence.blocks = blocks
        tables.append(sequence)
    assert contiguity(tables) == 2 / 3
    assert contiguity([]) == 1.0

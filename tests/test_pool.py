"""The block pool against a plain model of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cllm.kv.fragmentation import measure
from cllm.kv.pool import BlockPool

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

    @rule(count=st.integers(0, TOTAL + 4))
    def allocate(self, count: int) -> None:
        free = TOTAL - len(set(self.held))
        blocks = self.pool.allocate(count)
        if count > free:
            assert blocks is None
        else:
            assert blocks is not None and len(set(blocks)) == count
            assert not set(blocks) & set(self.held)
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
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


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

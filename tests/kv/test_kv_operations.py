"""Sequence operations of both managers: removing, shifting, truncating, keeping, among everything else they do."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cllm.backends.base import Chunk
from cllm.backends.fake import FakeBackend
from cllm.errors import BackendError, UnsupportedOperationError
from cllm.kv.manager import KVManager
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.paged.upkeep import UpkeepSettings
from cllm.kv.pins import PinMark
from cllm.kv.sequence import KVSequence
from kv_kit import paged, slots, state_of
from step_of import rows_of
from thorough import sampled
from window_kit import Logits, LoneMemory

Prompt = st.lists(st.integers(0, 1), min_size=1, max_size=40)


def compute(backend: FakeBackend, kv: KVManager, sequence: KVSequence, count: int) -> Logits:
    start = sequence.num_computed
    chunk = Chunk(
        sequence.tokens[start : start + count],
        start - sequence.dropped,
        True,
        sequence.slot,
        sequence.blocks,
        sequence.dropped,
        sequence.kept,
    )
    logits = rows_of(backend, [chunk])
    sequence.num_computed += count
    kv.verify(sequence)
    kv.commit(sequence)
    return logits[0]


def computed(backend: FakeBackend, kv: KVManager, prompt: list[int]) -> KVSequence:
    sequence = KVSequence(prompt)
    assert kv.admit(sequence) is not None
    compute(backend, kv, sequence, len(prompt) - sequence.num_computed)
    return sequence


def memory_of(backend: FakeBackend, sequence: KVSequence) -> list[int]:
    chunk = Chunk(array("i"), 0, False, sequence.slot, sequence.blocks)
    return backend.memory.read(chunk, sequence.held).tolist()


def drop(kv: KVManager, sequence: KVSequence, start: int, end: int) -> bool:
    if not kv.remove_range(sequence, start, end):
        return False
    kv.shift(sequence, end, start - end)
    return True


class OperationsMachine(RuleBasedStateMachine):
    """Each sequence has a memory of its own beside it, in which all is done the plain way."""

    layout = "paged"

    def __init__(self) -> None:
        super().__init__()
        self.backend, self.kv = self.build()
        self.live: list[tuple[KVSequence, LoneMemory]] = []

    def build(self) -> tuple[FakeBackend, KVManager]:
        settings = UpkeepSettings(compaction="always")
        return paged(blocks=14, eviction_threshold=0.8, watermark=0.1, extent_blocks=4, upkeep=settings)

    def draw(self, data: st.DataObject) -> tuple[KVSequence, LoneMemory]:
        return self.live[data.draw(st.integers(0, len(self.live) - 1))]

    @rule(prompt=Prompt)
    def admit(self, prompt: list[int]) -> None:
        sequence = KVSequence(prompt)
        cached = self.kv.admit(sequence)
        if cached is not None:
            memory = LoneMemory(self.layout)
            for token in prompt[:cached]:
                memory.compute(token)
            self.live.append((sequence, memory))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def advance(self, data: st.DataObject, token: int) -> None:
        sequence, memory = self.draw(data)
        if sequence.num_computed == len(sequence.tokens):
            sequence.tokens.append(token)
        count = data.draw(st.integers(1, len(sequence.tokens) - sequence.num_computed))
        self.kv.arrange()
        if self.kv.grow(sequence, count):
            logits = compute(self.backend, self.kv, sequence, count)
            end = sequence.num_computed
            expected = [memory.compute(each) for each in sequence.tokens[end - count : end]]
            assert np.array_equal(logits, expected[-1][0])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def remove_and_shift(self, data: st.DataObject) -> None:
        sequence, memory = self.draw(data)
        unit = self.kv.unit_tokens
        start = sequence.kept if sequence.dropped else unit * data.draw(st.integers(0, sequence.held // unit))
        most = (sequence.held - 1 - start) // unit
        if most < 1:
            return
        end = start + unit * data.draw(st.integers(1, most))
        others = [(other, memory_of(self.backend, other)) for other, _ in self.live if other is not sequence]
        if drop(self.kv, sequence, start, end):
            memory.drop(start, end - start)
        else:
            assert sequence.hole == 0 and sequence.dropped == memory.dropped
        assert all(memory_of(self.backend, other) == before for other, before in others)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence, memory = self.draw(data)
        lowest = sequence.kept + sequence.dropped if sequence.dropped else 0
        length = data.draw(st.integers(lowest, sequence.num_computed))
        stay = self.kv.truncate(sequence, length)
        assert stay == sequence.num_computed and length - self.kv.unit_tokens < stay <= length
        memory.truncate(stay)
        # What follows may be anything now.
        sequence.tokens = sequence.tokens[:stay] + array("i", [1 - token for token in sequence.tokens[stay:]])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, memory = self.draw(data)
        child = KVSequence(parent.tokens[: parent.num_computed])
        if self.kv.fork(parent, child):
            self.live.append((child, memory.copy()))

    def draw_range(self, data: st.DataObject, sequence: KVSequence) -> tuple[int, int] | None:
        """What can be kept: where tokens were dropped behind others, only from the beginning and with those."""
        unit, held = self.kv.unit_tokens, sequence.held
        if held == 0:
            return None
        if sequence.dropped and sequence.kept:
            return 0, data.draw(st.integers(sequence.kept, held))
        start = unit * data.draw(st.integers(0, (held - 1) // unit))
        return start, data.draw(st.integers(start + 1, held))

    def check_kept(self, sequence: KVSequence, memory: LoneMemory, start: int, end: int) -> None:
        if start:
            memory.drop(0, start)
        assert sequence.held == end - start or (start == 0 and end - self.kv.unit_tokens < sequence.held < end)
        memory.truncate(sequence.num_computed)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def keep_range(self, data: st.DataObject) -> None:
        sequence, memory = self.draw(data)
        if (chosen := self.draw_range(data, sequence)) is None:
            return
        others = [(other, memory_of(self.backend, other)) for other, _ in self.live if other is not sequence]
        if self.kv.keep_range(sequence, *chosen):
            self.check_kept(sequence, memory, *chosen)
        assert all(memory_of(self.backend, other) == before for other, before in others)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def copy_range(self, data: st.DataObject) -> None:
        parent, memory = self.draw(data)
        if (chosen := self.draw_range(data, parent)) is None:
            return
        child = KVSequence(parent.tokens[: parent.num_computed])
        if self.kv.copy_range(parent, child, *chosen):
            copy = memory.copy()
            self.check_kept(child, copy, *chosen)
            self.live.append((child, copy))
        else:
            assert not child.admitted

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        sequence, memory = self.draw(data)
        self.live.remove((sequence, memory))
        self.kv.release(sequence, keep=keep)

    @rule(budget_s=st.sampled_from([0.0, 1e-7, 0.01]))
    def maintain(self, budget_s: float) -> None:
        """On paged memory blocks are moved all the time."""
        self.kv.maintain(budget_s)

    @rule()
    def rebuild(self) -> None:
        for sequence, _ in self.live:
            self.kv.release(sequence, keep=False)
        self.live = []
        self.backend.rebuild()
        self.kv.reset()

    @invariant()
    def everything_is_accounted_for(self) -> None:
        self.kv.check()
        usage = self.kv.usage()
        assert usage.free + usage.evictable + usage.referenced == usage.total
        assert min(usage.free, usage.evictable, usage.referenced) >= 0
        if not self.live:
            assert usage.referenced == 0

    @invariant()
    def memory_is_what_it_should_be(self) -> None:
        for sequence, memory in self.live:
            assert memory_of(self.backend, sequence) == memory.tokens


class SlotOperationsMachine(OperationsMachine):
    layout = "slots"

    def build(self) -> tuple[FakeBackend, KVManager]:
        return slots(count=3, slot_tokens=128, store_tokens=60)


for _machine in (OperationsMachine, SlotOperationsMachine):
    _machine.TestCase.settings = settings(max_examples=sampled(60), stateful_step_count=40, deadline=None)
TestPagedOperations = OperationsMachine.TestCase
TestSlotOperations = SlotOperationsMachine.TestCase


@pytest.fixture(params=["paged", "slots"])
def managed(request: pytest.FixtureRequest) -> tuple[FakeBackend, KVManager]:
    return paged() if request.param == "paged" else slots()


def test_what_cannot_be_done_is_refused_by_name_and_changes_nothing(managed: tuple[FakeBackend, KVManager]) -> None:
    backend, kv = managed
    sequence = computed(backend, kv, list(range(20)))
    before = state_of(kv)
    with pytest.raises(ValueError, match=r"positions \[8, 24\) are outside the sequence, which has 20"):
        kv.remove_range(sequence, 8, 24)
    with pytest.raises(UnsupportedOperationError, match="truncate"):
        kv.remove_range(sequence, 8, 20)
    with pytest.raises(UnsupportedOperationError, match="there is no hole"):
        kv.shift(sequence, 8, -4)
    with pytest.raises(ValueError, match="cannot truncate a sequence of 20 computed tokens to 21"):
        kv.truncate(sequence, 21)
    assert state_of(kv) == before

    assert kv.remove_range(sequence, 4, 8)
    with pytest.raises(UnsupportedOperationError, match="a second hole at 8: close the one at 4"):
        kv.remove_range(sequence, 8, 12)
    with pytest.raises(UnsupportedOperationError, match="takes a shift by -4 from 8 on"):
        kv.shift(sequence, 8, -2)
    kv.shift(sequence, 8, -4)
    with pytest.raises(UnsupportedOperationError, match="a hole at 8: tokens were dropped at 4,"):
        kv.remove_range(sequence, 8, 12)
    with pytest.raises(UnsupportedOperationError, match="cannot truncate a sequence to 6 tokens: 4 tokens from 4 on"):
        kv.truncate(sequence, 6)
    kv.check()
    assert memory_of(backend, sequence) == [0, 1, 2, 3, *range(8, 20)]
    kv.release(sequence)


def test_a_range_is_kept_or_copied(managed: tuple[FakeBackend, KVManager]) -> None:
    backend, kv = managed
    parent = computed(backend, kv, list(range(20)))
    child = KVSequence(parent.tokens)
    for start, end in ((4, 21), (8, 8), (-4, 8)):
        with pytest.raises(ValueError, match=r"outside the sequence, which has 20"):
            kv.copy_range(parent, child, start, end)
    assert not child.admitted
    assert kv.copy_range(parent, child, 8, 15)
    assert memory_of(backend, child) == list(range(8, 15)) and memory_of(backend, parent) == list(range(20))
    assert kv.keep_range(parent, 4, 18)
    assert memory_of(backend, parent) == list(range(4, 18)) and memory_of(backend, child) == list(range(8, 15))
    kv.check()
    child.tokens = child.tokens[: child.num_computed] + array("i", [77])
    assert kv.grow(child, 1)
    compute(backend, kv, child, 1)
    assert memory_of(backend, child) == [*range(8, 15), 77] and memory_of(backend, parent) == list(range(4, 18))
    assert kv.peek(array("i", range(21)).tobytes()) == (20 if isinstance(kv, PagedKVManager) else 0)


def test_a_range_that_cannot_be_copied_leaves_nothing_behind(managed: tuple[FakeBackend, KVManager]) -> None:
    backend, kv = managed
    parent = computed(backend, kv, list(range(20)))
    assert drop(kv, parent, 4, 8)
    before, child = memory_of(backend, parent), KVSequence(parent.tokens)
    with pytest.raises(UnsupportedOperationError, match="a hole at 0: tokens were dropped at 4,"):
        kv.copy_range(parent, child, 8, 12)
    assert not child.admitted and memory_of(backend, parent) == before
    kv.check()


def test_blocks_go_whole() -> None:
    backend, kv = paged()
    sequence = computed(backend, kv, list(range(20)))
    with pytest.raises(UnsupportedOperationError, match=r"positions \[4, 10\).*whole blocks of 4 tokens"):
        kv.remove_range(sequence, 4, 10)


def test_a_backend_that_cannot_shift_is_named() -> None:
    backend, kv = slots()
    sequence = computed(backend, kv, list(range(20)))

    def cannot(*_: object) -> None:
        raise UnsupportedOperationError("this model cannot shift")

    backend.memory.shift = cannot  # type: ignore[method-assign, union-attr]
    with pytest.raises(BackendError, match="this model cannot shift"):
        drop(kv, sequence, 4, 8)
    # Whoever tried gives the sequence up; nothing of it is kept.
    kv.release(sequence, keep=False)
    kv.check()


def test_a_copy_that_fails_changes_nothing() -> None:
    backend, kv = paged(blocks=32)
    sequence = computed(backend, kv, list(range(40)))
    before = state_of(kv)

    def fail(*_: object) -> None:
        raise BackendError("no copy today")

    copy, backend.memory.copy_blocks = backend.memory.copy_blocks, fail  # type: ignore[union-attr, method-assign]
    with pytest.raises(BackendError, match="no copy today"):
        kv.remove_range(sequence, 4, 8)
    assert state_of(kv)[1:] == before[1:]
    kv.check()
    backend.memory.copy_blocks = copy  # type: ignore[union-attr, method-assign]
    assert drop(kv, sequence, 4, 8)
    assert memory_of(backend, sequence) == [*range(4), *range(8, 40)]


def test_what_is_left_in_the_tree_serves_others() -> None:
    backend, kv = paged(blocks=32)
    first = computed(backend, kv, list(range(40)))
    assert drop(kv, first, 4, 8)
    second = KVSequence(list(range(40)))
    assert kv.admit(second) == 36
    assert isinstance(kv, PagedKVManager) and set(first.blocks) & set(second.blocks) == {second.blocks[0]}
    kv.check()


def test_tokens_truncated_out_of_shared_blocks_are_others_still() -> None:
    backend, kv = paged()
    first = computed(backend, kv, list(range(20)))
    second = computed(backend, kv, list(range(20)))
    assert kv.truncate(second, 10) == 8  # the third block is shared, and would be half full
    second.tokens = array("i", [*range(8), *range(50, 60)])
    assert kv.grow(second, 10)
    compute(backend, kv, second, 10)
    assert memory_of(backend, first) == list(range(20))
    assert memory_of(backend, second) == [*range(8), *range(50, 60)]
    kv.check()


def test_what_a_cut_sequence_leaves_counts_as_one_of_those_that_may_be_held() -> None:
    """It is cached from then on, beside the sequence, which goes on."""
    for cut in (lambda kv, sequence: kv.truncate(sequence, 0), lambda kv, sequence: drop(kv, sequence, 4, 8)):
        backend, kv = paged(max_sequences=2)
        first = computed(backend, kv, [1] * 14)
        computed(backend, kv, [0] * 14)
        cut(kv, first)
        kv.check()
        assert kv.usage().sequences_running + kv.usage().sequences_held <= 2


def test_what_is_no_longer_pinned_counts_as_one_of_those_that_may_be_held() -> None:
    backend, kv = paged(max_sequences=1)
    pinned = computed(backend, kv, [1] * 10)
    mark = PinMark(4)
    kv.pin(pinned, mark)
    kv.release(pinned)
    computed(backend, kv, [0] * 10)
    assert mark.pin_id is not None and kv.unpin(mark.pin_id)
    kv.check()
    assert kv.usage().sequences_running + kv.usage().sequences_held <= 1

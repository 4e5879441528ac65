"""The memory of each simulated policy: nothing overlaps, nothing is lost, whatever comes and goes."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cllm.errors import ConfigError
from cllm.kv.ops import BlockGeometry
from cllm.kv.paged.block_table import BlockAllocation
from cllm.kv.sequence import KVSequence
from cllm_bench.simulate.backend import SimulatedBackend
from cllm_bench.simulate.contiguous import ContiguousKVManager, Tidying, segment_of
from cllm_bench.simulate.managers import NEVER, Refusals, RollingWindow, SimulatedManager, SimulatedPaged
from cllm_bench.simulate.policies import make_manager
from cllm_bench.simulate.settings import POLICIES, Settings
from simulate_kit import COST
from thorough import sampled

TOKENS = 96


def contiguous(tidying: Tidying, extra: int = 0) -> ContiguousKVManager:
    return ContiguousKVManager(
        TOKENS, bytes_per_token=10, tidying=tidying, reserve=lambda sequence: len(sequence.tokens) + extra
    )


def paged(*, sharing: bool) -> SimulatedPaged:
    return SimulatedPaged(
        BlockGeometry(TOKENS // 4, 4),
        bytes_per_token=10,
        sharing=sharing,
        eviction_threshold=0.9,
        eviction_policy="lru",
        watermark=0.0,
    )


def window() -> RollingWindow:
    return RollingWindow(BlockGeometry(TOKENS // 4, 4), bytes_per_token=10, watermark=0.0, window=10, sinks=2)


MANAGERS = {
    "contiguous": lambda: contiguous("none"),
    "contiguous, reserving": lambda: contiguous("none", extra=9),
    "holes": lambda: contiguous("holes"),
    "compact": lambda: contiguous("compact"),
    "compact, reserving": lambda: contiguous("compact", extra=9),
    "paged": lambda: paged(sharing=False),
    "paged+prefix": lambda: paged(sharing=True),
    "window": window,
}


def _indexed(sequence: KVSequence) -> int:
    return sequence.allocation.indexed if isinstance(sequence.allocation, BlockAllocation) else 0


class ManagerMachine(RuleBasedStateMachine):
    """Sequences are admitted, computed, grow by a token at a time, and go."""

    @initialize(name=st.sampled_from(sorted(MANAGERS)))
    def start(self, name: str) -> None:
        self.kv: SimulatedManager = MANAGERS[name]()
        self.running: list[KVSequence] = []

    @rule(letters=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=40))
    def admit(self, letters: list[int]) -> None:
        sequence = KVSequence(letters)
        before = self.kv.refusals.total
        cached = self.kv.admit(sequence)
        if cached is None:
            assert self.kv.refusals.total == before + 1
            return
        assert 0 <= cached < len(letters) and sequence.num_computed == cached
        sequence.num_computed = len(letters)
        self.kv.commit(sequence)
        self.running.append(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 30))
    def decode(self, data: st.DataObject, count: int) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        for _ in range(count):
            self._decode_one(sequence)

    def _decode_one(self, sequence: KVSequence) -> None:
        """`grow` and `commit` do something exactly where `grow_due` and `commit_due` say."""
        kv = self.kv
        due, complete = kv.grow_due(sequence), kv.commit_due(sequence)
        before = (kv.usage(), len(sequence.blocks))
        if not kv.grow(sequence, 1):
            assert due == 0
            return
        if due > 0:
            assert (kv.usage(), len(sequence.blocks)) == before
        assert due >= 0 and complete >= 1
        sequence.tokens.append(1)
        sequence.num_computed += 1
        indexed = _indexed(sequence)
        kv.commit(sequence)
        assert (_indexed(sequence) > indexed) == (complete == 1)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        self.kv.release(sequence, keep=keep)
        assert not sequence.admitted and sequence.num_computed == 0

    @rule()
    def maintain(self) -> None:
        self.kv.maintain(0.0)

    @invariant()
    def memory_is_sound(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        usage = self.kv.usage()
        assert usage.free + usage.evictable + usage.referenced == usage.total
        assert usage.sequences_running == len(self.running)
        used, taken = self.kv.stored()
        assert 0 <= used <= taken <= TOKENS
        assert usage.moved_bytes == self.kv.moved_bytes

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for sequence in self.running:
                self.kv.release(sequence)
            assert self.kv.usage().referenced == 0 and self.kv.stored() == (0, 0)


TestManagers = ManagerMachine.TestCase
TestManagers.settings = settings(max_examples=sampled(150), stateful_step_count=40, deadline=None)


def admit(kv: ContiguousKVManager, count: int) -> KVSequence | None:
    sequence = KVSequence([1] * count)
    if kv.admit(sequence) is None:
        return None
    sequence.num_computed = count
    return sequence


def in_pieces(kv: ContiguousKVManager) -> list[KVSequence]:
    """Four sequences of 24 tokens fill the memory; the first and the third go: 48 are free, 24 at most together."""
    sequences = [admit(kv, 24) for _ in range(4)]
    for sequence in sequences[::2]:
        assert sequence is not None
        kv.release(sequence)
    return [sequence for sequence in sequences[1::2] if sequence is not None]


def test_memory_in_pieces_is_useless_if_nothing_moves() -> None:
    kv = contiguous("none")
    in_pieces(kv)
    assert admit(kv, 30) is None
    assert kv.refusals == Refusals(1, 1)
    assert admit(kv, 60) is None
    assert kv.refusals == Refusals(2, 1), "there were not 60 tokens in all"
    usage = kv.usage()
    assert (usage.free, usage.free_segments, usage.largest_free_span) == (48, 2, 24)


@pytest.mark.parametrize(("tidying", "moved_tokens"), [("holes", 24), ("compact", 48)])
def test_tidying_makes_one_piece_of_it(tidying: Tidying, moved_tokens: int) -> None:
    kv = contiguous(tidying)
    in_pieces(kv)
    assert admit(kv, 30) is not None
    assert kv.moved_bytes == moved_tokens * 10
    assert kv.usage().compactions == 1
    kv.check()


def test_nothing_is_moved_where_it_cannot_help() -> None:
    kv = contiguous("compact")
    in_pieces(kv)
    assert admit(kv, 60) is None
    assert kv.moved_bytes == 0


def test_compaction_keeps_the_order() -> None:
    kv = contiguous("compact")
    left, right = in_pieces(kv)
    admit(kv, 30)
    assert (segment_of(left).start, segment_of(right).start) == (0, 24)


def test_a_sequence_grows_in_place_then_elsewhere_then_by_pushing_others() -> None:
    kv = contiguous("compact")
    first, second = admit(kv, 20), admit(kv, 20)
    assert first is not None and second is not None
    assert kv.grow(second, 1)
    assert (segment_of(second).start, segment_of(second).size, kv.moved_bytes) == (20, 36, 0)
    assert kv.grow(first, 1)
    assert (segment_of(first).start, segment_of(first).size, kv.moved_bytes) == (56, 36, 200)
    assert kv.grow(first, 40), "there are 20 tokens in front and 4 behind"
    assert (segment_of(second).start, segment_of(first).start, segment_of(first).size) == (0, 36, 60)
    assert kv.usage().free == 0
    kv.check()
    assert not kv.grow(first, 41)


def test_a_window_never_needs_more_than_its_blocks() -> None:
    kv = window()
    sequence = KVSequence([1] * 80)
    assert kv.admit(sequence) == 0
    assert len(sequence.blocks) == kv.blocks_per_sequence == 4
    sequence.num_computed = 80
    assert kv.grow_due(sequence) == NEVER
    assert kv.grow(sequence, 1000) and len(sequence.blocks) == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gets_the_same_memory(policy: str) -> None:
    chosen = Settings(policy=policy, blocks=100, block_size=16, max_running=4, window=64)
    usage = make_manager(chosen, SimulatedBackend(COST)).usage()
    assert usage.total * usage.unit_tokens == chosen.kv_tokens
    assert usage.bytes_per_unit == usage.unit_tokens * COST.kv_bytes_per_token


def test_impossible_geometries_are_refused_with_their_numbers() -> None:
    with pytest.raises(ConfigError, match="window=1024: one sequence needs 66 blocks, there are 10"):
        make_manager(Settings(policy="window", blocks=10), SimulatedBackend(COST))
    with pytest.raises(ConfigError, match="160 tokens of memory do not hold one slot of 200 tokens"):
        make_manager(Settings(policy="slots", blocks=10, context=200), SimulatedBackend(COST))

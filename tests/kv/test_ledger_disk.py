"""One of several models with a disk below its cache: memory changes hands while blocks are read into it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from cllm.kv.ledger import NEVER, Account, MemoryLedger
from cllm.kv.paged.upkeep import UpkeepSettings
from cllm.kv.pins import PinMark
from cllm.kv.sequence import KVSequence
from thorough import sampled
from tier_kit import BLOCK, Cache
from tier_machine import LONG, Tiers

EXTENT = 4 * BLOCK * 8
"""Four blocks of four tokens."""


def limited(directory: Path, account: Account, **options: object) -> Cache:
    return Cache(directory, account=account, extent_blocks=4, **options)  # type: ignore[arg-type]


class LimitedTiers(Tiers):
    """The machine of the tiers beside a neighbour that takes memory and gives it back."""

    def make_cache(self) -> Cache:
        self.ledger = MemoryLedger(6 * EXTENT)
        self.account = self.ledger.open("ours", fixed=0, least=3 * EXTENT)
        self.neighbour = self.ledger.open("neighbour", fixed=0, least=3 * EXTENT)
        return limited(self.directory, self.account, files=self.files, upkeep=UpkeepSettings(compaction="always"))

    def end_all(self) -> None:
        self.neighbour.give_back(0)
        self.neighbour.needs_no_more()
        super().end_all()

    @rule(extents=st.integers(1, 6), oldest=st.sampled_from([0.0, 1e12, NEVER]))
    def neighbour_asks(self, extents: int, oldest: float) -> None:
        self.neighbour.vacant, self.neighbour.unused, self.neighbour.oldest = 0, 0, NEVER
        self.neighbour.ask(extents * EXTENT, oldest)

    @rule()
    def neighbour_does_as_it_is_told(self) -> None:
        self.neighbour.unused = self.neighbour.kv
        self.neighbour.give_back(self.neighbour.target)

    @invariant()
    def the_budget_holds(self) -> None:
        if hasattr(self, "cache"):
            self.ledger.check()
            arena = self.cache.kv.arena
            assert max(arena.pool.extents.open * arena.extent_bytes, arena.taken_bytes) <= self.account.kv


TestLimitedTiers = LimitedTiers.TestCase
TestLimitedTiers.settings = settings(
    max_examples=sampled(80), stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture
def ledger() -> MemoryLedger:
    return MemoryLedger(6 * EXTENT)


def kept_on_disk(tmp_path: Path) -> None:
    """What an earlier server has left."""
    earlier = Cache(tmp_path)
    earlier.run(LONG)
    earlier.settle()
    earlier.store.close()


def test_blocks_that_are_being_read_into_stay_where_they_are(tmp_path: Path, ledger: MemoryLedger) -> None:
    kept_on_disk(tmp_path)
    ours, other = (ledger.open(name, fixed=0, least=3 * EXTENT) for name in ("ours", "other"))
    cache = limited(tmp_path, ours)
    in_the_way = cache.ask(list(range(11 * BLOCK)))
    cache.admit()
    asks = cache.ask([*LONG, 7])
    cache.admit()
    assert cache.kv.loading == 1
    cache.finish(in_the_way)  # below the blocks that are being read into
    other.ask(3 * EXTENT, NEVER)
    assert ours.target < ours.kv, "it was told to give something back"
    while cache.kv.maintain(0.0):
        pass
    cache.store.work()
    cache.admit()
    assert asks in cache.running and cache.cached[id(asks)] == 40
    cache.assert_sound()
    while cache.kv.maintain(0.0):
        pass
    other.ask(3 * EXTENT, NEVER)
    assert other.kv == 3 * EXTENT, "it got its right as soon as nothing was in the way"
    cache.assert_sound()
    ledger.check()


def test_a_load_takes_no_more_than_was_granted(tmp_path: Path, ledger: MemoryLedger) -> None:
    kept_on_disk(tmp_path)
    ours, other = (ledger.open(name, fixed=0, least=3 * EXTENT) for name in ("ours", "other"))
    other.ask(5 * EXTENT, NEVER)
    other.unused = 0
    cache = limited(tmp_path, ours)
    asks = cache.ask([*LONG, 7])
    cache.admit()
    assert cache.kv.loading == 0 and cache.kv.awaits_memory and ours.kv <= EXTENT
    other.give_back(3 * EXTENT)
    cache.admit()
    assert cache.kv.loading == 1 and ours.kv == 3 * EXTENT
    cache.store.work()
    cache.admit()
    assert cache.cached[id(asks)] == 40


def pin(cache: Cache, tokens: list[int]) -> None:
    sequence = cache.ask(tokens)
    cache.admit()
    cache.compute(sequence, len(tokens))
    mark = PinMark(len(tokens))
    cache.kv.pin(sequence, mark)
    assert mark.refusal is None
    cache.finish(sequence)


def test_pins_give_way_to_what_another_model_has_a_right_to(tmp_path: Path, ledger: MemoryLedger) -> None:
    ours, other = (ledger.open(name, fixed=0, least=3 * EXTENT) for name in ("ours", "other"))
    cache = limited(tmp_path, ours, pin_limit=1.0)
    for number in range(4):
        pin(cache, [number, *range(1, 5 * BLOCK)])
    assert len(cache.kv.pins.all) == 4
    for _ in range(2):
        other.ask(3 * EXTENT, NEVER)
        while cache.kv.maintain(0.0):
            pass
    other.ask(3 * EXTENT, NEVER)
    assert other.kv == 3 * EXTENT
    assert len(cache.kv.pins.all) == 2, "and only as many as need be"
    cache.assert_sound()


def test_ones_own_pins_give_way_to_a_request_that_others_will_not_make_room_for(
    tmp_path: Path, ledger: MemoryLedger
) -> None:
    ours, other = (ledger.open(name, fixed=0, least=3 * EXTENT) for name in ("ours", "other"))
    other.ask(3 * EXTENT, NEVER)
    cache = limited(tmp_path, ours, pin_limit=1.0)
    for number in range(2):
        pin(cache, [number, *range(1, 5 * BLOCK)])
    asks = KVSequence(list(range(50, 50 + 12 * BLOCK)))
    assert cache.kv.admit(asks) == 0
    assert len(cache.kv.pins.all) == 0 and other.kv == 3 * EXTENT

"""The cache with the host's memory below it: what comes from there is what was computed, however late copies are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from numpy.typing import NDArray

from cllm.backends.fake import FakeBackend
from cllm.errors import BackendError
from cllm.kv.ops import BlockBytes
from cllm.kv.paged.upkeep import UpkeepSettings
from cllm.kv.radix import COMMON_SPACE
from cllm.kv.throughput import GUESS_BYTES
from cllm.kv.tiers.host_tier import HostTier
from disk_kit import FaultyFiles
from thorough import sampled
from tier_kit import BLOCK, Cache
from tier_machine import LONG, Tiers, prompt

OTHER = prompt(1, 60, 0, 60)


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


class HostTiers(Tiers):
    """As with the disk alone; copies are made in pieces, late, or never."""

    cache: HostCache

    def make_cache(self) -> Cache:
        return HostCache(self.directory, files=self.files, upkeep=UpkeepSettings(compaction="always"))

    @rule(count=st.integers(1, 3), newest=st.booleans())
    def copies_are_made(self, count: int, newest: bool) -> None:
        self.cache.rows.work(count, newest=newest)

    @rule(after=st.integers(1, 12))
    def a_copy_fails(self, after: int) -> None:
        """Whoever asked for it goes on without."""
        self.cache.rows.fail_at = self.cache.rows.calls + after

    @rule(
        order=st.lists(st.integers(0, 3), min_size=2, max_size=6),
        evicted=st.integers(0, 24),
        copies=st.integers(0, 1),
        newest=st.booleans(),
    )
    def in_turns(self, order: list[int], evicted: int, copies: int, newest: bool) -> None:
        """More than the arena holds, one after the other, with copies that are made when they must be."""
        self.end_all()
        for trunk in order:
            sequence = self.cache.ask(prompt(trunk, 45, 0, 45))
            for _ in range(20):
                self.cache.admit()
                if sequence in self.cache.running:
                    break
                self.cache.rows.work(1, newest=newest)
                self.cache.clock.now += 1.0
            self.cache.compute(sequence, 45)
            self.cache.finish(sequence)
            self.cache.lose(evicted)
            self.cache.rows.work(copies)

    def end_all(self) -> None:
        self.cache.rows.fail_at = 0
        super().end_all()


class HostWithoutDisk(HostTiers):
    def make_cache(self) -> Cache:
        cache = HostCache(self.directory, files=self.files, rows_at_once=3)
        cache.kv.tiers.disk = None
        return cache


TestHostTiers = HostTiers.TestCase
TestHostWithoutDisk = HostWithoutDisk.TestCase
TestHostTiers.settings = TestHostWithoutDisk.settings = settings(
    max_examples=sampled(60), stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture
def cache(tmp_path: Path) -> HostCache:
    made = HostCache(tmp_path)
    made.kv.tiers.disk = None
    return made


def test_what_was_evicted_comes_back(cache: HostCache) -> None:
    assert cache.run(LONG) == 0
    cache.lose(24)
    computed = cache.backend.computed_tokens
    assert cache.run(LONG) == 40
    assert cache.backend.computed_tokens - computed == 1
    host = cache.kv.usage().host
    assert (host.loads, host.loaded_tokens, host.failed_loads) == (1, 40, 0)
    assert host.bytes == host.out_bytes == host.in_bytes == 10 * cache.rows.row_bytes
    assert cache.kv.loading == 0 and cache.kv.usage().referenced == 0


def test_what_came_back_is_not_copied_again(cache: HostCache) -> None:
    cache.run(LONG)
    for _ in range(3):
        cache.lose(24)
        assert cache.run(LONG) == 40
    cache.settle()
    assert cache.kv.usage().host.out_bytes == 10 * cache.rows.row_bytes


def test_a_block_is_copied_before_it_is_overwritten(cache: HostCache) -> None:
    cache.run(LONG)
    cache.lose(24)
    assert cache.rows.under_way, "nothing has been copied yet"
    assert cache.run(OTHER) == 0  # takes the same blocks
    assert cache.run(LONG) == 40


def test_other_spaces_do_not_find_it(cache: HostCache) -> None:
    cache.run(LONG, b"one")
    cache.lose(24)
    assert cache.run(LONG, b"two") == 0 and cache.run(LONG) == 0


def test_what_went_on_from_a_common_prefix_comes_back_behind_it(cache: HostCache) -> None:
    begin, whole = LONG[: 4 * BLOCK + 1], LONG
    cache.run(begin, COMMON_SPACE)
    held = cache.ask(begin, COMMON_SPACE)
    cache.admit()  # which keeps it from being evicted
    assert cache.run(whole, b"one") == 4 * BLOCK
    cache.lose(24)
    assert cache.run(whole, b"two") == 4 * BLOCK, "what is another's own is not found"
    cache.lose(24)
    assert cache.run(whole, b"one") == 40
    cache.compute(held, 1)
    cache.finish(held)
    cache.assert_sound()


def test_the_limit_is_hard_and_beginnings_stay_longest(tmp_path: Path) -> None:
    cache = HostCache(tmp_path, host_rows=6)
    cache.kv.tiers.disk = None
    cache.run(LONG)
    cache.lose(24)
    cache.settle()
    host = cache.kv.usage().host
    assert host.bytes == host.limit_bytes == 6 * cache.rows.row_bytes
    assert cache.run(LONG) == 6 * BLOCK
    cache.assert_sound()


def test_who_waits_for_a_copy_holds_up_nobody(cache: HostCache) -> None:
    cache.run(LONG)
    cache.lose(24)
    first, second = cache.ask(LONG), cache.ask([1, 2, 3])
    cache.admit()
    assert cache.waiting == [first] and cache.running == [second] and cache.kv.loading == 1
    due = cache.kv.upkeep_at()
    assert due is not None and due <= cache.clock.now + 0.001, "nobody else tells when it is done"
    cache.assert_sound()
    cache.work()
    cache.admit()
    assert cache.running == [second, first] and cache.cached[id(first)] == 40


def test_several_wait_for_one_load(cache: HostCache) -> None:
    cache.run(LONG)
    cache.lose(24)
    asked = [cache.ask([*LONG, number]) for number in range(3)]
    cache.admit()
    assert cache.kv.loading == 1
    cache.work()
    cache.admit()
    assert cache.running == asked and cache.kv.usage().host.loads == 1


def test_whoever_leaves_while_it_loads_leaves_nothing_behind(cache: HostCache) -> None:
    cache.run(LONG)
    cache.lose(24)
    cache.ask(LONG)
    cache.admit()
    cache.waiting.clear()
    cache.work()
    cache.kv.maintain(0.0)
    assert cache.kv.loading == 0 and cache.kv.usage().referenced == 0
    assert cache.run(LONG) == 40 and cache.kv.usage().host.loads == 1, "what came stays for others"


def test_copies_that_are_late_are_not_waited_for(cache: HostCache) -> None:
    cache.run(LONG)
    cache.lose(24)
    sequence = cache.ask(LONG)
    cache.admit()
    cache.clock.now += 10.0
    cache.admit()
    assert cache.running == [sequence] and cache.cached[id(sequence)] == 0 and cache.kv.loading == 1
    cache.work()
    cache.kv.maintain(0.0)
    assert cache.kv.loading == 0
    cache.assert_sound()


def test_what_is_computed_sooner_is_neither_kept_nor_brought(cache: HostCache) -> None:
    cache.run(LONG)
    cache.lose(24)
    cache.settle()
    cache.host.inwards.add(GUESS_BYTES, 100.0)
    cache.kv.token_s = 1e-9
    assert cache.run(LONG) == 0
    copied = cache.kv.usage().host.out_bytes
    cache.run(OTHER)
    cache.lose(24)
    cache.settle()
    assert cache.kv.usage().host.out_bytes == copied


def test_what_may_go_soon_is_copied_ahead(cache: HostCache) -> None:
    cache.run(OTHER)
    cache.run(LONG[:32])
    assert cache.kv.usage().free == 1 and len(cache.host) == 0
    cache.settle()
    assert len(cache.host) == 5, "with what is free, a quarter of the arena"
    copied = cache.rows.calls
    cache.kv.maintain(0.0)
    cache.kv.maintain(0.0)
    assert cache.rows.calls == copied, "nothing is to do any more"
    cache.lose(5)
    assert not cache.rows.under_way and cache.rows.calls == copied, "they were there already"


def test_memory_that_is_renewed_keeps_what_was_copied(cache: HostCache) -> None:
    cache.run(LONG)
    cache.lose(24)
    cache.work()
    cache.kv.maintain(0.0)
    cache.forget()
    assert cache.run(LONG) == 40


def test_memory_that_is_renewed_does_not_keep_what_was_not(cache: HostCache) -> None:
    cache.run(LONG)
    cache.lose(24)
    cache.ask(LONG)
    cache.admit()
    assert cache.kv.loading == 1 and len(cache.rows.under_way) == 2
    cache.forget()
    cache.waiting.clear()
    assert len(cache.host) == 0 and cache.kv.loading == 0
    cache.assert_sound()
    assert cache.run(LONG) == 0


def scenario(cache: HostCache) -> None:
    for tokens in (LONG, OTHER, LONG, prompt(2, 50, 0, 50), OTHER, LONG):
        cache.run(tokens)
        cache.assert_sound()
    cache.settle()
    cache.assert_sound()
    assert cache.kv.loading == 0 and cache.kv.usage().referenced == 0


def test_every_call_fails_in_turn(tmp_path: Path) -> None:
    whole = HostCache(tmp_path / "whole")
    whole.rows.waits_fail = True
    scenario(whole)
    assert whole.kv.usage().host.loads > 0
    for number in range(1, whole.rows.calls + 1):
        cache = HostCache(tmp_path / str(number), files=FaultyFiles())
        cache.rows.fail_at, cache.rows.waits_fail = number, True
        try:
            scenario(cache)
        except BackendError as error:
            assert error.fatal and "waiting for block copies failed" in str(error)
            cache.waiting.clear()
            cache.running.clear()
            cache.forget()
            scenario(cache)


def test_a_backend_that_refuses_three_times_is_not_asked_any_more(
    cache: HostCache, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise BackendError("no copies")

    cache.rows.copy_out = refuse  # type: ignore[method-assign,assignment]
    for number in range(4):
        cache.run(prompt(number, 40, 0, 40))
        cache.lose(24)
        cache.assert_sound()
    assert caplog.text.count("no copies") >= 3 and "host memory is no longer used" in caplog.text
    assert cache.kv.details()["host"]["used"] is False


def test_the_disk_is_written_from_there(tmp_path: Path) -> None:
    cache = HostCache(tmp_path)
    cache.run(LONG)
    cache.backend.memory.reads_wait = True
    bystander = cache.ask([1, 2, 3])
    cache.admit()
    assert cache.running == [bystander], "something runs"
    cache.settle()
    assert cache.store.stats().blocks == 10
    cache.finish(bystander)
    cache.store.close()
    later = Cache(tmp_path)
    assert later.run(LONG) == 40


def test_what_left_the_arena_before_it_was_written_still_is(tmp_path: Path) -> None:
    cache = HostCache(tmp_path)
    cache.run(LONG)
    cache.lose(24)
    cache.settle()
    assert cache.store.stats().blocks == 10


def test_first_the_hosts_memory_then_the_disk(tmp_path: Path) -> None:
    cache = HostCache(tmp_path, host_rows=6)
    cache.run(LONG)
    cache.settle()
    cache.lose(24)
    cache.work()
    assert cache.run(LONG) == 40
    usage = cache.kv.usage()
    assert usage.host.loaded_tokens == 6 * BLOCK and usage.disk.loaded_tokens == 4 * BLOCK


def test_what_was_offered_is_written_at_the_end(tmp_path: Path) -> None:
    cache = HostCache(tmp_path)
    cache.run(LONG)
    late = cache.rows.copy_out
    copies: list[LateCopy] = []

    def copy_out(blocks: Sequence[int], rows: Sequence[int]) -> LateCopy:
        copies.append(late(blocks, rows))
        copies[-1].make()  # the device goes on, whoever looks
        return copies[-1]

    cache.rows.copy_out = copy_out  # type: ignore[method-assign]
    cache.kv.drain(60.0)
    cache.store.work()
    assert copies and cache.store.stats().blocks == 10 and len(cache.kv.offload.to_disk) == 0


def test_a_load_that_cannot_begin_leaves_the_disk_to_be_asked(tmp_path: Path) -> None:
    """Entering a prefix divides what the tree holds, though nothing is loaded."""
    cache = HostCache(tmp_path, blocks=40, host_rows=40)
    whole = list(range(100, 160))
    cache.run(whole)
    cache.settle()
    cache.lose(40)
    cache.rows.work()
    cache.kv.maintain(0.0)
    host, tier = cache.kv.tiers.host, cache.kv.tiers.disk
    cache.kv.tiers.host = cache.kv.tiers.disk = None
    cache.run([*whole[:20], *range(500, 520)])
    cache.kv.tiers.host, cache.kv.tiers.disk = host, tier
    cache.rows.fail_at = cache.rows.calls + 1
    assert cache.run(whole) == 56
    cache.assert_sound()
    usage = cache.kv.usage()
    assert usage.host.loads == 0 and usage.disk.loaded_tokens == 36


@pytest.mark.parametrize("refuses", [True, False], ids=["refuses copies", "has no rows"])
def test_the_disk_is_written_without_it(tmp_path: Path, refuses: bool) -> None:
    cache = HostCache(tmp_path)

    def refuse(*_: object) -> None:
        raise BackendError("no copies")

    if refuses:
        cache.rows.copy_out = refuse  # type: ignore[method-assign,assignment]
    else:
        cache.rows.most_rows = cache.rows.rows = 0
    cache.run(LONG)
    cache.settle()
    assert cache.store.stats().blocks == 10
    assert cache.kv.details()["host"]["used"] is False
    cache.run(OTHER)
    cache.backend.memory.reads_wait = True
    bystander = cache.ask([1, 2, 3])
    cache.admit()
    cache.settle()
    assert cache.running == [bystander] and cache.store.stats().blocks == 10, "the steps would be waited for"
    cache.finish(bystander)
    cache.settle()
    assert cache.store.stats().blocks > 10


def test_offers_wait_until_there_are_rows_for_them(tmp_path: Path) -> None:
    cache = HostCache(tmp_path)
    cache.rows.rows = 0
    cache.rows.want_more = lambda count: None  # type: ignore[method-assign]
    cache.run(LONG)
    cache.settle()
    assert cache.store.stats().blocks == 0
    cache.rows.rows = cache.rows.most_rows
    cache.settle()
    assert cache.store.stats().blocks == 10


def test_blocks_are_moved_again_as_soon_as_they_are_copied(cache: HostCache) -> None:
    cache.run(LONG)
    cache.lose(24)
    assert cache.kv.arena.pinned == 10
    cache.rows.work()
    cache.kv.maintain(0.0)
    assert cache.kv.arena.pinned == 0

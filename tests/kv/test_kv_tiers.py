"""The cache with a disk below it: whatever comes from there is what was computed, and nothing waits for ever."""

from __future__ import annotations

import errno
import os
import random
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from cllm.errors import BackendError
from cllm.kv.ops import SlotGeometry, SlotOps
from cllm.kv.paged.upkeep import UpkeepSettings
from cllm.kv.radix import COMMON_SPACE
from cllm.kv.sizing import most_bytes
from cllm.kv.slots.manager import SlotKVManager
from cllm.kv.throughput import GUESS_BYTES
from disk_kit import FaultyFiles
from thorough import sampled
from tier_kit import BLOCK, Cache
from tier_machine import LONG, Tiers, prompt


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


class SlotTiers(Tiers):
    def make_cache(self) -> Cache:
        return SlotCache(self.directory, files=self.files)


class LocalTiers(Tiers):
    """Two of three layers have a window of six tokens."""

    def make_cache(self) -> Cache:
        return Cache(self.directory, files=self.files, upkeep=UpkeepSettings(compaction="always"), window=6, blocks=64)


class StateTiers(Tiers):
    """A layer carries a state of three cells."""

    def make_cache(self) -> Cache:
        return Cache(self.directory, files=self.files, upkeep=UpkeepSettings(compaction="always"), states=3, blocks=64)


TestTiers = Tiers.TestCase
TestSlotTiers = SlotTiers.TestCase
TestLocalTiers = LocalTiers.TestCase
TestStateTiers = StateTiers.TestCase
TestTiers.settings = TestSlotTiers.settings = TestLocalTiers.settings = TestStateTiers.settings = settings(
    max_examples=sampled(60), stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path)


def again(cache: Cache, tmp_path: Path, **options: object) -> Cache:
    """Another server, after the first one has ended."""
    cache.settle()
    cache.store.close()
    return Cache(tmp_path, **options)  # type: ignore[arg-type]


def test_what_was_computed_is_found_after_a_restart(cache: Cache, tmp_path: Path) -> None:
    assert cache.run(LONG) == 0
    later = again(cache, tmp_path)
    computed = later.backend.computed_tokens
    assert later.run([*LONG, 7]) == len(LONG) - 1
    assert later.backend.computed_tokens - computed == 2
    assert later.kv.usage().disk.loaded_tokens == 40 and later.kv.usage().disk.failed_loads == 0
    assert later.kv.loading == 0 and later.kv.usage().referenced == 0


PARTIAL = pytest.mark.parametrize(
    "layers", [{"window": 6, "blocks": 64}, {"states": 3, "blocks": 64}, {"window": 6, "states": 2, "blocks": 80}]
)


@PARTIAL
def test_a_snapshot_comes_back_with_its_prefix_or_neither_does(tmp_path: Path, layers: dict[str, int]) -> None:
    cache = Cache(tmp_path, **layers)
    assert cache.run(LONG) == 0
    later = again(cache, tmp_path, **layers)
    computed = later.backend.computed_tokens
    assert later.run([*LONG, 7]) == len(LONG) - 1
    assert later.backend.computed_tokens - computed == 2
    assert later.kv.usage().disk.loaded_tokens == 40 and later.kv.usage().referenced == 0
    later.kv.check()
    third = again(later, tmp_path, **layers)
    for segment in sorted(tmp_path.glob("*/*.kv")):
        content = segment.read_bytes()
        segment.write_bytes(content[:-4096] + bytes(4096))  # the last record: cells of the snapshot
    assert third.run([*LONG, 8]) == 0
    third.kv.check()


@PARTIAL
def test_a_server_that_died_while_it_wrote_leaves_whole_prefixes_or_none(
    tmp_path: Path, layers: dict[str, int]
) -> None:
    """Wherever a file ends: what is found is right, and has all that is needed to go on."""
    cache = Cache(tmp_path / "first", **layers)
    cache.run(LONG)
    cache.settle()
    cache.store.close()
    segments = sorted((tmp_path / "first").glob("*/*.kv"))
    found = []
    for number, tenths in product(range(len(segments)), range(11)):
        shutil.copytree(tmp_path / "first", tmp_path / f"{number}-{tenths}")
        segment = tmp_path / f"{number}-{tenths}" / segments[number].relative_to(tmp_path / "first")
        os.truncate(segment, segment.stat().st_size * tenths // 10)
        found.append(Cache(segment.parents[1], **layers).run([*LONG, 7]))
    assert set(found) == {0, 40} and found.count(40) == len(segments)


@PARTIAL
def test_a_load_that_lacks_a_cell_of_a_snapshot_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: dict[str, int]
) -> None:
    cache = Cache(tmp_path, **layers)
    assert cache.run(LONG) == 0
    later = again(cache, tmp_path, **layers)
    finish = later.kv.loads._finish_from_disk
    monkeypatch.setattr(later.kv.loads, "_finish_from_disk", lambda loaded, *which: finish(loaded - 1, *which))
    assert later.run([*LONG, 8]) == 0
    assert later.kv.usage().disk.failed_loads == 1 and later.kv.usage().disk.loaded_tokens == 0
    later.kv.check()


def test_other_spaces_do_not_find_it(cache: Cache, tmp_path: Path) -> None:
    cache.run(LONG, b"one")
    later = again(cache, tmp_path)
    assert later.run(LONG, b"two") == 0 and later.run(LONG) == 0
    assert later.run(LONG, b"one") == 40


def test_what_is_common_is_written_once_and_each_finds_its_own_after_it(cache: Cache, tmp_path: Path) -> None:
    longer = [*LONG[:40], *range(300, 317)]
    cache.run(LONG[:40], COMMON_SPACE)
    for _ in range(2):
        for space in (b"one", b"two"):
            assert cache.run(longer, space) >= 40
    later = again(cache, tmp_path)
    assert later.store.details()["blocks"] == 10 + 2 * 4
    assert later.run(longer, b"one") == 0, "what is common is found by others when it is in memory"
    later.kv.room.evict(24)
    assert later.run(LONG[:40], COMMON_SPACE) == 36
    assert later.run(longer, b"three") == 40
    assert later.run(longer, b"two") == 56


def test_what_was_evicted_comes_back(cache: Cache) -> None:
    cache.run(LONG)
    cache.settle()
    cache.kv.room.evict(24)
    assert cache.kv.peek(cache.ask(LONG).tokens.tobytes()) == 0
    cache.waiting.clear()
    assert cache.run(LONG) == 40


def test_offers_are_saved_from_eviction(cache: Cache) -> None:
    cache.run(LONG)
    cache.kv.room.evict(24)  # before anything was written
    cache.store.work()
    assert cache.run(LONG) == 40


def test_what_runs_for_long_is_written_before_it_ends(cache: Cache, tmp_path: Path) -> None:
    sequence = cache.ask(LONG)
    cache.admit()
    cache.compute(sequence, 2 * BLOCK)
    cache.settle()
    assert cache.store.details()["blocks"] == 0, "so much is not worth it"
    cache.compute(sequence, len(LONG))
    for _ in range(12):  # memory for copies is taken one by one, by the store
        cache.settle()
    assert cache.store.details()["blocks"] == 10
    cache.finish(sequence)
    cache.settle()
    assert cache.store.writer.speed.total < 2 * 4096 + 10 * cache.tier.block_bytes + 4096, "it was written once"


def test_one_off_prompts_do_not_wear_the_disk(cache: Cache) -> None:
    short = LONG[: 2 * BLOCK + 1]
    cache.run(short)
    cache.settle()
    assert cache.store.writer.speed.total == 0
    cache.run(short)
    cache.settle()
    assert cache.store.details()["blocks"] == 2, "it was used again"


def test_nothing_is_written_that_is_computed_sooner(cache: Cache) -> None:
    cache.kv.token_s = 1e-9
    cache.store.reader.speed.add(GUESS_BYTES, 1.0)
    cache.run(LONG)
    cache.settle()
    assert cache.store.writer.speed.total == 0


def test_a_disk_that_was_never_measured_is_tried(cache: Cache, tmp_path: Path) -> None:
    cache.kv.token_s = 1e-9
    cache.run(LONG)
    later = again(cache, tmp_path)
    later.kv.token_s = 1e-9
    assert later.run(LONG) == 40


def test_nothing_is_loaded_that_is_computed_sooner(cache: Cache, tmp_path: Path) -> None:
    cache.run(LONG)
    later = again(cache, tmp_path)
    later.kv.token_s = 1e-9
    later.store.reader.speed.add(GUESS_BYTES, 1.0)
    assert later.run(LONG) == 0 and later.kv.usage().disk.loads == 0


def test_who_waits_for_the_disk_holds_up_nobody(cache: Cache, tmp_path: Path) -> None:
    cache.run(LONG)
    later = again(cache, tmp_path)
    first, second = later.ask(LONG), later.ask([1, 2, 3])
    later.admit()
    assert later.waiting == [first] and later.running == [second] and later.kv.loading == 1
    later.assert_sound()
    assert later.kv.usage().referenced == 11, "blocks that are being read count"
    later.store.work()
    later.admit()
    assert later.running == [second, first] and later.cached[id(first)] == 40


def test_several_wait_for_one_load(cache: Cache, tmp_path: Path) -> None:
    cache.run(LONG)
    later = again(cache, tmp_path)
    asked = [later.ask([*LONG, number]) for number in range(3)]
    later.admit()
    assert later.kv.loading == 1
    later.store.work()
    later.admit()
    assert later.running == asked and later.kv.usage().disk.loads == 1
    assert {later.cached[id(each)] for each in asked} == {40}


def test_a_slow_disk_is_not_waited_for(cache: Cache, tmp_path: Path) -> None:
    cache.run(LONG)
    later = again(cache, tmp_path, blocks=64)
    sequence = later.ask(LONG)
    later.admit()
    due = later.kv.upkeep_at()
    assert later.waiting == [sequence] and due is not None
    later.clock.now = due
    later.admit()
    assert later.running == [sequence] and later.cached[id(sequence)] == 0
    assert later.kv.loading == 1, "the reader still has the blocks"
    assert later.kv.upkeep_at() is None or later.kv.upkeep_at() > later.clock.now, "nobody turns in vain meanwhile"
    other = later.ask([*LONG, 1])
    later.admit()
    assert later.running == [sequence, other], "nobody else waits for a disk that is late"
    later.store.work()
    later.kv.maintain(0.0)
    assert later.kv.loading == 0
    later.assert_sound()


def test_whoever_leaves_while_it_loads_leaves_nothing_behind(cache: Cache, tmp_path: Path) -> None:
    cache.run(LONG)
    later = again(cache, tmp_path)
    later.ask(LONG)
    later.admit()
    later.waiting.clear()
    assert later.kv.loading == 1 and later.kv.usage().referenced == 10
    later.store.work()
    later.kv.maintain(0.0)
    assert later.kv.loading == 0 and later.kv.usage().referenced == 0
    assert later.run(LONG) == 40 and later.kv.usage().disk.loads == 1, "what came stays for others"


def test_blocks_that_are_read_are_not_moved(cache: Cache, tmp_path: Path) -> None:
    cache.run(LONG)
    later = again(cache, tmp_path, upkeep=UpkeepSettings(compaction="always"))
    bystander, sequence = later.ask([1, 2, 3]), later.ask(LONG)
    later.admit()
    assert later.running == [bystander] and later.kv.loading == 1
    (load,) = later.kv.loads.queue
    assert load.holder is not None
    before = list(load.holder.blocks)
    for _ in range(5):
        later.kv.maintain(1.0)
        later.clock.now += 0.01
    assert load.holder.blocks == before
    later.store.work()
    later.admit()
    assert later.cached[id(sequence)] == 40
    later.assert_sound()


def test_memory_that_is_renewed_is_not_written_to_by_old_loads(cache: Cache, tmp_path: Path) -> None:
    cache.run(LONG)
    later = again(cache, tmp_path)
    later.ask(LONG)
    later.admit()
    assert later.kv.loading == 1
    later.forget()
    assert later.kv.loading == 0
    later.waiting.clear()
    other = later.ask(prompt(1, 40, 0, 60))
    later.admit()
    later.compute(other, 60)
    later.store.work()  # the old load is read now, to where nobody looks
    later.assert_right(other)
    later.assert_sound()


def test_a_backend_that_refuses_costs_no_request(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise BackendError("no")

    cache.run(LONG)
    later = again(cache, tmp_path)
    for name in ("land", "read_blocks", "landing", "landing", "landing"):
        with monkeypatch.context() as patch:
            patch.setattr(later.backend.memory, name, refuse)
            assert later.run(LONG) == 0
        later.assert_sound()
        later.kv.reset()
    assert "loading blocks from disk failed: no; the disk is no longer used" in caplog.text
    assert later.run(LONG) == 0


def test_what_came_is_taken_in_though_memory_is_given_to_others(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for it was woken once, and not again."""

    class Busy:
        def tend(self, **_: bool) -> bool:
            return True

    cache.run(LONG)
    later = again(cache, tmp_path)
    later.ask(LONG)
    later.admit()
    assert later.kv.loading == 1
    later.store.work()
    monkeypatch.setattr(later.kv, "resizer", Busy())
    assert later.kv.maintain(0.0) and later.kv.loading == 0


def test_memory_in_doubt_is_not_passed_over_while_blocks_are_kept(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        raise BackendError("the device is gone", fatal=True)

    cache.run(LONG)
    monkeypatch.setattr(cache.kv.arena.ops, "read_blocks", fail)
    with pytest.raises(BackendError, match="the device is gone"):
        cache.settle()


@pytest.fixture
def slots(tmp_path: Path) -> SlotCache:
    return SlotCache(tmp_path)


def test_sequences_in_slots_outlive_a_restart(slots: SlotCache, tmp_path: Path) -> None:
    assert slots.run(LONG) == 0
    slots.settle()
    slots.store.close()
    later = SlotCache(tmp_path)
    assert later.run([*LONG, 7]) == 41, "all that it has is used, to the token"
    assert later.run([*LONG[:30], 7, 7, 7]) == 30
    assert later.run(LONG, b"other") == 0
    disk = later.kv.usage().disk
    assert (disk.loads, disk.loaded_tokens, disk.failed_loads) == (1, 41, 0)
    later.assert_sound()


def test_a_server_that_ends_saves_what_is_in_slots(slots: SlotCache, tmp_path: Path) -> None:
    slots.run(LONG)
    slots.kv.drain(1.0)
    slots.store.close()
    assert SlotCache(tmp_path).run(LONG) == 40


def test_what_a_slot_is_saved_for_is_saved_once(slots: SlotCache) -> None:
    slots.run(LONG)
    slots.settle()
    written = slots.store.writer.speed.total
    assert written > 0
    slots.run(LONG[:20])
    slots.settle()
    assert slots.store.writer.speed.total == written, "a prefix of it is nothing new"


def test_what_leaves_the_store_goes_to_disk(slots: SlotCache, tmp_path: Path) -> None:
    slots.run(LONG)
    slots.lose(200)  # before it was quiet
    assert len(slots.kv.places.store) == 0 and slots.kv.usage().evictable == 0
    slots.store.work()
    assert slots.run(LONG) == 40
    slots.assert_sound()


def test_one_that_is_being_loaded_may_leave_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are the slot's to change and the disk's to write: each has its own."""
    cache = SlotCache(tmp_path, slots=1, store_tokens=60)
    cache.run(LONG)
    cache.run(prompt(1, 30, 1, 50))
    model_store, memory, seen = cache.tier.model_store, cache.backend.memory, list[Any]()
    assert model_store is not None
    put, load = model_store.put_sequence, memory.load
    monkeypatch.setattr(model_store, "put_sequence", lambda *args: (seen.append(args[2]), put(*args))[1])
    monkeypatch.setattr(memory, "load", lambda *args: (seen.append(args[1]), load(*args))[1])
    assert cache.run(LONG) == 40
    offered, loaded = seen
    assert np.array_equal(offered, loaded) and not np.shares_memory(offered, loaded)


def test_what_has_stood_goes_to_disk_though_others_run(slots: SlotCache, tmp_path: Path) -> None:
    slots.run(LONG)
    other = slots.ask(prompt(1, 30, 1, 50))
    slots.admit()
    slots.kv.maintain(0.001)
    assert slots.store.writer.queued_bytes == 0, "it may be quiet soon"
    slots.clock.now += 3.0
    slots.kv.maintain(0.0)
    assert slots.store.writer.queued_bytes == 0, "there is no time for that"
    slots.kv.maintain(0.001)
    assert slots.store.writer.queued_bytes > 0 and other in slots.running
    slots.store.work()
    slots.store.close()
    assert SlotCache(tmp_path).run(LONG) == 40


def test_what_takes_long_to_save_waits_until_it_is_quiet(slots: SlotCache) -> None:
    slots.run(LONG)
    for _ in range(100):
        slots.kv.offload._slot_speed.add(1, 1.0)
    slots.ask(prompt(1, 30, 1, 50))
    slots.admit()
    slots.clock.now += 100.0
    slots.kv.maintain(0.001)
    assert slots.store.writer.queued_bytes == 0
    slots.finish(slots.running[0])
    slots.settle()
    assert slots.store.writer.speed.total > 0


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("kind", [Cache, SlotCache])
def test_every_call_fails_in_turn(tmp_path: Path, kind: type[Cache], error: int) -> None:
    """Through the manager: answers stay right, everybody is served, and nothing is held at the end."""
    whole = 0
    for number in range(1, 400):
        directory = tmp_path / str(number)
        files = FaultyFiles(number, error)
        rng = random.Random(number)
        cache = kind(directory, files=files)
        for turn in range(3):
            cache.run(prompt(0, 16, turn % 2, 30 + turn))
            cache.settle()
            cache.lose(rng.randint(0, 24))
        cache.assert_sound()
        assert cache.kv.usage().referenced == 0
        cache.store.close()
        if files.calls < number:
            whole = number
            break
    assert whole > 20, "the scenario needs fewer calls than there are to fail"


def test_a_load_that_does_not_begin_leaves_no_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the one that it would have followed went to make room for it."""
    options: dict[str, Any] = {"window": 30, "blocks": 64}
    asked = [*LONG[:24], 7]
    first = Cache(tmp_path, **options)
    first.run(asked)
    first.settle()
    cache = Cache(tmp_path, **options)
    cache.run(LONG[:9])
    local = cache.kv.arena.local
    assert local is not None and len(local.policy) == 1

    tried = False

    def fail(_: object) -> None:
        nonlocal tried
        tried = True
        for snapshot in list(local.policy):
            local.drop(snapshot)
        raise MemoryError

    monkeypatch.setattr(cache.backend.memory, "landing", fail)
    assert cache.run(asked) == 0
    assert tried

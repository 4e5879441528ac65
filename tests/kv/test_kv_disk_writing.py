"""K/V on disk: how the limit is kept to without looking at every file, and writing behind running answers."""

from __future__ import annotations

import errno
import mmap
import os
import zlib
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cllm.kv.block_names import root_name
from cllm.kv.disk.catalog import SURVEY_INTERVAL_S
from cllm.kv.disk.directory import LOCK_NAME
from cllm.kv.disk.files import Files
from cllm.kv.disk.format import PAGE
from cllm.kv.disk.payload_writer import GATHERED_BYTES, PayloadWriter
from cllm.kv.disk.staging import AHEAD_BYTES, Staging
from cllm.kv.disk.throttle import LONGEST_REST_S, THROTTLED_SHARE, Throttle
from disk_kit import (
    MODEL,
    FaultyFiles,
    content,
    load,
    long_prompt,
    make_store,
    names_of,
    open_model_store,
    put,
    segments,
    total_bytes,
)

# -- the limit -----------------------------------------------------------------------------------------------------


def test_a_limit_that_was_lowered_holds_from_the_start(tmp_path: Path) -> None:
    store = make_store(tmp_path, limit=200_000)
    model_store = open_model_store(store)
    chains = [names_of(model_store, long_prompt(20, start=1000 * number)) for number in range(4)]
    for names in chains:
        put(model_store, names)
        store.work()
    assert total_bytes(tmp_path) > 50_000
    store.close()
    store = make_store(tmp_path, limit=50_000)
    model_store = open_model_store(store)
    assert total_bytes(tmp_path) <= 50_000
    assert load(store, model_store, chains[-1]) == 20, "what was used last stays"
    assert model_store.held(chains[0]) == 0


def test_an_append_does_not_look_at_every_file(tmp_path: Path) -> None:
    files, now = FaultyFiles(), [0.0]
    store = make_store(tmp_path, files=files, monotonic=lambda: now[0])
    model_store = open_model_store(store)
    put(model_store, names_of(model_store, long_prompt(3)))
    store.work()
    looks = files.names.count("list")
    for number in range(1, 20):
        put(model_store, names_of(model_store, long_prompt(3, start=1000 * number)))
        store.work()
    assert files.names.count("list") == looks
    now[0] += SURVEY_INTERVAL_S
    put(model_store, names_of(model_store, long_prompt(3, start=50_000)))
    store.work()
    assert files.names.count("list") > looks, "others may have put something there"


def test_a_tally_that_is_damaged_is_not_believed(tmp_path: Path) -> None:
    store = make_store(tmp_path, limit=60_000)
    model_store = open_model_store(store)
    for number in range(12):
        lock = tmp_path / LOCK_NAME
        if lock.exists():
            lock.write_bytes(bytes(number))
        put(model_store, names_of(model_store, long_prompt(10, start=1000 * number)))
        store.work()
        assert total_bytes(tmp_path) <= 60_000
    assert total_bytes(tmp_path) > 30_000


# -- gently --------------------------------------------------------------------------------------------------------

LARGE = 90 * PAGE
ODD = LARGE + 600


class DirectFiles(Files):
    """Notes what is written without the system's memory, and can refuse to do so."""

    def __init__(self, refusal: int | None = None, *, late: bool = False) -> None:
        self.refusal = refusal
        self.late = late
        self.on: set[int] = set()
        self.written = self.read_directly = 0

    def direct(self, file: int, on: bool) -> None:
        if on and self.refusal is not None and not self.late:
            raise OSError(self.refusal, os.strerror(self.refusal))
        (self.on.add if on else self.on.discard)(file)

    def open(self, path: str, **options: bool) -> int:
        file = super().open(path, **options)
        self.on.discard(file)
        return file

    def cached(self, file: int, offset: int) -> bool:
        return False

    def read(self, file: int, buffers: Any, offset: int) -> int:
        if file in self.on:
            if self.refusal is not None:
                raise OSError(self.refusal, os.strerror(self.refusal))
            assert offset % PAGE == 0 and all(len(buffer) % PAGE == 0 for buffer in buffers)
            self.read_directly += sum(map(len, buffers))
        return super().read(file, buffers, offset)

    def write(self, file: int, buffers: Any, offset: int) -> int:
        if file in self.on:
            if self.refusal is not None:
                raise OSError(self.refusal, os.strerror(self.refusal))
            (data,) = buffers
            address = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
            assert offset % PAGE == 0 and len(data) % PAGE == 0 and address % PAGE == 0
            self.written += len(data)
        return super().write(file, buffers, offset)


def hasty() -> Callable[[], float]:
    """A clock by which nobody has to wait for anything."""
    return map(float, count(0, 60)).__next__


def write_gently(store: Any, model_store: Any, names: list[bytes], size: int) -> None:
    """As the engine does while something runs."""
    done = 0
    for _ in range(10 * len(names)):
        store.writer.throttle.note(store, answering=True)
        parent = names[done - 1] if done else root_name()
        done += model_store.put(
            parent, done, names[done : done + 1], [content(name, size) for name in names[done : done + 1]]
        )
        if done == len(names):
            break
        store.writer.work()
    assert done == len(names)
    while store.writer.work() == 0.0:
        pass


@pytest.mark.parametrize("size", [600, LARGE, ODD, GATHERED_BYTES, 3 * GATHERED_BYTES + 1])
def test_what_is_written_gently_is_read_again(tmp_path: Path, size: int) -> None:
    slept: list[float] = []
    files = DirectFiles()
    store = make_store(tmp_path, limit=1 << 30, files=files, sleep=slept.append, monotonic=hasty())
    model_store = open_model_store(store, block_bytes=size)
    names = names_of(model_store, long_prompt(7))
    write_gently(store, model_store, names, size)
    assert slept and max(slept) <= LONGEST_REST_S
    assert files.written % PAGE == 0 and files.written >= 7 * size
    again = make_store(tmp_path, limit=1 << 30)
    assert load_into(again, open_model_store(again, block_bytes=size), names, size) == 7


class Fickle(Throttle):
    """Somebody begins or ends an answer whenever that is looked at, or every second or third time."""

    def __init__(self, period: int) -> None:
        super().__init__(sleep=lambda _: None)
        self._looks = count()
        self._period = period

    @property
    def active(self) -> bool:
        return next(self._looks) // self._period % 2 == 0


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_answers_may_begin_and_end_while_a_slice_is_written(tmp_path: Path, period: int) -> None:
    files = Files()
    blocks = [content(bytes([number]), 1_000_003) for number in range(20)]
    padding = -20 * 1_000_003 % PAGE
    file = files.open(str(tmp_path / "file"), create=True, write=True)
    try:
        sums, _ = PayloadWriter(files, Fickle(period), None).write(file, list(map(memoryview, blocks)), padding, PAGE)
    finally:
        files.close(file)
    assert (tmp_path / "file").read_bytes() == bytes(PAGE) + b"".join(blocks) + bytes(padding)
    blocks[-1] += bytes(padding)
    assert sums == list(map(zlib.crc32, blocks))


def load_into(store: Any, model_store: Any, names: list[bytes], size: int) -> int:
    """Into memory that begins with a page."""
    room = -(-size // PAGE) * PAGE
    memory = memoryview(mmap.mmap(-1, room * len(names)))
    buffers = [memory[i * room : i * room + size] for i in range(len(names))]
    ticket = model_store.load(names, buffers)
    store.work()
    assert ticket.done
    for name, buffer in zip(names[: ticket.loaded], buffers, strict=False):
        assert bytes(buffer) == content(name, size)
    return int(ticket.loaded)


@pytest.mark.parametrize("late", [False, True], ids=["asked", "tried"])
def test_a_file_system_that_needs_the_systems_memory_gets_it(tmp_path: Path, late: bool) -> None:
    files = DirectFiles(errno.EINVAL, late=late)
    store = make_store(tmp_path, limit=1 << 30, files=files, monotonic=hasty())
    model_store = open_model_store(store, block_bytes=LARGE)
    names = names_of(model_store, long_prompt(7))
    write_gently(store, model_store, names, LARGE)
    assert files.written == 0 and store.stats().trouble is None
    assert load_into(store, model_store, names, LARGE) == 7


def test_what_fits_is_read_straight_into_its_place(tmp_path: Path) -> None:
    files = DirectFiles()
    store = make_store(tmp_path, limit=1 << 30, files=files)
    model_store = open_model_store(store, block_bytes=LARGE)
    names = names_of(model_store, long_prompt(7))
    model_store.put(root_name(), 0, names, [content(name, LARGE) for name in names])
    store.work()
    assert load_into(store, model_store, names, LARGE) == 7
    assert files.read_directly == 7 * LARGE


def test_writing_rests_in_proportion_to_its_work() -> None:
    slept: list[float] = []
    worked = [0.0]
    throttle = Throttle(sleep=slept.append, worked=lambda: worked[0])
    throttle.begin()
    worked[0] = 0.0002
    assert throttle.rest() == 0.0 and not slept
    throttle.note(throttle, answering=True)
    worked[0] = 0.0003
    assert throttle.rest() == pytest.approx(0.0001 / THROTTLED_SHARE) == pytest.approx(slept[0])
    worked[0] = 10.0
    assert throttle.rest() == LONGEST_REST_S
    worked[0] = 5.0  # no clock should
    assert 0 < throttle.rest() < LONGEST_REST_S


def test_memory_for_copies_is_taken_ahead_up_to_a_limit() -> None:
    staging = Staging(4 * AHEAD_BYTES)
    assert staging.prepare(0) == 0, "nobody wants it"
    assert staging.ready(LARGE) == 0
    made = 0
    while size := staging.prepare(0):
        made += size
    assert AHEAD_BYTES - LARGE < made <= AHEAD_BYTES
    assert staging.ready(LARGE) == made // LARGE and staging.kept == made


def test_copies_of_one_size_leave_room_for_another() -> None:
    """Two models write, and blocks of one of them have all the memory that is taken ahead."""
    staging = Staging(4 * AHEAD_BYTES)
    staging.give_back([memoryview(bytearray(LARGE)) for _ in range(AHEAD_BYTES // LARGE)])
    assert staging.ready(ODD) == 0
    assert staging.prepare(0) == ODD and staging.ready(ODD) == 1
    assert staging.ready(LARGE) > 0 and staging.kept <= AHEAD_BYTES
    kept = staging.kept
    assert staging.ready(LARGE + 1) == 0
    assert staging.prepare(AHEAD_BYTES) == 0 and staging.kept == kept, "what is being written leaves no room"


def test_gently_nothing_is_copied_into_fresh_memory_unless_it_is_urgent(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    model_store = open_model_store(store, MODEL)
    names = names_of(model_store, long_prompt(3))
    blocks = [content(name) for name in names]
    store.writer.throttle.note(store, answering=True)
    assert model_store.put(root_name(), 0, names, blocks) == 0
    assert model_store.put(root_name(), 0, names, blocks, urgent=True) == 3
    store.work()
    assert load(store, model_store, names) == 3


# -- what goes wrong in the writer itself ----------------------------------------------------------------------------


def test_what_fails_unexpectedly_is_out_of_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(tmp_path)
    model_store = open_model_store(store)
    chains = [names_of(model_store, long_prompt(5, start=1000 * number)) for number in range(3)]
    for names in chains:
        assert put(model_store, names) == 5

    def fail(*_: Any) -> Any:
        monkeypatch.undo()
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(store.writer._payload_writer, "write", fail)
    store.work()
    assert store.writer.queued_bytes == 0 and store.stats().counts["unwritten_bytes"] == 5 * model_store.block_bytes
    assert [load(store, model_store, names) for names in chains] == [0, 5, 5], "the rest of the batch is written"
    assert put(model_store, chains[0]) == 5
    store.work()
    assert load(store, model_store, chains[0]) == 5


def test_who_waits_for_the_disk_is_waited_for_though_another_one_is_done(tmp_path: Path) -> None:
    writer = make_store(tmp_path).writer
    writer.throttle.note(writer, answering=True)
    with writer.flushing():
        with writer.flushing():
            assert not writer.throttle.active
        assert not writer.throttle.active
    assert writer.throttle.active


# -- a disk that takes nothing ---------------------------------------------------------------------------------------


class ReadOnlyFiles(Files):
    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    truncate = write = remove = set_time = make_directory = _refuse

    def open(self, path: str, **options: bool) -> int:
        return int(self._refuse()) if any(options.values()) else super().open(path)


def test_a_read_only_file_system_is_read_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = make_store(tmp_path)
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(5))
    put(model_store, names)
    store.work()
    store.close()
    again = make_store(tmp_path, files=ReadOnlyFiles())
    model_store = open_model_store(again)
    assert load(again, model_store, names) == 5
    for number in range(1, 4):
        put(model_store, names_of(model_store, long_prompt(5, start=1000 * number)))
        again.work()
    assert again.stats().trouble == "Read-only file system"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.records[0].exc_info is None and "Read-only file system" in caplog.text
    assert load(again, model_store, names) == 5


def test_what_stands_in_a_files_place_is_left_alone_and_the_blocks_are_written_again(tmp_path: Path) -> None:
    store = make_store(tmp_path / "kv")
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(6))
    assert put(model_store, names) == 6
    store.work()
    (path,) = segments(tmp_path / "kv")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert load(store, model_store, names) == 0
    assert model_store.held(names) == 0, "it is not looked for there again"
    assert put(model_store, names) == 6
    store.work()
    assert load(store, model_store, names) == 6 and path.is_symlink()

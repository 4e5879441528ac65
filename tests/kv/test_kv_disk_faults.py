"""K/V on disk when things go wrong: every system call fails in turn, every byte is damaged in turn, kill -9.

`CLLM_TEST_KILLS` sets how many processes are killed (200 take about two minutes). `CLLM_TEST_EVERY_BYTE=1` damages
the zeros that fill pages byte by byte, too, not only every 67th of them (three minutes).
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from array import array
from pathlib import Path

import numpy as np
import pytest

from cllm.kv.block_names import fingerprint, root_name
from cllm.kv.disk import payload_writer
from cllm.kv.disk.format import PAGE
from cllm.kv.disk.store import DiskStore, ModelStore
from cllm.kv.disk.writer import THROTTLED_LINGER_S
from disk_kit import (
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
from repository import KITS
from thorough import EXHAUSTIVE, exhaustive

LIMIT = 55_000
OTHER = fingerprint(b"another model's files", {})
KILLS = int(os.environ.get("CLLM_TEST_KILLS", "6"))
FILLING_STEP = 1 if os.environ.get("CLLM_TEST_EVERY_BYTE") else 67
DAMAGE = ("damaged", "torn", "misplaced")


def found(store: DiskStore) -> int:
    """Damage that was noticed."""
    return sum(store.stats().counts.get(kind, 0) for kind in DAMAGE)


def open_files() -> int | None:
    """None where the system does not say."""
    descriptors = Path("/proc/self/fd")
    return len(list(descriptors.iterdir())) if descriptors.exists() else None


def by_age(directory: Path) -> list[Path]:
    return sorted(segments(directory), key=lambda path: path.stat().st_mtime_ns)


# -- every call ----------------------------------------------------------------------------------------------------


class Scenario:
    """Some use of a store that needs every kind of call: growing, branching, evicting, loading, mending, reopening."""

    def __init__(self, directory: Path, files: FaultyFiles) -> None:
        self.directory = directory
        self.files = files
        self.now = 0.0
        self.open()

    def open(self) -> None:
        self.store = make_store(self.directory, limit=LIMIT, files=self.files, monotonic=lambda: self.now)
        self.model_store = open_model_store(self.store)

    def run(self) -> None:
        for turn in range(2):
            for number in range(2):
                self.use(names_of(self.model_store, long_prompt(8 * (turn + 1), start=1000 * number)))
            self.use(names_of(self.model_store, [*long_prompt(3), *[turn] * 16]))
            self.save([turn] * 21)
            self.use_pages(turn)
            self.half_write()
            self.now += 3.0
            if turn == 0:
                self.store.close()
                self.open()
        if paths := by_age(self.directory):
            self.damage(paths[0])
        for number in range(2):
            self.use(names_of(self.model_store, long_prompt(18, start=1000 * number)))

    def use(self, names: list[bytes]) -> None:
        held = self.model_store.held(names)
        put(self.model_store, names)
        self.store.work()
        load(self.store, self.model_store, names)
        assert total_bytes(self.directory) <= LIMIT
        assert 0 <= held <= len(names)
        assert self.store.writer.queued_bytes == 0 and self.store.reader.queued_bytes == 0

    def save(self, tokens: list[int]) -> None:
        data = array("i", tokens).tobytes()
        self.model_store.put_sequence(names_of(self.model_store, tokens), data, content(data, 3000))
        self.store.work()
        found = self.model_store.find_sequence(names_of(self.model_store, tokens), data)
        if found is not None and found.matched == len(tokens):
            buffer = np.zeros(found.nbytes, np.uint8)
            ticket = self.model_store.load_sequence(found, buffer)
            self.store.work()
            assert ticket.done
            assert not ticket.complete or buffer.tobytes() == content(data, 3000)

    def use_pages(self, turn: int) -> None:
        """Blocks that are whole pages, of another model, beside answers: they go round the system's memory."""
        model_store = open_model_store(self.store, OTHER, block_bytes=PAGE)
        names = names_of(model_store, long_prompt(2 + turn))
        self.store.writer.throttle.note(self, answering=True)
        model_store.put(root_name(), 0, names, [content(name, PAGE) for name in names], urgent=True)
        self.now += THROTTLED_LINGER_S
        while self.store.writer.work() == 0.0:
            pass
        self.store.writer.throttle.note(self, answering=False)
        memory = memoryview(mmap.mmap(-1, PAGE * len(names)))
        ticket = model_store.load(names, [memory[i * PAGE : (i + 1) * PAGE] for i in range(len(names))])
        self.store.work()
        assert ticket.done and self.store.writer.queued_bytes == 0
        for number, name in enumerate(names[: ticket.loaded]):
            assert memory[number * PAGE : (number + 1) * PAGE] == content(name, PAGE)

    def half_write(self) -> None:
        """Somebody died while he wrote to the youngest file."""
        paths = by_age(self.directory)
        if paths and total_bytes(self.directory) + PAGE <= LIMIT:
            os.truncate(paths[-1], paths[-1].stat().st_size + PAGE)

    def damage(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        if len(data) > 2 * PAGE + 5:
            data[2 * PAGE + 5] ^= 1
            path.write_bytes(data)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk begins with every page."""
    monkeypatch.setattr(payload_writer, "BEGIN_SYNC_BYTES", PAGE)


def all_is_well(directory: Path) -> None:
    """Whatever happened before, a new store works on what is left."""
    store = make_store(directory, limit=LIMIT)
    model_store = open_model_store(store)
    for number in range(2):
        names = names_of(model_store, long_prompt(15, start=1000 * number))
        for _ in range(2):  # damage behind a block that is missing is found when that one is there again
            load(store, model_store, names)
            put(model_store, names)
            store.work()
        assert load(store, model_store, names) == 15
    assert total_bytes(directory) <= LIMIT
    again = make_store(directory, limit=LIMIT)
    open_model_store(again)
    assert found(again) == 0, "all damage was mended by the one before"


@pytest.mark.usefixtures("small_steps")
def test_the_scenario_needs_every_call(tmp_path: Path) -> None:
    files = FaultyFiles()
    Scenario(tmp_path, files).run()
    assert set(files.names) >= {
        "open",
        "close",
        "read",
        "write",
        "truncate",
        "sync",
        "lock",
        "status",
        "list",
        "remove",
        "direct",
        "cached",
        "begin_sync",
    }
    all_is_well(tmp_path)


@exhaustive
@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.ENOENT], ids=["EIO", "ENOSPC", "ENOENT"])
def test_every_call_fails_in_turn(tmp_path: Path, error: int, lasts: bool) -> None:
    counting = FaultyFiles()
    Scenario(tmp_path / "counted", counting).run()
    step = 7 if lasts else 1 if error == errno.EIO else 3
    step *= 1 if EXHAUSTIVE else 5
    before = open_files()
    for number in range(1, counting.calls + 1, step):
        directory = tmp_path / str(number)
        directory.mkdir()
        Scenario(directory, FaultyFiles(number, error, lasts=lasts)).run()
        all_is_well(directory)
    assert open_files() == before, "files were left open"


def test_a_full_disk_is_said_once_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    files = FaultyFiles()
    store = make_store(tmp_path, files=files, monotonic=lambda: now[0])
    model_store = open_model_store(store)
    files.fail_at, files.error, files.lasts = files.calls + 1, errno.ENOSPC, True
    caplog.set_level("INFO", logger="cllm.kv.disk")
    names = names_of(model_store, long_prompt(5))
    for _ in range(4):
        put(model_store, names)
        store.work()
        now[0] += 40
    assert store.stats().trouble == "No space left on device"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left on device" in caplog.text and str(tmp_path) in caplog.text
    calls = files.calls
    assert put(model_store, names) == 0, "while it is known not to work, nothing is taken"
    store.work()
    assert files.calls == calls
    files.fail_at = None
    now[0] += 1000
    assert put(model_store, names) == 5
    store.work()
    assert store.stats().trouble is None
    assert "again" in caplog.records[-1].message
    assert load(store, model_store, names) == 5


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_read(tmp_path: Path) -> None:
    store = make_store(tmp_path / "kv")
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(5))
    put(model_store, names)
    store.work()
    paths = [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]
    for path in paths:
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        again = make_store(tmp_path / "kv")
        model_store = open_model_store(again)
        assert load(again, model_store, names) == 5
        put(model_store, names_of(model_store, long_prompt(5, start=100)))
        again.work()
        assert again.stats().trouble
    finally:
        for path in paths:
            path.chmod(0o700)


# -- every byte ----------------------------------------------------------------------------------------------------

SMALL_BLOCK = 48


def load_all(store: DiskStore, model_store: ModelStore, names: list[bytes], tokens: list[int], payload: bytes) -> bool:
    """Whether everything is still there; that nothing wrong is given is asserted."""
    loaded = load(store, model_store, names)
    data = array("i", tokens).tobytes()
    found_one = model_store.find_sequence(names_of(model_store, tokens), data)
    complete = False
    if found_one is not None:
        buffer = np.zeros(found_one.nbytes, np.uint8)
        ticket = model_store.load_sequence(found_one, buffer)
        store.work()
        complete = ticket.complete
        assert not complete or buffer.tobytes() == payload
    return loaded == len(names) and complete


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    """Bytes between the payloads, too. Nothing wrong is ever loaded, and the file is mended or gone afterwards."""
    store = make_store(tmp_path)
    model_store = open_model_store(store, block_bytes=SMALL_BLOCK)
    names = names_of(model_store, long_prompt(3))
    put(model_store, names[:2])
    store.work()
    put(model_store, names)
    store.work()
    tokens = [9] * 9
    payload = content(b"a sequence", 50)
    model_store.put_sequence(names_of(model_store, tokens), array("i", tokens).tobytes(), payload)
    store.work()
    assert len(segments(tmp_path)) == 2
    assert load_all(store, model_store, names, tokens, payload)
    for path in segments(tmp_path):
        whole = path.read_bytes()
        for offset in [at for at, byte in enumerate(whole) if byte or at % FILLING_STEP == 0]:
            damaged = bytearray(whole)
            damaged[offset] ^= 1 << offset % 8
            path.write_bytes(damaged)
            again = make_store(tmp_path)
            model_store = open_model_store(again, block_bytes=SMALL_BLOCK)
            complete = load_all(again, model_store, names, tokens, payload)
            assert not complete, f"byte {offset} of {len(whole)} can be changed"
            assert found(again) == 1, f"byte {offset}: {again.stats().counts}"
            assert not path.exists() or path.stat().st_size < len(whole)
        path.write_bytes(whole)


def test_every_length_is_noticed(tmp_path: Path) -> None:
    """A file may end anywhere: what is whole before that is used, nothing else."""
    store = make_store(tmp_path)
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(9))
    put(model_store, names[:5])
    store.work()
    put(model_store, names)
    store.work()
    (path,) = segments(tmp_path)
    whole = path.read_bytes()
    before = -1
    for length in [*range(0, len(whole), 61), len(whole)]:
        path.write_bytes(whole[:length])
        again = make_store(tmp_path)
        model_store = open_model_store(again)
        held = model_store.held(names)
        assert load(again, model_store, names) == held
        assert held >= before
        before = held
        more = names_of(model_store, long_prompt(12))
        put(model_store, more)
        again.work()
        assert load(again, model_store, more) == 12, "what is missing can be written again"
        for other in segments(tmp_path):
            other.unlink()
    assert before == 9


def test_a_file_replaced_under_us_is_not_used(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    model_store = open_model_store(store)
    chains = [names_of(model_store, long_prompt(5, start=1000 * number)) for number in range(2)]
    for names in chains:
        put(model_store, names)
        store.work()
    first, second = segments(tmp_path)
    first.replace(second)
    assert sorted(load(store, model_store, names) for names in chains) == [0, 0]
    assert segments(tmp_path) == []
    assert found(store) == 1
    assert store.stats().counts["vanished"] == 1
    for names in chains:
        put(model_store, names)
        store.work()
        assert load(store, model_store, names) == 5


# -- kill -9 -------------------------------------------------------------------------------------------------------

KILL_LIMIT = 3_000_000
KILL_BLOCK = 20_000
WRITER = f"""
import os, random, sys, time
from pathlib import Path
from cllm.kv.disk.files import Files
from disk_kit import *

class SlowFiles(FaultyFiles):
    def _counting(self, name, call):
        def slow(*args, **options):
            time.sleep(random.random() * 0.0004)
            return call(*args, **options)
        return slow

store = make_store(Path(sys.argv[1]), limit={KILL_LIMIT}, files=SlowFiles())
model_store = open_model_store(store, block_bytes={KILL_BLOCK})
start = int(sys.argv[2])
print("begun", flush=True)
for number in range(start, start + 1000):
    for blocks in (3, 7, 11):
        names = names_of(model_store, long_prompt(blocks, start=1000 * number))
        put(model_store, names)
        store.work()
    print(number, flush=True)
"""


def test_a_process_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    draw = random.Random(int.from_bytes(os.urandom(4), "little"))
    environment = {**os.environ, "PYTHONPATH": str(KITS)}
    torn = confirmed = 0
    start = 0
    for kill in range(KILLS):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(start)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            time.sleep(draw.random() * 0.25)
            process.send_signal(signal.SIGKILL)
            lines = process.stdout.read().split()
        done = [int(line) for line in lines]
        store = make_store(tmp_path, limit=KILL_LIMIT)
        model_store = open_model_store(store, block_bytes=KILL_BLOCK)
        counts = store.stats().counts
        assert total_bytes(tmp_path) <= KILL_LIMIT
        assert not counts.get("damaged") and not counts.get("misplaced"), f"kill {kill}: {counts}"
        assert counts.get("torn", 0) <= 1
        torn += counts.get("torn", 0)
        for number in range(start, start + len(done) + 1):
            names = names_of(model_store, long_prompt(11, start=1000 * number))
            held = model_store.held(names)
            assert load(store, model_store, names) == held
            if number in done[-5:]:
                assert held == 11, f"kill {kill}: {held} blocks of chain {number}, which was written, are there"
                confirmed += 1
        start += len(done) + 1
    assert confirmed, "nothing was ever written before a process was killed"
    print(f"{KILLS} processes killed, {torn} left a file that had to be mended, {confirmed} chains confirmed")

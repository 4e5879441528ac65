"""K/V on disk: what one thread does while another is in the middle of something."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cllm.kv.disk.directory import Survey
from cllm.kv.disk.reader import READ_BYTES
from cllm.kv.disk.threads import DaemonPool
from disk_kit import FaultyFiles, load, long_prompt, make_store, names_of, open_model_store, put, segments


class Moments:
    """Has something else done at one moment, the n-th at which another thread could come between."""

    def __init__(self) -> None:
        self.at = -1
        self.passed = 0
        self.then: Callable[[], None] = lambda: None
        self._within = False

    def next(self) -> None:
        if self._within:
            return
        self.passed += 1
        if self.passed == self.at:
            self._within = True
            self.then()
            self._within = False


class WatchedLock:
    def __init__(self, lock: threading.Lock, moments: Moments) -> None:
        self._lock = lock
        self._moments = moments

    def __enter__(self) -> None:
        self._moments.next()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._moments.next()


class WatchedFiles(FaultyFiles):
    def __init__(self, moments: Moments) -> None:
        self.moments = moments
        super().__init__()

    def _counting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            self.moments.next()
            return call(*args, **options)

        return watched


def append_and(directory: Path, at: int) -> int:
    """Append to a segment, and read its headers again at this moment. How many moments there were."""
    moments, clock = Moments(), map(float, count(0, 5))
    store = make_store(directory, files=WatchedFiles(moments), monotonic=clock.__next__)
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(8))
    put(model_store, names[:6])
    store.work()
    (path,) = segments(directory)
    before = path.read_bytes()
    put(model_store, names)
    catalog = store._catalog
    (model,) = catalog.models.values()
    (found,) = catalog.directory.survey().files
    moments.at, moments.passed, moments.then = at, 0, lambda: catalog._learn(model, found)
    catalog.lock = WatchedLock(catalog.lock, moments)  # type: ignore[assignment,arg-type]
    with store.writer.flushing():
        store.writer.work()
    passed = moments.passed
    assert path.read_bytes()[: len(before)] == before, f"moment {at}: the file was cut"
    again = make_store(directory)
    assert load(again, open_model_store(again), names) == 8
    assert not again.details()["counts"].get("torn")
    return passed


def test_what_is_learned_of_a_segment_does_not_disturb_who_appends_to_it(tmp_path: Path) -> None:
    moments = append_and(tmp_path / "never", -1)
    assert moments > 20
    for at in range(1, moments + 1):
        append_and(tmp_path / str(at), at)


def test_what_was_written_after_the_directory_was_listed_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path)
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(5))
    put(model_store, names)
    catalog = store._catalog
    (model,) = catalog.models.values()
    survey = catalog.directory.survey

    def survey_then_write() -> Survey:
        found = survey()
        monkeypatch.undo()
        store.work()
        return found

    monkeypatch.setattr(catalog.directory, "survey", survey_then_write)
    catalog.refresh(model)
    assert model_store.held(names) == 5
    catalog.refresh(model)
    assert load(store, model_store, names) == 5


# -- threads that help -----------------------------------------------------------------------------------------------


class SlowReads(FaultyFiles):
    reading = 0

    def read(self, file: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.reading += 1
        time.sleep(0.05)
        try:
            return super().read(file, buffers, offset)
        finally:
            self.reading -= 1


class Unwilling(DaemonPool):
    """Takes one thing, and no more."""

    def __init__(self, files: SlowReads) -> None:
        super().__init__(1, "unwilling")
        self._files = files
        self._taken = 0

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        self._taken += 1
        if self._taken == 1:
            return super().submit(call, *args)
        while not self._files.reading:
            time.sleep(0.001)
        raise RuntimeError("no more")


def test_a_load_is_over_when_nobody_reads_for_it_any_more(tmp_path: Path) -> None:
    """Whoever asked for it gives the buffers to others then."""
    files = SlowReads()
    store = make_store(tmp_path, limit=1 << 30, files=files)
    model_store = open_model_store(store, block_bytes=READ_BYTES)
    names = names_of(model_store, long_prompt(3))
    put(model_store, names)
    store.work()
    store.reader._pool = pool = Unwilling(files)
    reading: list[int] = []
    buffers = [np.zeros(READ_BYTES, np.uint8) for _ in names]
    ticket = model_store.load(names, buffers, lambda _: reading.append(files.reading))
    store.work()
    pool.stop()
    assert ticket.error == "RuntimeError: no more" and reading == [0]


def test_what_nobody_has_begun_is_cancelled() -> None:
    pool, begun, go_on = DaemonPool(1, "helper"), threading.Event(), threading.Event()

    def wait() -> str:
        begun.set()
        go_on.wait()
        return "done"

    first, second = pool.submit(wait), pool.submit(wait)
    begun.wait()
    pool.stop()
    with pytest.raises(CancelledError):
        second.result()
    with pytest.raises(RuntimeError):
        pool.submit(wait)
    go_on.set()
    assert first.result() == "done"


HANGING = """
import threading
from cllm.kv.disk.threads import DaemonPool
DaemonPool(2, "helper").submit(threading.Event().wait)
print("the end")
"""


def test_a_disk_that_hangs_keeps_no_program_from_ending() -> None:
    done = subprocess.run([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, timeout=120, check=True)
    assert done.stdout == b"the end\n"

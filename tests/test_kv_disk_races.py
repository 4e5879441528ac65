"""K/V on disk: what one thread does while another is in the middle of something."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from cllm.kv.disk.directory import Survey
from disk_kit import FaultyFiles, load, long_prompt, make_store, names_of, open_space, put, segments


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
    space = open_space(store)
    names = names_of(space, long_prompt(8))
    put(space, names[:6])
    store.work()
    (path,) = segments(directory)
    before = path.read_bytes()
    put(space, names)
    keeper = store._keeper
    (shelf,) = keeper.shelves.values()
    (found,) = keeper.directory.survey().files
    moments.at, moments.passed, moments.then = at, 0, lambda: keeper._learn(shelf, found)
    keeper.lock = WatchedLock(keeper.lock, moments)  # type: ignore[assignment,arg-type]
    with store.writer.flushing():
        store.writer.work()
    passed = moments.passed
    assert path.read_bytes()[: len(before)] == before, f"moment {at}: the file was cut"
    again = make_store(directory)
    assert load(again, open_space(again), names) == 8
    assert not again.stats().counts.get("torn")
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
    space = open_space(store)
    names = names_of(space, long_prompt(5))
    put(space, names)
    keeper = store._keeper
    (shelf,) = keeper.shelves.values()
    survey = keeper.directory.survey

    def survey_then_write() -> Survey:
        found = survey()
        monkeypatch.undo()
        store.work()
        return found

    monkeypatch.setattr(keeper.directory, "survey", survey_then_write)
    keeper.refresh(shelf)
    assert space.held(names) == 5
    keeper.refresh(shelf)
    assert load(store, space, names) == 5

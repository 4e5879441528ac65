"""Responses that are kept: how many, for how long, and for whom."""

from __future__ import annotations

import pytest

from cllm.config.server import ResponsesConfig
from cllm.engine.tenant import Tenant
from cllm.server.responses.store import ResponseStore, Stored

ANN, BOB = Tenant("ann", b"a"), Tenant("bob", b"b")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def store(clock: Clock, **settings: float) -> ResponseStore:
    return ResponseStore(ResponsesConfig.model_validate(settings), clock)


def of(size: int) -> Stored:
    return Stored(b"x" * (size // 2), b"y" * (size - size // 2), 1)


def test_a_key_sees_its_own_alone(clock: Clock) -> None:
    kept = store(clock)
    assert kept.put(ANN, "r", of(10))
    assert kept.get(BOB, "r") is None and kept.remove(BOB, "r") is None
    assert kept.get(ANN, "r") == of(10)
    assert kept.remove(ANN, "r") == of(10) and kept.get(ANN, "r") is None
    assert (kept.count, kept.size) == (0, 0)


def test_the_least_recently_used_goes_first(clock: Clock) -> None:
    kept = store(clock, max_stored=2)
    kept.put(ANN, "1", of(1))
    kept.put(ANN, "2", of(1))
    kept.get(ANN, "1")
    kept.put(ANN, "3", of(1))
    assert [kept.get(ANN, name) is not None for name in "123"] == [True, False, True]


def test_bytes_are_bounded(clock: Clock) -> None:
    kept = store(clock, max_stored_bytes=100)
    for number in range(20):
        assert kept.put(ANN, str(number), of(30))
        assert kept.size <= 100
    assert kept.count == 3
    assert not kept.put(ANN, "large", of(101)) and kept.count == 3


def test_whoever_has_most_gives_way(clock: Clock) -> None:
    kept = store(clock, max_stored=4)
    kept.put(BOB, "b", of(1))
    for number in range(10):
        kept.put(ANN, str(number), of(1))
    assert kept.get(BOB, "b") is not None and kept.count == 4
    kept = store(clock, max_stored_bytes=100)
    kept.put(BOB, "b", of(30))
    for number in range(10):
        kept.put(ANN, str(number), of(20))
    assert kept.get(BOB, "b") is not None and kept.size <= 100


def test_age_counts_from_the_last_use(clock: Clock) -> None:
    kept = store(clock, stored_s=10.0)
    kept.put(ANN, "1", of(1))
    kept.put(BOB, "2", of(1))
    clock.now = 9
    assert kept.get(ANN, "1") is not None
    clock.now = 18
    assert kept.get(ANN, "1") is not None and kept.get(BOB, "2") is None
    assert kept.count == 1


def test_none_may_be_kept(clock: Clock) -> None:
    kept = store(clock, max_stored=0)
    assert not kept.keeps and not kept.put(ANN, "1", of(1)) and kept.get(ANN, "1") is None

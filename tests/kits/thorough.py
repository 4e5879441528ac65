"""Which tests a run leaves out, and how much of a long search it makes.

Tests that take seconds, because they start several processes or compute much with a real model, are marked `slow`:
`make test` leaves them out, and `make test-slow` runs them. Tests that search are marked `exhaustive`; those of
hypothesis are by themselves (conftest.py). `make test` takes samples of them. With EXHAUSTIVE_TESTS=1, as in
`make test-exhaustive`, they leave nothing out; what cannot be sampled, such as a build with sanitizers, is skipped
without it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")

EXHAUSTIVE = os.environ.get("EXHAUSTIVE_TESTS") == "1"

slow = pytest.mark.slow
exhaustive = pytest.mark.exhaustive
only_exhaustive = [exhaustive, pytest.mark.skipif(not EXHAUSTIVE, reason="make test-exhaustive runs it")]


def sampled(count: int) -> int:
    """How many of so many examples to try."""
    return count if EXHAUSTIVE else max(count // 4, 10)


def some(values: Iterable[T], every: int = 3) -> list[T]:
    """All of them, or as a sample every third."""
    return list(values)[:: 1 if EXHAUSTIVE else every]

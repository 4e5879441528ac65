"""What no test may leave to the next: K/V on disk, unless it says so, and another level of the log."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import is_hypothesis_test, settings

from thorough import exhaustive, sampled

os.environ["CLLM_KV__DISK__ENABLED"] = "false"

if "PYTEST_XDIST_WORKER" in os.environ:
    # Tests run beside tests. A thread of llama.cpp that spins while it waits takes the core that the others wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # A worker ignores SIGINT, and so would every process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


settings.register_profile("sampled", max_examples=sampled(100))
settings.load_profile("sampled")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and is_hypothesis_test(item.obj):
            item.add_marker(exhaustive)


@pytest.fixture(autouse=True)
def _level_of_the_log() -> Iterator[None]:
    """Commands set it for their process, which here is that of all tests."""
    logger = logging.getLogger("cllm")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def quiet() -> Iterator[None]:
    """No log, where thousands of tracebacks are meant."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)

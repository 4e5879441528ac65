"""What no test may leave to the next: K/V on disk, unless it says so, and another level of the log."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import signal
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings

from thorough import exhaustive, sampled

os.environ["CLLM_KV__DISK__ENABLED"] = "false"

# Until all tests are known, next to nothing that is made is garbage, and to look for it takes a tenth of that time.
gc.disable()

# Tests run beside tests. A thread of llama.cpp that spins while it waits takes the core that the others wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if "PYTEST_XDIST_WORKER" in os.environ:
    # A worker ignores SIGINT, and so would every process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # There are as many tests at once as cores: threads of one test would only wait for cores that others use.
    os.environ.setdefault("CLLM_BACKEND__THREADS", "1")


# httpx gives up after 5 s, which an answer may take on a busy machine. This is the default of all its clients.
_default = inspect.signature(httpx.get).parameters["timeout"].default
_default.connect = _default.read = _default.write = _default.pool = 60.0

settings.register_profile(
    "sampled",
    max_examples=sampled(100),
    # Nothing may depend on how fast the machine is.
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    # To explain a failure, Python before 3.12 traces every line while the failing example is made smaller: thousands of
    # runs, each of which takes three times as long.
    phases=[phase for phase in Phase if phase is not Phase.explain],
    print_blob=True,
)
settings.load_profile("sampled")

SHRINKING_S = 900
"""Hypothesis makes failing examples smaller for up to 300 s. A test that is ended before that does not say why."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and is_hypothesis_test(item.obj):
            item.add_marker(exhaustive)
            item.add_marker(pytest.mark.timeout(SHRINKING_S))


def pytest_collection_finish() -> None:
    """What was imported stays: it is not looked through again."""
    gc.freeze()
    gc.enable()


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait, for a time-out or for a disk."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture(autouse=True)
def _what_commands_set() -> Iterator[None]:
    """Commands set the level of the log and what SIGINT does for their process, which here is that of all tests."""
    logger = logging.getLogger("cllm")
    level, on_interrupt = logger.level, signal.getsignal(signal.SIGINT)
    yield
    logger.setLevel(level)
    signal.signal(signal.SIGINT, on_interrupt)


@pytest.fixture
def quiet() -> Iterator[None]:
    """No log, where thousands of tracebacks are meant."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)

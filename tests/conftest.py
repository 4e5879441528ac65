"""What no test may leave to the next: K/V on disk, unless it says so, and another level of the log."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

os.environ["CLLM_KV__DISK__ENABLED"] = "false"

if "PYTEST_XDIST_WORKER" in os.environ:
    # Tests run beside tests. A thread of llama.cpp that spins while it waits takes the core that the others wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture(autouse=True)
def _level_of_the_log() -> Iterator[None]:
    """Commands set it for their process, which here is that of all tests."""
    logger = logging.getLogger("cllm")
    level = logger.level
    yield
    logger.setLevel(level)

"""What no test may leave to the next: K/V on disk, unless it says so, and another level of the log."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

os.environ["CLLM_KV__DISK__ENABLED"] = "false"


@pytest.fixture(autouse=True)
def _level_of_the_log() -> Iterator[None]:
    """Commands set it for their process, which here is that of all tests."""
    logger = logging.getLogger("cllm")
    level = logger.level
    yield
    logger.setLevel(level)

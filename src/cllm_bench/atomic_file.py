"""Large files that are written once and kept: complete or absent, whatever interrupts the writing."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

ABANDONED_S = 600.0
"""Whoever makes a file writes to it more often."""
_PREFIX = ".making-"


@contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """A place beside the target to write to; what is there at the end is moved to the target.

    What others left there when they were killed is removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f"{_PREFIX}*"):
        if time.time() - _last_written(left) > ABANDONED_S:
            shutil.rmtree(left, ignore_errors=True)
    with TemporaryDirectory(prefix=_PREFIX, dir=target.parent) as directory:
        place = Path(directory) / target.name
        yield place
        place.replace(target)


def _last_written(directory: Path) -> float:
    try:
        return max(path.stat().st_mtime for path in (directory, *directory.iterdir()))
    except OSError:  # gone in the meantime
        return time.time()

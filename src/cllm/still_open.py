"""Models that are still open when the program ends.

Their threads are stopped then, while Python can still run them: later they would be cut off wherever they are, and the
engine's memory with them.
"""

from __future__ import annotations

import atexit
import os
from typing import Protocol


class Open(Protocol):
    deaf: bool

    def release(self) -> None: ...


STILL_OPEN: set[Open] = set()


@atexit.register
def _release_all() -> None:
    for each in list(STILL_OPEN):
        # Whoever still waits is a daemon thread, which ends with the program: errors would only make it complain.
        each.deaf = True
        each.release()


if hasattr(os, "register_at_fork"):
    # A forked process has a copy of everything but the threads: there is nothing in it to stop.
    os.register_at_fork(after_in_child=STILL_OPEN.clear)

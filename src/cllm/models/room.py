"""Asking for address space before it is needed.

Some libraries do not fail when they get no memory: they end the process, with lines of their own. So before one of them
begins, as much as it may need is asked for and given back at once.
"""

from __future__ import annotations

import mmap


def has_room(size: int) -> bool:
    """Whether so many bytes of address space could be had now (`ulimit -v`); no memory is taken."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # no such limits there
        return True
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        mmap.mmap(-1, size, flags=flags).close()
    except (OSError, MemoryError):
        return False
    return True

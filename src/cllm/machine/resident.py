"""How much memory the process holds, and giving back what its heap keeps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import psutil


def resident_bytes() -> int:
    """Mapped files included, as far as they are in memory."""
    return int(psutil.Process().memory_info().rss)


def give_heap_back() -> None:
    """Reading a model leaves tens of megabytes of free pieces in glibc's heaps, which it keeps otherwise. Releases the
    GIL; takes milliseconds."""
    if _TRIM is not None:
        _TRIM(0)


def _find_trim() -> Callable[[int], int] | None:
    """None: another C library than glibc."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return trim


_TRIM = _find_trim()

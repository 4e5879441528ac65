"""How much memory the process holds, giving back what its heap keeps, and when Python collects garbage."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

import psutil

YOUNG_OBJECTS = 20_000
"""Threshold of the youngest generation. Streams create many objects and no cycles; with Python's default of 700,
collecting takes a sixth of a busy event loop's time."""


def resident_bytes() -> int:
    """Mapped files included, as far as they are in memory."""
    return int(psutil.Process().memory_info().rss)


def give_heap_back() -> None:
    """Reading a model leaves tens of megabytes of free pieces in glibc's heaps, which it keeps otherwise. Releases the
    GIL; takes milliseconds."""
    if _TRIM is not None:
        _TRIM(0)


def keep_loaded_objects() -> None:
    """Once everything is loaded. What is loaded stays: a full collection that walks all of it would block every stream
    for 50 ms."""
    gc.collect()
    give_heap_back()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def _find_trim() -> Callable[[int], int] | None:
    """None: another C library than glibc."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return trim


_TRIM = _find_trim()

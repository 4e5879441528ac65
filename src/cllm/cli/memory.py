"""Telling a lack of memory from a mistake of ours: it has many faces, as every library meets it in its own way."""

from __future__ import annotations

import errno

NO_MEMORY = (
    "there is not enough memory to start, or not enough address space or threads are allowed (ulimit -v, ulimit -u); "
    "raise the limit, or give a smaller model or a smaller resources.kv_cache_max_memory_mb"
)
_SIGNS = (
    "cannot allocate memory",
    "can't start new thread",
    "failed to map segment",
    "resource temporarily unavailable",
    "std::bad_alloc",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that led to it, is that there was no memory or no room for another thread."""
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EAGAIN):
            return True
        if isinstance(error, (ImportError, OSError, RuntimeError)) and any(s in str(error).lower() for s in _SIGNS):
            return True
        error = error.__cause__ or error.__context__
    return False

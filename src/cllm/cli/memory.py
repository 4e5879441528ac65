"""Telling a lack of memory from a mistake of ours: it has many faces, as every library meets it in its own way."""

from __future__ import annotations

import errno
import os

from cllm.errors import CLLMError
from cllm.models.room import has_room

START_BYTES = 384 << 20
"""Address space for Python, its libraries and a few threads, before any model."""
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


def check_room() -> None:
    """Raise if there is no room to begin with. To be called before anything large is imported."""
    # numpy's BLAS takes memory for every core when it is imported, and has nothing to do here.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if not has_room(START_BYTES):
        raise CLLMError(NO_MEMORY)


def explain_bus_errors() -> None:
    """For a model file that is mapped, as llama.cpp does: if it is cut short, the next read is a signal, not an error.
    Where nothing is mapped, such a signal means something else."""
    try:
        from cllm._native import end_on_bus_error
    except ImportError:  # llama.cpp works without our engine
        return
    end_on_bus_error(
        "cllm: the model file was cut short or could not be read while it was in use; start again when it is complete, "
        "or with backend.llama_cpp.mmap=false\n",
        2,
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

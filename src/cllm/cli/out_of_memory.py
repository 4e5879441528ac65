"""Recognising that memory ran out, which every library reports in its own way."""

from __future__ import annotations

import errno
import os

from cllm.errors import CLLMError
from cllm.machine import can_reserve

START_BYTES = 384 << 20
"""Address space for Python, its libraries and a few threads, before any model."""
NO_MEMORY = (
    "not enough memory, address space (ulimit -v) or threads (ulimit -u) to start; raise the limit, use a smaller "
    "model or lower resources.kv_cache_max_memory_mb"
)
_SIGNS = (
    "cannot allocate memory",
    "can't start new thread",
    "failed to map segment",
    "resource temporarily unavailable",
    "std::bad_alloc",
)


def check_memory() -> None:
    """Raise if there is too little memory to start. Call it before importing anything large."""
    # numpy's BLAS allocates memory for every core when it is imported, and is not used here.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if not can_reserve(START_BYTES):
        raise CLLMError(NO_MEMORY)


def explain_bus_errors() -> None:
    """Print a message on SIGBUS. llama.cpp maps the model file, and reading a truncated file then raises this signal.
    Call it only before mapping a file; otherwise the signal means something else."""
    from cllm._native import end_on_bus_error

    end_on_bus_error(
        "cllm: the model file was truncated or became unreadable while in use; start again when it is complete, or set "
        "backend.llama_cpp.mmap=false\n",
        2,
    )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one of its causes, is a lack of memory or threads."""
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EAGAIN):
            return True
        if isinstance(error, (ImportError, OSError, RuntimeError)) and any(s in str(error).lower() for s in _SIGNS):
            return True
        error = error.__cause__ or error.__context__
    return False

"""A small store on disk, blocks whose content follows from their names, and system calls that fail on demand."""

from __future__ import annotations

import errno
import hashlib
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm.kv.block_names import chain, fingerprint, root_name
from cllm.kv.disk.files import Files
from cllm.kv.disk.store import DiskStore, ModelStore

BLOCK_TOKENS = 4
BLOCK_BYTES = 600
"""Not a whole number of pages, nor of anything else."""

MODEL = fingerprint(b"a model's files", {"kv_type_k": "f16", "block_size": BLOCK_TOKENS})
FILE_CALLS = (
    "open", "close", "read", "write", "truncate", "sync", "lock", "status", "list", "set_time", "remove",
    "make_directory", "direct", "cached", "begin_sync",
)  # fmt: skip


class FaultyFiles(Files):
    """Counts its calls, and fails the one with number `fail_at`, and all after it if it `lasts`."""

    def __init__(self, fail_at: int | None = None, error: int = errno.EIO, *, lasts: bool = False) -> None:
        self.calls = 0
        self.names: list[str] = []
        self.fail_at = fail_at
        self.lasts = lasts
        self.error = error
        for name in FILE_CALLS:
            setattr(self, name, self._counting(name, getattr(self, name)))

    def sync(self, file: int) -> None:
        """No power is cut in these tests, and waiting for a disk would be most of their time."""

    def _counting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.calls += 1
            self.names.append(name)
            due = self.fail_at is not None and self.calls >= self.fail_at and (self.lasts or self.calls == self.fail_at)
            if due and (name, self.error) == ("list", errno.ENOENT):
                due = False  # that a directory is not there would be a lie, and its files would not count
            if due and name == "close":
                call(*args, **options)  # a file that cannot be closed properly is closed all the same
            if due:
                raise OSError(self.error, os.strerror(self.error))
            return call(*args, **options)

        return counted


def make_store(directory: Path, *, limit: int = 1 << 20, files: Files | None = None, **options: Any) -> DiskStore:
    """One that works when it is told to."""
    options = {"linger_s": 0.0, "sleep": lambda _: None} | options
    return DiskStore(directory, limit=limit, threads=False, files=files or FaultyFiles(), **options)


def open_model_store(store: DiskStore, model: bytes = MODEL, block_bytes: int = BLOCK_BYTES) -> ModelStore:
    model_store = store.open_model(model, block_tokens=BLOCK_TOKENS, block_bytes=block_bytes, about={"model": "small"})
    store.work()
    return model_store


def names_of(model_store: ModelStore, tokens: list[int]) -> list[bytes]:
    return chain(root_name(), array("i", tokens), BLOCK_TOKENS)


def content(name: bytes, size: int = BLOCK_BYTES) -> bytes:
    """What the block of this name holds."""
    return hashlib.shake_128(name).digest(size)


def put(model_store: ModelStore, names: list[bytes], first: int = 0) -> int:
    parent = names[first - 1] if first else root_name()
    return model_store.put(
        parent, first, names[first:], [content(name, model_store.block_bytes) for name in names[first:]]
    )


def load(store: DiskStore, model_store: ModelStore, names: list[bytes]) -> int:
    """How many were loaded; that these are right is asserted."""
    buffers: list[NDArray[np.uint8]] = [np.zeros(model_store.block_bytes, np.uint8) for _ in names]
    ticket = model_store.load(names, buffers)
    store.work()
    assert ticket.done
    for name, buffer in zip(names[: ticket.loaded], buffers, strict=False):
        assert buffer.tobytes() == content(name, model_store.block_bytes), (
            "a block that was loaded is not what was written"
        )
    assert ticket.complete == (ticket.loaded == len(names))
    assert ticket.complete or ticket.error
    return ticket.loaded


def segments(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.kv"))


def total_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in segments(directory))


def long_prompt(blocks: int, start: int = 0) -> list[int]:
    return list(range(start, start + blocks * BLOCK_TOKENS))

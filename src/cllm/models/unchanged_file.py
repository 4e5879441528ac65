"""A file that must not change between reading its header and reading its last byte.

It is read and not mapped, so that truncation by another process or a failing disk is an error and not a fatal signal,
and so that nothing of the file stays in memory.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cllm.errors import ModelError


class FileStamp(NamedTuple):
    """Identifies a file's content: it differs after the file is written to or replaced."""

    device: int
    inode: int
    size: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def check(self, path: Path, status: os.stat_result) -> None:
        """Raise `ModelError` if the file has changed."""
        found = FileStamp.of(status)
        if found != self:
            change = f" (it had {self.size} bytes and has {found.size})" if found.size != self.size else ""
            raise ModelError(f"{path}: changed while it was being loaded{change}; start again when it is complete")


class UnchangedFile:
    """`with UnchangedFile(path, stamp, advice) as file:` raises, also at its end, if the file has changed."""

    def __init__(self, path: Path, stamp: FileStamp, advice: str) -> None:
        """`advice`: what to do if the file cannot be read."""
        self._path = path
        self._stamp = stamp
        self._advice = advice
        self._room = np.empty(0, np.uint8)

    def __enter__(self) -> UnchangedFile:
        try:
            self._file: BinaryIO = self._path.open("rb", buffering=0)
        except OSError as error:
            raise unreadable(self._path, error, self._advice) from error
        try:
            self._stamp.check(self._path, os.fstat(self._file.fileno()))
        except BaseException:
            self._file.close()
            raise
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._file:
            # A changed file explains other errors best.
            if kind is None or issubclass(kind, ModelError):
                self._stamp.check(self._path, os.fstat(self._file.fileno()))

    def read_bytes(self, offset: int, size: int, what: str) -> NDArray[np.uint8]:
        """The bytes of `what`, valid until the next call."""
        if size > self._room.size:
            self._room = np.empty(0, np.uint8)  # not both at once
            self._room = np.empty(size, np.uint8)
        data = self._room[:size]
        view, have = memoryview(data.data), 0
        try:
            self._file.seek(offset)
            while have < size:
                count = self._file.readinto(view[have:])  # type: ignore[attr-defined]
                if not count:
                    raise ModelError(
                        f"{self._path}: was truncated while it was being loaded, inside {what}; "
                        "start again when it is complete"
                    )
                have += count
        except OSError as error:
            raise unreadable(self._path, error, self._advice) from error
        return data


def unreadable(path: Path, error: OSError, advice: str) -> ModelError:
    return ModelError(f"{path}: cannot be read ({error.strerror or error}); {advice}")

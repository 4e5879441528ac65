"""Every system call of the store, in one place, so that tests can make any of them fail."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from typing import NamedTuple

DIRECTORY_MODE, FILE_MODE = 0o700, 0o600
ID_BYTES = 16
"""Size of a segment's id."""

MOST_BUFFERS = 512
"""Most buffers per call; Linux allows 1024."""

Buffer = memoryview | bytes
"""With items of one byte."""


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Linux has it, but Python does not expose it."""
    try:
        found = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return found


_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = _find_sync_file_range()


class Listed(NamedTuple):
    """An entry of a directory."""

    name: str
    size: int
    modified_ns: int
    is_file: bool
    is_directory: bool


class Files:
    """Calls raise OSError, and nothing else."""

    why_not = None if hasattr(os, "preadv") else "keeping K/V on disk needs preadv, which this system does not have"
    """Why this system cannot keep K/V on disk."""

    def fresh_id(self) -> bytes:
        return os.urandom(ID_BYTES)

    def open(self, path: str, *, create: bool = False, new: bool = False, write: bool = False) -> int:
        """Links are not followed: they could lead to a file that is not ours."""
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_RDWR if write else os.O_RDONLY)
        flags |= (os.O_CREAT if create or new else 0) | (os.O_EXCL if new else 0)
        return os.open(path, flags, FILE_MODE)

    def close(self, file: int) -> None:
        os.close(file)

    def read(self, file: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(file, buffers, offset)

    def cached(self, file: int, offset: int) -> bool:
        """Whether this byte is in the page cache, as far as the system can say."""
        try:
            return os.preadv(file, [bytearray(1)], offset, getattr(os, "RWF_NOWAIT", 0)) > 0
        except OSError:
            return False

    def write(self, file: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(file, buffers, offset)

    def truncate(self, file: int, size: int) -> None:
        os.ftruncate(file, size)

    def sync(self, file: int) -> None:
        getattr(os, "fdatasync", os.fsync)(file)

    def begin_sync(self, file: int, offset: int, count: int) -> None:
        """Start writing this range to the disk; `sync` reports the outcome."""
        if _sync_file_range is not None:
            _sync_file_range(file, offset, count, _SYNC_FILE_RANGE_WRITE)

    def direct(self, file: int, on: bool) -> None:
        """Bypass the page cache for an open file (O_DIRECT), or stop doing so. Whole pages only, on disk and in memory.
        EINVAL, now or on first use: the file system does not support it."""
        flag = getattr(os, "O_DIRECT", 0)
        if not flag:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        fcntl.fcntl(file, fcntl.F_SETFL, flags | flag if on else flags & ~flag)

    def lock(self, file: int) -> bool:
        """Lock the file for this process until it is closed. False: another process holds it."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                return False
            raise
        return True

    def status(self, file: int) -> os.stat_result:
        return os.fstat(file)

    def list(self, path: str) -> list[Listed]:
        """Entries removed meanwhile are left out."""
        found: list[Listed] = []
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                kind = stat.S_IFMT(status.st_mode)
                found.append(
                    Listed(entry.name, status.st_size, status.st_mtime_ns, kind == stat.S_IFREG, kind == stat.S_IFDIR)
                )
        return found

    def set_time(self, path: str, modified_ns: int) -> None:
        os.utime(path, ns=(modified_ns, modified_ns), follow_symlinks=False)

    def remove(self, path: str) -> None:
        os.unlink(path)  # noqa: PTH108 (paths are strings here: there are thousands of them)

    def make_directory(self, path: str) -> None:
        """Create it and its parents; it may exist already."""
        os.makedirs(path, DIRECTORY_MODE, exist_ok=True)  # noqa: PTH103

    def remove_directory(self, path: str) -> None:
        os.rmdir(path)  # noqa: PTH106


def read_all(files: Files, file: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill the buffers as far as the file goes; returns the bytes read."""
    return _transfer(files.read, file, buffers, offset)


def write_all(files: Files, file: int, buffers: Sequence[Buffer], offset: int) -> None:
    views = [memoryview(buffer) for buffer in buffers]
    if _transfer(files.write, file, views, offset) < sum(map(len, views)):
        raise OSError(errno.EIO, "the system wrote fewer bytes than asked")


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int], file: int, buffers: Sequence[memoryview], offset: int
) -> int:
    done, first, inside = 0, 0, 0
    while first < len(buffers):
        rest = [buffers[first][inside:], *buffers[first + 1 : first + MOST_BUFFERS]]
        moved = call(file, rest, offset + done)
        if moved <= 0 and any(len(buffer) for buffer in rest):
            break
        done += moved
        inside += moved
        while first < len(buffers) and inside >= len(buffers[first]):
            inside -= len(buffers[first])
            first += 1
    return done

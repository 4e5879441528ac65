"""The directory that several processes share: locks, sizes, and times of use.

    ROOT/lock                      held (flock) for milliseconds to make room, create or shorten a file.
                                   Contains an upper bound of the bytes of all segments
    ROOT/FINGERPRINT/ID.kv         a segment; held (flock) by the process that appends to it
    ROOT/models                    digests of model files (model_digest.py)

A file's length counts from the moment it is set, before anything is written there, so the limit holds over all
processes at any moment. A file's modification time is when it was last used: all processes go by that.
"""

from __future__ import annotations

import os
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from cllm.kv.disk.files import ID_BYTES, Files, Listed, read_all, write_all
from cllm.kv.disk.format import SUFFIX

LOCK_NAME, KNOWN_NAME = "lock", "models"
LOCK_WAIT_S = 5.0
_TALLY = struct.Struct("<QI")
_SPACE = re.compile(r"[0-9a-f]{32}")
_SEGMENT = re.compile(rf"[0-9a-f]{{{2 * ID_BYTES}}}{re.escape(SUFFIX)}")


class SegmentFile(NamedTuple):
    """A segment's file."""

    folder: str
    path: str
    size: int
    modified_ns: int


class Survey(NamedTuple):
    files: list[SegmentFile]
    foreign: int
    """Entries whose names are not ours: never read, counted or removed."""

    @property
    def bytes(self) -> int:
        return sum(found.size for found in self.files)


class Tally:
    """An upper bound of the bytes of all segments, stored in the lock file, so that writers need not stat every file.
    Raised before anything is added; removals need not lower it, because it is recounted when that matters, and from
    time to time."""

    def __init__(self, files: Files, file: int) -> None:
        self._files = files
        self._file = file

    def read(self) -> int | None:
        """None: unknown."""
        data = bytearray(_TALLY.size)
        try:
            if read_all(self._files, self._file, [memoryview(data)], 0) < len(data):
                return None
        except OSError:
            return None
        total, checksum = _TALLY.unpack(data)
        return int(total) if checksum == zlib.crc32(data[:8]) else None

    def write(self, total: int) -> None:
        number = total.to_bytes(8, "little")
        write_all(self._files, self._file, [_TALLY.pack(total, zlib.crc32(number))], 0)

    def forget(self) -> None:
        self._files.truncate(self._file, 0)


class BusyError(OSError):
    """Another process has held the directory, or a file, for too long."""


class Directory:
    def __init__(
        self,
        root: str,
        files: Files,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.root = root
        self.files = files
        self._clock_ns = clock_ns
        self._monotonic = monotonic
        self._sleep = sleep
        self._newest = 0
        self._stamping = threading.Lock()

    def stamps(self, count: int) -> int:
        """The first of `count` timestamps later than all seen here, whatever the clock says."""
        with self._stamping:
            first = max(self._clock_ns(), self._newest + 1)
            self._newest = first + count - 1
            return first

    def seen(self, modified_ns: int) -> None:
        with self._stamping:
            self._newest = max(self._newest, modified_ns)

    def path_in(self, name: str) -> str:
        return os.path.join(self.root, name)  # noqa: PTH118 (strings: there are thousands of them)

    def survey(self) -> Survey:
        """All segments of all models, without those removed meanwhile."""
        found: list[SegmentFile] = []
        foreign = 0
        for entry in self._entries(self.root):
            if entry.is_directory and _SPACE.fullmatch(entry.name):
                inside = self.path_in(entry.name)
                for file in self._entries(inside):
                    if file.is_file and _SEGMENT.fullmatch(file.name):
                        found.append(SegmentFile(entry.name, f"{inside}/{file.name}", file.size, file.modified_ns))
                        self.seen(file.modified_ns)
                    else:
                        foreign += 1
            elif entry.name.partition(".")[0] not in (LOCK_NAME, KNOWN_NAME):
                foreign += 1
        return Survey(found, foreign)

    def _entries(self, path: str) -> list[Listed]:
        try:
            return self.files.list(path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    @contextmanager
    def locked(self) -> Iterator[Tally]:
        """Nobody else creates, shortens or removes a file meanwhile."""
        deadline, pause = self._monotonic() + LOCK_WAIT_S, 0.001
        while True:
            self.files.make_directory(self.root)
            with self.opened(self.path_in(LOCK_NAME), create=True, write=True) as file:
                # A lock file that was removed locks nobody out.
                if self.files.lock(file) and self.files.status(file).st_nlink:
                    yield Tally(self.files, file)
                    return
            if self._monotonic() > deadline:
                raise BusyError(f"another process has held {self.root}/{LOCK_NAME} for {LOCK_WAIT_S:g} s")
            self._sleep(pause)
            pause = min(2 * pause, 0.05)

    @contextmanager
    def opened(self, path: str, *, create: bool = False, new: bool = False, write: bool = False) -> Iterator[int]:
        file = self.files.open(path, create=create, new=new, write=write)
        try:
            yield file
        finally:
            with suppress(OSError):
                self.files.close(file)

    @contextmanager
    def taken(self, path: str) -> Iterator[int]:
        """Open a segment that nobody else writes to or shortens meanwhile; the directory is locked. BusyError: another
        process is writing to it."""
        with self.opened(path, write=True) as file:
            if not self.files.lock(file):
                raise BusyError(f"{path} is being written to")
            yield file

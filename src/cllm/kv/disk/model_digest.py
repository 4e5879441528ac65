"""A digest of a model's files, in 32 bytes.

It covers the whole content, not samples: a model changed in one tensor has other K/V, and loading those of the original
would silently give wrong answers. Hashing takes a second per GB, so each file is hashed once and the digest remembered
for as long as the file's size, times and inode stay the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cllm.kv.block_names import NAME_BYTES
from cllm.kv.disk.files import FILE_MODE
from cllm.kv.disk.threads import DaemonPool

PIECE_BYTES = 16 << 20
MOST_REMEMBERED = 1000
THREADS = 2


class Identity(NamedTuple):
    """If none of these changed, the file was not written to."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


class ChangedError(OSError):
    """The file has changed."""


def identity(file: Path | int) -> Identity:
    """The identity of a path or an open file."""
    status = file.stat() if isinstance(file, Path) else os.fstat(file)
    return Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class StoppedError(OSError):
    """The digest is no longer wanted."""


def content_digest(
    files: Sequence[Path],
    known: Path,
    *,
    loaded: Sequence[Identity] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> bytes:
    """The digest of all files, in this order. `known` is the file that remembers digests. StoppedError: once `stopped`.

    `loaded` has the files' identities when the model was loaded. If one has changed since, ChangedError: K/V of the
    model in memory must not be named after the one on disk.
    """
    whole = hashlib.blake2b(digest_size=NAME_BYTES, person=b"cllm-kv-files")
    for number, file in enumerate(files):
        whole.update(_file_digest(file, known, None if loaded is None else loaded[number], stopped))
    return whole.digest()


def _file_digest(file: Path, known: Path, expected: Identity | None, stopped: Callable[[], bool]) -> bytes:
    with file.open("rb") as opened:
        before = identity(opened.fileno())
        if expected is not None and before != expected:
            raise ChangedError(f"{file} was changed after it was loaded")
        path = str(file.resolve())
        remembered = _read(known).get(path)
        if remembered is not None and remembered[:-1] == list(before):
            return bytes.fromhex(str(remembered[-1]))
        digest = _hash(opened.fileno(), before.size, stopped)
        if identity(opened.fileno()) != before:
            raise ChangedError(f"{file} was changed while it was read")
    _remember(known, path, [*before, digest.hex()])
    return digest


def _hash(file: int, size: int, stopped: Callable[[], bool]) -> bytes:
    """Hash pieces in parallel, then their digests together: two threads halve the time."""

    def piece(start: int) -> bytes:
        found = hashlib.blake2b(digest_size=NAME_BYTES)
        end = min(size, start + PIECE_BYTES)
        while start < end:
            if stopped():
                raise StoppedError("stopped")
            data = os.pread(file, min(1 << 20, end - start), start)
            if not data:
                raise ChangedError("the file shrank while it was read")
            found.update(data)
            start += len(data)
        return found.digest()

    whole = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=NAME_BYTES)
    pool = DaemonPool(THREADS, "cllm-kv-hash")
    digests = [pool.submit(piece, start) for start in range(0, size, PIECE_BYTES)]
    try:
        for digest in digests:
            whole.update(digest.result())
    finally:  # next, the file is closed
        pool.stop()
        wait(digests)
    return whole.digest()


def _read(known: Path) -> dict[str, list[int | str]]:
    """Remembered digests; none if the file is damaged."""
    try:
        checksum, _, text = known.read_bytes().partition(b"\n")
        if int(checksum, 16) == zlib.crc32(text):
            return dict(json.loads(text))
    except (OSError, ValueError):
        pass
    return {}


def _remember(known: Path, path: str, found: list[int | str]) -> None:
    entries = _read(known)
    entries.pop(path, None)
    entries[path] = found
    for old in list(entries)[:-MOST_REMEMBERED]:
        del entries[old]
    text = json.dumps(entries).encode()
    made = known.with_name(f"{known.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        known.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, FILE_MODE)
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(b"%08x\n" % zlib.crc32(text) + text)
        made.replace(known)
    except OSError:  # disk full or read-only: hash again next time
        with suppress(OSError):
            made.unlink()

"""Verifies downloaded files by their SHA-256.

Hashing takes a moment, so the result is kept in a small file next to it, until the file's size or time changes.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

_BLOCK_BYTES = 1 << 20

_verified_here: set[tuple[Path, int, int, str]] = set()
"""For this process, in case the cache is not writable."""


def is_intact(file: Path, size: int, sha256: str) -> bool:
    """Whether the file exists, complete and undamaged. Raises OSError if it cannot be read."""
    try:
        status = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not file.is_file() or status.st_size != size:
        return False
    if _is_known(file, status, sha256):
        return True
    with file.open("rb") as opened:
        # Taken before hashing: a file that changes in the meantime will be hashed again next time.
        status = os.fstat(opened.fileno())
        digest = hashlib.sha256()
        while block := opened.read(_BLOCK_BYTES):
            digest.update(block)
        if digest.hexdigest() != sha256:
            return False
    _remember(file, status, sha256)
    return True


def mark_verified(file: Path, sha256: str) -> None:
    """Record that the file was just downloaded and verified."""
    with suppress(OSError):
        _remember(file, file.stat(), sha256)


def _stamp_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.verified")


def _is_known(file: Path, status: os.stat_result, sha256: str) -> bool:
    if (file, status.st_size, status.st_mtime_ns, sha256) in _verified_here:
        return True
    try:
        stamp = json.loads(_stamp_file(file).read_bytes())
    except (OSError, ValueError):
        return False
    return bool(stamp == _stamp(status, sha256))


def _remember(file: Path, status: os.stat_result, sha256: str) -> None:
    _verified_here.add((file, status.st_size, status.st_mtime_ns, sha256))
    stamp, made = _stamp_file(file), _stamp_file(file).with_name(f".{file.name}.{os.getpid()}.verified")
    try:
        made.write_text(json.dumps(_stamp(status, sha256)))
        made.replace(stamp)
    except OSError:  # the disk is full or not writable: the file is hashed again next time
        with suppress(OSError):
            made.unlink()


def _stamp(status: os.stat_result, sha256: str) -> dict[str, int | str]:
    return {"size": status.st_size, "modified_ns": status.st_mtime_ns, "sha256": sha256}

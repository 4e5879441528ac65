"""Is a file that was fetched earlier still the one it should be?

Hashing takes a moment, so it is done when the file is first used after a change of its size or time. What was found
then stands in a small file beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

_BLOCK_BYTES = 1 << 20

_verified_here: set[tuple[Path, int, int, str]] = set()
"""In this process, for caches that cannot be written to."""


def is_intact(file: Path, size: int, sha256: str) -> bool:
    """Whether the file is there, whole and undamaged. Raises OSError if it cannot be read."""
    try:
        status = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not file.is_file() or status.st_size != size:
        return False
    if _is_known(file, status, sha256):
        return True
    with file.open("rb") as opened:
        # Of what is hashed, and before that: a file that is replaced or written to meanwhile will look new next time.
        status = os.fstat(opened.fileno())
        digest = hashlib.sha256()
        while block := opened.read(_BLOCK_BYTES):
            digest.update(block)
        if digest.hexdigest() != sha256:
            return False
    _remember(file, status, sha256)
    return True


def note_verified(file: Path, sha256: str) -> None:
    """The file has just been made and checked."""
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
    except OSError:  # no room, or not ours to write: it is hashed again next time
        with suppress(OSError):
            made.unlink()


def _stamp(status: os.stat_result, sha256: str) -> dict[str, int | str]:
    return {"size": status.st_size, "modified_ns": status.st_mtime_ns, "sha256": sha256}

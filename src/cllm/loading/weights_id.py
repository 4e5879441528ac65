"""A short name for a model's weights: equal for equal files, on every machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from cllm.errors import ModelError

_HEAD_BYTES = 1 << 20
_SAMPLES = 256
_SAMPLE_BYTES = 4096


def weights_id(files: Sequence[Path]) -> str:
    """Made from the sizes of the files, how they begin, and samples of the rest: training changes nearly every weight.

    Takes milliseconds. The K/V store needs to be certain, and uses a digest of everything (kv/disk/model_digest.py).
    """
    found = blake2b(digest_size=16, person=b"cllm weights")
    for path in files:
        for piece in _pieces(path):
            found.update(piece)
    return found.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            yield size.to_bytes(8, "little") + file.read(_HEAD_BYTES)
            for number in range(_SAMPLES):
                file.seek(size * number // _SAMPLES)
                yield file.read(_SAMPLE_BYTES)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error

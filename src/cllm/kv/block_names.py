"""Names of blocks: chained hashes. A block's content depends on the model and the tokens up to its end, nothing else.

    root = H(space)                                 a tenant's own, where tenants are kept apart
    name = H(parent's name or root, the block's tokens)

So within one model equal names mean equal K/V, whichever process computed them, and a name reveals nothing about the
tokens. BLAKE2b with 32 bytes: collisions cannot be found even on purpose. The store on disk has a folder for every
model, named by its fingerprint:

    fingerprint = H(the model's files, K/V types, block size, engine, instructions, ...)
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

NAME_BYTES = 32
TOKEN_BYTES = 4
_FINGERPRINT, _ROOT, _BLOCK, _LOCAL = b"cllm-kv-model", b"cllm-kv-root", b"cllm-kv-block", b"cllm-kv-local"
_STATE = b"cllm-kv-state"


def fingerprint(content: bytes, settings: Mapping[str, str | int]) -> bytes:
    """The fingerprint of a model as it runs: `content` is the digest of its files (disk/model_digest.py), `settings` is
    everything else that the bits of K/V depend on."""
    text = json.dumps(dict(settings), sort_keys=True, ensure_ascii=True).encode()
    return _hash(_FINGERPRINT, len(content).to_bytes(8, "little") + content + text)


def root_name(space: bytes = b"", after: bytes = b"") -> bytes:
    """What a space's first block follows: at its root, or behind the block `after` of the common space."""
    return _hash(_ROOT, after + space)


def chain(parent: bytes, tokens: array[int] | NDArray[np.int32] | bytes, block_tokens: int) -> list[bytes]:
    """The names of all whole blocks of `tokens`, which follow `parent`.

    Continuing from the last name gives the same as hashing everything at once. 0.2 ms for 4,000 tokens in blocks of 16.
    """
    data = token_bytes(tokens)
    step = block_tokens * TOKEN_BYTES
    whole = len(data) // step * step
    blake, names = hashlib.blake2b, []
    for start in range(0, whole, step):
        parent = blake(parent + data[start : start + step], digest_size=NAME_BYTES, person=_BLOCK).digest()
        names.append(parent)
    return names


def tail_name(parent: bytes, tokens: bytes) -> bytes:
    """The name of a partial last block. It differs from every whole block's, which has more tokens."""
    return hashlib.blake2b(parent + tokens, digest_size=NAME_BYTES, person=_BLOCK).digest()


def local_names(names: Iterable[bytes], cells: int) -> list[bytes]:
    """The names of the cells that the local layers have for these blocks, one block after another."""
    return [name for each in names for name in _cell_names(_LOCAL, each, cells)]


def state_names(name: bytes, cells: int) -> list[bytes]:
    """The names of the cells of the state at the end of this block."""
    return _cell_names(_STATE, name, cells)


def token_bytes(tokens: array[int] | NDArray[np.int32] | bytes) -> bytes:
    if isinstance(tokens, bytes):
        return tokens
    if isinstance(tokens, array):
        if tokens.itemsize != TOKEN_BYTES:
            raise ValueError(f"tokens have {tokens.itemsize} bytes here, not {TOKEN_BYTES}")
        return tokens.tobytes()
    return np.ascontiguousarray(tokens, np.int32).tobytes()


def _cell_names(purpose: bytes, name: bytes, cells: int) -> list[bytes]:
    return [_hash(purpose, name + number.to_bytes(4, "little")) for number in range(cells)]


def _hash(purpose: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=NAME_BYTES, person=purpose).digest()

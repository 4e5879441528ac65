"""Names of blocks: what a block holds follows from the model, the tokens up to its end, and nothing else.

    fingerprint = H(the model's files, K/V types, block size, engine, instructions, ...)
    root        = H(fingerprint, salt)                  a tenant's own, where tenants are kept apart
    name        = H(parent's name or root, the block's tokens)

So equal names mean equal K/V, whoever computed them and when, and a name tells nothing of the tokens to who does not
know them already. BLAKE2b with 32 bytes: nobody finds two prompts with one name, even if he tries.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

NAME_BYTES = 32
TOKEN_BYTES = 4
_FINGERPRINT, _ROOT, _BLOCK = b"cllm-kv-model", b"cllm-kv-root", b"cllm-kv-block"


def fingerprint(content: bytes, settings: Mapping[str, str | int]) -> bytes:
    """Of a model as it is run: `content` is the digest of its files (contents.py), `settings` is all else that the
    bits of K/V depend on."""
    text = json.dumps(dict(settings), sort_keys=True, ensure_ascii=True).encode()
    return _hash(_FINGERPRINT, len(content).to_bytes(8, "little") + content + text)


def root_name(model: bytes, salt: bytes = b"") -> bytes:
    """Where chains of this model begin, for whoever shares the salt."""
    return _hash(_ROOT, model + salt)


def chain(
    parent: bytes, tokens: array[int] | NDArray[np.int32] | bytes, block_tokens: int, *, end: int | None = None
) -> list[bytes]:
    """The names of all whole blocks of `tokens`, which follow `parent`, up to token `end`.

    Going on from the last name with the next tokens gives the same as doing it all at once. 0.2 ms for 4,000 tokens in
    blocks of 16.
    """
    data = token_bytes(tokens)
    step = block_tokens * TOKEN_BYTES
    whole = (len(data) if end is None else min(len(data), end * TOKEN_BYTES)) // step * step
    blake, names = hashlib.blake2b, []
    for start in range(0, whole, step):
        parent = blake(parent + data[start : start + step], digest_size=NAME_BYTES, person=_BLOCK).digest()
        names.append(parent)
    return names


def tail_name(parent: bytes, tokens: bytes) -> bytes:
    """The name of what ends within a block. No whole block has it: its tokens are fewer."""
    return hashlib.blake2b(parent + tokens, digest_size=NAME_BYTES, person=_BLOCK).digest()


def token_bytes(tokens: array[int] | NDArray[np.int32] | bytes) -> bytes:
    if isinstance(tokens, bytes):
        return tokens
    if isinstance(tokens, array):
        if tokens.itemsize != TOKEN_BYTES:
            raise ValueError(f"tokens have {tokens.itemsize} bytes here, not {TOKEN_BYTES}")
        return tokens.tobytes()
    return np.ascontiguousarray(tokens, np.int32).tobytes()


def _hash(purpose: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=NAME_BYTES, person=purpose).digest()

"""Steps of the native backend with the real model's weights."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from cllm.backends.base import Chunk, Logits
from cllm.backends.native import NativeBackend
from cllm.models.gguf import GGUFModel
from cllm.models.registry import resolve
from step_of import rows_of

BLOCKS, BLOCK_SIZE = 128, 16
TOKENS = array("i", (np.arange(1, 600, dtype=np.int64) * 7919 % 49_000).tolist())
"""Ids that mean nothing; what is compared is whether the same is computed."""


def make(**settings: Any) -> NativeBackend:
    defaults = {"threads": 2, "instruction_set": "auto", "kv_type_k": "f16", "kv_type_v": "f16"}
    return NativeBackend(GGUFModel.open(resolve("smollm2")), **(defaults | settings))


def table(first: int, tokens: int) -> list[int]:
    return list(range(first, first + -(-tokens // BLOCK_SIZE)))


def chunk(start: int, end: int, blocks: list[int], *, wants: int = 1) -> Chunk:
    return Chunk(TOKENS[start:end], start, wants, blocks=blocks)


def row(backend: NativeBackend, *chunks: Chunk) -> Logits:
    """A copy of the last row of a step."""
    return rows_of(backend, chunks)[-1].copy()

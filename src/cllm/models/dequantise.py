"""Reads tensors of a GGUF file as float32, a few rows at a time to save memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from numpy.typing import NDArray

from cllm.models.gguf import GGUFModel, TensorFile

_PIECE_VALUES = 4 << 20


def _can_dequantise(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


DEQUANTISED: frozenset[int] = frozenset(int(kind) for kind in GGMLQuantizationType if _can_dequantise(kind))
"""The tensor types that can be dequantised, as GGML type numbers."""


def dequantised_rows(
    file: TensorFile, model: GGUFModel, name: str, first: int = 0, count: int | None = None
) -> Iterator[NDArray[np.float32]]:
    """Consecutive rows, `count` from `first` on; a vector is one row."""
    info = model.tensors[name]
    kind = GGMLQuantizationType(info.type)
    columns = info.shape[0]
    rows = info.shape[1] if len(info.shape) > 1 else 1
    row_bytes = info.size // rows
    step, end = max(1, _PIECE_VALUES // columns), rows if count is None else first + count
    for start in range(first, end, step):
        some = min(step, end - start)
        raw = file.read(name, start * row_bytes, some * row_bytes)
        values = dequantize(raw.reshape(some, row_bytes), kind)
        yield values.astype(np.float32, copy=False).reshape(some, columns)

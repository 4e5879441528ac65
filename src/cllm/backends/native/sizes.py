"""How much memory a model's weights take once they are packed, known from the header alone.

The packed weights are the process's own memory: what does not fit is better known before it is loaded. csrc/packed.h
has the layouts.
"""

from __future__ import annotations

from gguf import GGMLQuantizationType

from cllm.models.gguf import GGUFModel
from cllm.models.gguf_header import TensorInfo

_TILE_ROWS = 16
_SCALED = 32
_BYTES_OF_32 = {
    GGMLQuantizationType.F32: 128,
    GGMLQuantizationType.F16: 64,
    GGMLQuantizationType.BF16: 64,
    GGMLQuantizationType.Q4_0: 20,
    GGMLQuantizationType.Q4_1: 20,
    GGMLQuantizationType.Q4_K: 20,
    GGMLQuantizationType.Q5_0: 34,
    GGMLQuantizationType.Q5_1: 36,
    GGMLQuantizationType.Q5_K: 36,
    GGMLQuantizationType.Q6_K: 36,
    GGMLQuantizationType.Q8_0: 34,
}
"""Bytes that 32 packed weights take, with their scales."""


def packed_bytes(model: GGUFModel) -> int:
    """Of a model that the engine runs (see `unsupported`)."""
    return sum(map(_packed, model.tensors.values()))


def read_per_token(model: GGUFModel) -> int:
    """Bytes of weights that a decoded token reads: not those of an embedding that is not the head as well."""
    embedding = model.tensors["token_embd.weight"] if "output.weight" in model.tensors else None
    return packed_bytes(model) - (_packed(embedding) if embedding is not None else 0)


def _packed(info: TensorInfo) -> int:
    if len(info.shape) < 2:
        return 0  # vectors hardly count
    rows = -(-info.shape[1] // _TILE_ROWS) * _TILE_ROWS
    return rows * info.shape[0] * _BYTES_OF_32[GGMLQuantizationType(info.type)] // _SCALED

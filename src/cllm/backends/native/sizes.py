"""How much memory a model's packed weights take, from the header alone, so that a lack of it is known before loading.

They take as many bytes as in the file, with rows padded to whole tiles (csrc/packed.h).
"""

from __future__ import annotations

from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

from cllm.models.gguf import GGUFModel
from cllm.models.gguf_header import TensorInfo

_TILE_ROWS = 16


def packed_bytes(model: GGUFModel) -> int:
    """For a model that the engine can run (see `unsupported`)."""
    return sum(_packed(info) for name, info in model.tensors.items() if not model.leaves_aside(name))


def _packed(info: TensorInfo) -> int:
    if len(info.shape) < 2:
        return 0  # vectors hardly count
    rows = -(-info.shape[1] // _TILE_ROWS) * _TILE_ROWS
    columns, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(info.type)]
    return rows * (info.shape[0] // int(columns)) * int(block_bytes)

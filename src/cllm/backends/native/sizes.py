"""How much memory a model's weights take once they are packed, known from the header alone.

The packed weights are the process's own memory: what does not fit is better known before it is loaded. They take as
many bytes as in the file, once rows are filled up to whole tiles (csrc/packed.h).
"""

from __future__ import annotations

from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

from cllm.models.gguf import GGUFModel
from cllm.models.gguf_header import TensorInfo

_TILE_ROWS = 16


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
    columns, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(info.type)]
    return rows * (info.shape[0] // int(columns)) * int(block_bytes)

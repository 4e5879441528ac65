"""Loads a GGUF file into the native engine.

Everything is checked against the header before the engine is built, so that a file with absurd numbers is refused
before memory is allocated for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gguf import GGMLQuantizationType

from cllm._native import Engine
from cllm.errors import ConfigError, ModelError
from cllm.models.features import FEATURES
from cllm.models.gguf import DAMAGED_ADVICE, GGUFModel, TensorFile
from cllm.models.gguf_decoder import decoder_spec, stored_tensors, unsupported_reason
from cllm.models.gguf_header import TensorInfo
from cllm.models.load_progress import ByteProgress
from cllm.models.spec import DeltaNetSpec, Mamba2Spec, ModelSpec
from cllm.models.tensors import TensorSpec

_TYPES = frozenset({
    GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q5_1, GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K, GGMLQuantizationType.Q6_K, GGMLQuantizationType.MXFP4,
    GGMLQuantizationType.IQ4_NL, GGMLQuantizationType.IQ4_XS, GGMLQuantizationType.Q3_K, GGMLQuantizationType.Q2_K,
    GGMLQuantizationType.IQ3_S, GGMLQuantizationType.IQ3_XXS, GGMLQuantizationType.IQ2_S, GGMLQuantizationType.IQ2_XS,
    GGMLQuantizationType.IQ2_XXS,
})  # fmt: skip
_MAX_HEAD_DIM = 512
_STATE_VALUES = 16
_TILE_ROWS = 16
_PIECE_BYTES = 16 << 20  # read and packed at a time


def unsupported(model: GGUFModel) -> str | None:
    """Why the native engine cannot run this model, as one clause; None: it can, unless the file is damaged."""
    reason = unsupported_reason(model, _TYPES, FEATURES)
    if reason is not None:
        return reason
    for head_dim in sorted({attention.head_dim_k for attention in model.spec.attentions}):
        if head_dim % 8 or head_dim > _MAX_HEAD_DIM:
            return f"its head size is {head_dim}, not a multiple of 8 up to {_MAX_HEAD_DIM}"
    return _unsupported_states(model)


def _unsupported_states(model: GGUFModel) -> str | None:
    try:
        kinds = {layer.recurrence for layer in decoder_spec(model).layers}
    except ModelError:
        return None  # damaged, as loading it will say
    for kind in kinds:
        if isinstance(kind, DeltaNetSpec):
            values, keys = kind.head_dim_v, kind.head_dim_k
        elif isinstance(kind, Mamba2Spec):
            values, keys = kind.head_dim, kind.state_size
        else:
            continue
        if values % _STATE_VALUES or max(values, keys) > _MAX_HEAD_DIM:
            wanted = f"a multiple of {_STATE_VALUES} and any number, up to {_MAX_HEAD_DIM}"
            return f"the state of its heads has {values} x {keys} numbers, not {wanted}"
    return None


def load_engine(
    model: GGUFModel,
    *,
    threads: int,
    spec: ModelSpec | None = None,
    instruction_set: str = "auto",
    progress: ByteProgress = lambda done, total: None,
) -> Engine:
    """An engine with the model's weights, packed. Every problem is a `ModelError` that names the file.

    `spec` is the model's `decoder_spec`, by default the one for texts as long as it was trained for. `progress` is
    called with the bytes loaded so far and in all.
    """
    reason = unsupported(model)
    if reason is not None:
        raise ModelError(f"{model.path}: the native engine cannot run this model: {reason}")
    spec = spec or decoder_spec(model)
    wanted = list(stored_tensors(model, spec))
    try:
        engine = Engine(instruction_set=instruction_set, threads=threads, spec=spec)
        _load_weights(engine, model, wanted, progress)
        engine.seal()
    except ValueError as error:
        raise ModelError(f"{model.path}: the native engine cannot load this model: {error}") from error
    except MemoryError as error:
        raise ModelError(f"{model.path}: not enough memory for its weights; use a smaller model") from error
    except RuntimeError as error:  # no more threads
        raise ConfigError(f"{error}; lower backend.threads, or raise the limit on processes or memory") from error
    return engine


# --- the weights ---


def _load_weights(engine: Engine, model: GGUFModel, wanted: list[TensorSpec], progress: ByteProgress) -> None:
    total = sum(item.shape[0] * _unit_bytes(item, model.tensors[item.name]) for item in wanted)
    done = 0
    with TensorFile(model) as file:
        for item in sorted(wanted, key=lambda item: (model.tensors[item.name].offset, item.first)):
            for size in _load_tensor(engine, model, item, file):
                done += size
                progress(done, total)


def _load_tensor(engine: Engine, model: GGUFModel, item: TensorSpec, file: TensorFile) -> Iterator[int]:
    """Read and pack a tensor piece by piece, so that there is never a second copy of a large one; yields the sizes."""
    info = model.tensors[item.name]
    start = item.first * _unit_bytes(item, info)
    row_bytes = item.shape[0] * _unit_bytes(item, info) // item.rows
    rows = max(1, _PIECE_BYTES // (row_bytes * _TILE_ROWS)) * _TILE_ROWS
    for first in range(0, item.rows, rows):
        size = min(rows, item.rows - first) * row_bytes
        data = file.read(item.name, start + first * row_bytes, size)
        try:
            engine.load(item.layer, item.role, info.type, item.rows, item.cols, data, first)
        except ValueError as error:
            raise ModelError(
                f"{model.path}: the tensor {item.name} cannot be used: {error}; {DAMAGED_ADVICE}"
            ) from error
        yield size


def _unit_bytes(item: TensorSpec, info: TensorInfo) -> int:
    """Bytes of a row, or of a value of a vector."""
    return info.size // (info.shape[1] if len(item.shape) > 1 else math.prod(info.shape))

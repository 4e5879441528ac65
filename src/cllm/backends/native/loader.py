"""Loads a GGUF file into the native engine.

Everything is checked against the header before the engine is built, so that a file with absurd numbers is refused
before memory is allocated for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from gguf import GGMLQuantizationType

from cllm._native import Engine
from cllm.errors import ConfigError, ModelError
from cllm.models.gguf import GGUFModel, TensorFile
from cllm.models.gguf_decoder import (
    ROPE_NEOX,
    DecoderParams,
    TensorSpec,
    layer_tensors,
    outer_tensors,
    read_params,
    unsupported_reason,
)

_TYPES = frozenset({
    GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q5_1, GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K, GGMLQuantizationType.Q6_K, GGMLQuantizationType.MXFP4,
    GGMLQuantizationType.IQ4_NL, GGMLQuantizationType.IQ4_XS, GGMLQuantizationType.Q3_K, GGMLQuantizationType.Q2_K,
    GGMLQuantizationType.IQ3_S, GGMLQuantizationType.IQ3_XXS, GGMLQuantizationType.IQ2_S, GGMLQuantizationType.IQ2_XS,
    GGMLQuantizationType.IQ2_XXS,
})  # fmt: skip
_MAX_HEAD_DIM = 512
_TILE_ROWS = 16
_PIECE_BYTES = 16 << 20  # read and packed at a time
_ADVICE = "download it again or use another .gguf file"
_OPTIONAL = frozenset({"output", "rope_freqs", "attn_q.bias", "attn_k.bias", "attn_v.bias"})


Progress = Callable[[int, int], None]


def unsupported(model: GGUFModel) -> str | None:
    """Why the native engine cannot run this model, as one clause; None: it can, unless the file is damaged."""
    reason = unsupported_reason(model, _TYPES)
    if reason is not None:
        return reason
    head_dim = model.shape.head_dim_k
    if head_dim % 8 or head_dim > _MAX_HEAD_DIM:
        return f"its head size is {head_dim}, not a multiple of 8 up to {_MAX_HEAD_DIM}"
    return None


def load_engine(
    model: GGUFModel, *, threads: int, instruction_set: str = "auto", progress: Progress = lambda done, total: None
) -> Engine:
    """An engine with the model's weights, packed. Every problem is a `ModelError` that names the file.

    `progress` is called with the bytes loaded so far and in all.
    """
    reason = unsupported(model)
    if reason is not None:
        raise ModelError(f"{model.path}: the native engine cannot run this model: {reason}")
    numbers = read_params(model)
    wanted = list(_present(model, numbers))
    shape = model.shape
    try:
        engine = Engine(
            instruction_set=instruction_set,
            threads=threads,
            n_layers=shape.n_layers,
            n_embd=shape.n_embd,
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            head_dim=shape.head_dim_k,
            n_ff=numbers.n_ff,
            n_vocab=shape.n_vocab,
            rms_eps=numbers.rms_eps,
            rope_base=numbers.rope_base,
            rope_dims=numbers.rope_dims,
            rope_neox=ROPE_NEOX[shape.architecture],
            rope_frequency_scale=numbers.rope_frequency_scale,
        )
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


def _present(model: GGUFModel, numbers: DecoderParams) -> Iterator[TensorSpec]:
    """The tensors to load, with their sizes checked. Raises at the first one missing, however many are claimed."""
    yield from _checked(model, outer_tensors(model, numbers.rope_dims))
    for layer in range(model.shape.n_layers):
        yield from _checked(model, layer_tensors(model, layer, numbers.n_ff))


def _checked(model: GGUFModel, wanted: Iterator[TensorSpec]) -> Iterator[TensorSpec]:
    for item in wanted:
        info = model.tensors.get(item.name)
        if info is None:
            if item.role in _OPTIONAL:
                continue
            raise ModelError(f"{model.path}: the tensor {item.name} is missing; {_ADVICE}")
        should = (item.cols,) if item.rows == 1 else (item.cols, item.rows)
        if (*info.shape, 1, 1, 1, 1)[:4] != (*should, 1, 1, 1)[:4]:
            has, asked = " x ".join(map(str, info.shape)), " x ".join(map(str, should))
            raise ModelError(f"{model.path}: the tensor {item.name} is {has}, but should be {asked}; {_ADVICE}")
        yield item


def _load_weights(engine: Engine, model: GGUFModel, wanted: list[TensorSpec], progress: Progress) -> None:
    total = sum(model.tensors[item.name].size for item in wanted)
    done = 0
    with TensorFile(model) as file:
        for item in sorted(wanted, key=lambda item: model.tensors[item.name].offset):
            if item.role == "rope_freqs" and not (file.read(item.name).view(np.float32) > 0).all():
                raise ModelError(f"{model.path}: the tensor {item.name} has factors that are not positive; {_ADVICE}")
            for size in _load_tensor(engine, model, item, file):
                done += size
                progress(done, total)


def _load_tensor(engine: Engine, model: GGUFModel, item: TensorSpec, file: TensorFile) -> Iterator[int]:
    """Read and pack a tensor piece by piece, so that there is never a second copy of a large one; yields the sizes."""
    info = model.tensors[item.name]
    row_bytes = info.size // item.rows
    rows = max(1, _PIECE_BYTES // (row_bytes * _TILE_ROWS)) * _TILE_ROWS
    for first in range(0, item.rows, rows):
        size = min(rows, item.rows - first) * row_bytes
        data = file.read(item.name, first * row_bytes, size)
        try:
            engine.load(item.layer, item.role, info.type, item.rows, item.cols, data, first)
        except ValueError as error:
            raise ModelError(f"{model.path}: the tensor {item.name} cannot be used: {error}; {_ADVICE}") from error
        yield size

"""From a GGUF file to the engine: what it cannot run, whether the file holds what it says, and the weights.

Everything is checked against the header before the engine is built, so that a file with absurd numbers is refused
before memory is taken for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from cllm._native import Engine
from cllm.backends.native.header import (
    ROPE_NEOX,
    Numbers,
    Wanted,
    layer_tensors,
    number,
    outer_tensors,
    read_numbers,
    rope_factor,
    shown,
)
from cllm.errors import ConfigError, ModelError
from cllm.models.gguf import GGUFModel
from cllm.models.tensor_file import TensorFile

_TYPES = frozenset({
    GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16, GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q5_1, GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K, GGMLQuantizationType.Q6_K,
})  # fmt: skip
_MAX_HEAD_DIM = 512
_ADVICE = "fetch it again or give another .gguf file"
_OPTIONAL = frozenset({"output", "rope_freqs", "attn_q.bias", "attn_k.bias", "attn_v.bias"})
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,8})\.(.+)")

# Keys by which a model asks for something the engine does not do, and the values that ask for nothing.
_FOREIGN_KEYS: dict[str, tuple[object, ...]] = {
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.causal": (True,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "rope.dimension_sections": (),
    "rope.scaling.attn_factor": (1.0,),
    "use_parallel_residual": (False,),
}


def unsupported(model: GGUFModel) -> str | None:
    """Why the native engine cannot run this model, as one clause; None if it can, unless the file is damaged."""
    if model.shape.architecture not in ROPE_NEOX:
        return f"its architecture is {model.shape.architecture}, not one of {', '.join(ROPE_NEOX)}"
    for check in (_foreign_experts, _foreign_keys, _foreign_rope, _foreign_heads, _foreign_tensors):
        reason = check(model)
        if reason is not None:
            return reason
    return None


def load_engine(model: GGUFModel, *, threads: int, instruction_set: str = "auto") -> Engine:
    """An engine with the model's weights, packed. Every problem is a `ModelError` that names the file."""
    reason = unsupported(model)
    if reason is not None:
        raise ModelError(f"{model.path}: the native engine cannot run it: {reason}")
    numbers = read_numbers(model)
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
        _load_weights(engine, model, wanted)
        engine.seal()
    except ValueError as error:
        raise ModelError(f"{model.path}: the native engine refuses it: {error}") from error
    except MemoryError as error:
        raise ModelError(f"{model.path}: there is not enough memory for its weights; give a smaller model") from error
    except RuntimeError as error:  # no more threads
        raise ConfigError(f"{error}; lower backend.threads, or raise the limit of processes or memory") from error
    return engine


# --- what the engine does not do ---


def _foreign_experts(model: GGUFModel) -> str | None:
    if number(model, "expert_count", 0) > 1 or any("_exps." in name for name in model.tensors):
        return "it is a mixture of experts"
    return None


def _foreign_keys(model: GGUFModel) -> str | None:
    for suffix, harmless in _FOREIGN_KEYS.items():
        value = model.get(f"{model.shape.architecture}.{suffix}", cast(Any, None))
        if value is not None and value not in harmless:
            return f"its {suffix} is {shown(value)}, which is not supported"
    window = number(model, "attention.sliding_window", 0)
    if 0 < window < model.shape.context_length:
        return f"its attention has a sliding window of {window:g} tokens"
    return None


def _foreign_rope(model: GGUFModel) -> str | None:
    kind = model.get(f"{model.shape.architecture}.rope.scaling.type", "linear")
    if kind not in ("none", "linear") and not (kind == "yarn" and rope_factor(model) == 1.0):
        return f"its RoPE scaling is {shown(kind)}, not none or linear"
    dims = number(model, "rope.dimension_count", model.shape.head_dim_k)
    if not 0 < dims <= model.shape.head_dim_k or dims % 2:
        return f"its RoPE turns {dims:g} dimensions of heads of {model.shape.head_dim_k}"
    return None


def _foreign_heads(model: GGUFModel) -> str | None:
    shape = model.shape
    if shape.head_dim_k != shape.head_dim_v:
        return f"its keys have {shape.head_dim_k} dimensions and its values {shape.head_dim_v}"
    if shape.head_dim_k % 8 or shape.head_dim_k > _MAX_HEAD_DIM:
        return f"its heads have {shape.head_dim_k} dimensions, no multiple of 8 up to {_MAX_HEAD_DIM}"
    if shape.n_heads % shape.n_kv_heads:
        return f"its {shape.n_heads} heads do not divide among {shape.n_kv_heads} kv heads"
    return None


def _foreign_tensors(model: GGUFModel) -> str | None:
    known = {item.name for item in outer_tensors(model, 1)}
    in_layers = {item.name for item in layer_tensors(model, 0, 1)}
    for name, info in model.tensors.items():
        match = _LAYER_TENSOR.fullmatch(name)
        in_layer = match is not None and int(match[1]) < model.shape.n_layers and f"blk.0.{match[2]}" in in_layers
        if not in_layer and name not in known:
            return f"it has the tensor {shown(name)}, whose use is unknown for {model.shape.architecture}"
        if info.type not in _TYPES or (name == "rope_freqs.weight" and info.type != GGMLQuantizationType.F32):
            return f"its tensor {name} is of type {GGMLQuantizationType(info.type).name}"
    return None


# --- the weights ---


def _present(model: GGUFModel, numbers: Numbers) -> Iterator[Wanted]:
    """The tensors to load, each of the right size. The first that is missing ends this, however many are claimed."""
    yield from _checked(model, outer_tensors(model, numbers.rope_dims))
    for layer in range(model.shape.n_layers):
        yield from _checked(model, layer_tensors(model, layer, numbers.n_ff))


def _checked(model: GGUFModel, wanted: Iterator[Wanted]) -> Iterator[Wanted]:
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


def _load_weights(engine: Engine, model: GGUFModel, wanted: list[Wanted]) -> None:
    with TensorFile(model) as file:
        for item in sorted(wanted, key=lambda item: model.tensors[item.name].offset):
            _load_tensor(engine, model, item, file.read(item.name))


def _load_tensor(engine: Engine, model: GGUFModel, item: Wanted, data: NDArray[np.uint8]) -> None:
    if item.role == "rope_freqs" and not (data.view(np.float32) > 0).all():
        raise ModelError(f"{model.path}: the tensor {item.name} has factors that are not positive; {_ADVICE}")
    try:
        engine.load(item.layer, item.role, model.tensors[item.name].type, item.rows, item.cols, data)
    except ValueError as error:
        raise ModelError(f"{model.path}: the tensor {item.name} cannot be used: {error}; {_ADVICE}") from error

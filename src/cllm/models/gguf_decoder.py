"""What the native and torch engines need from a GGUF file: everything about the model in numbers.

They run plain decoders: Llama and relatives. `unsupported_reason` names whatever else a file asks for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container
from dataclasses import replace
from typing import Any, cast

import numpy as np
from gguf import GGMLQuantizationType

from cllm.errors import ModelError
from cllm.models.gguf import DAMAGED_ADVICE, GGUFModel, TensorFile
from cllm.models.gguf_header import short
from cllm.models.spec import FeedForwardSpec, LayerSpec, ModelSpec, Rotation
from cllm.models.tensors import layer_tensors, outer_tensors

# Whether RoPE pairs dimension i of a head with i + half of them (otherwise 2i with 2i + 1).
ROPE_NEOX = {"llama": False, "qwen2": True, "qwen3": True}
ROPE_FREQS = "rope_freqs.weight"
_QKV_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")

_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,8})\.(.+)")

# Keys of features that are not supported, and the values that do not use them.
_UNSUPPORTED_KEYS: dict[str, tuple[object, ...]] = {
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


def unsupported_reason(model: GGUFModel, types: Container[int]) -> str | None:
    """Why the model is not a plain decoder, as one clause; None if it is. `types`: the supported tensor types."""
    if model.spec.architecture not in ROPE_NEOX:
        return f"its architecture is {model.spec.architecture}, not one of {', '.join(ROPE_NEOX)}"
    if model.ranks:
        return "it ranks documents instead of generating text (pooling_type 4)"
    if not model.is_causal:
        return "its attention is not causal"
    for check in (_unsupported_experts, _unsupported_keys, _unsupported_rope, _unsupported_heads):
        reason = check(model)
        if reason is not None:
            return reason
    return _unsupported_tensors(model, types)


def decoder_spec(model: GGUFModel) -> ModelSpec:
    """All of a model for which there is no `unsupported_reason`."""
    (sizes, *_), architecture = model.spec.layers, model.spec.architecture
    feed_forward = FeedForwardSpec(model.size("feed_forward_length"))
    eps = _positive(model, "attention.layer_norm_rms_epsilon", None)
    attention = replace(
        sizes.attention,
        rotation=_read_rotation(model),
        qkv_bias=any(name.endswith(_QKV_BIASES) for name in model.tensors),
        qk_norm="head" if architecture == "qwen3" else "",
    )
    return replace(model.spec, layers=(LayerSpec(attention, feed_forward),) * model.spec.n_layers, rms_eps=eps)


def rope_dims(model: GGUFModel) -> int:
    return int(_number(model, "rope.dimension_count", model.spec.layers[0].attention.head_dim_k))


def _read_rotation(model: GGUFModel) -> Rotation:
    architecture, dims = model.spec.architecture, rope_dims(model)
    scaled = model.get(f"{architecture}.rope.scaling.type", "linear") == "linear"
    return Rotation(
        base=_positive(model, "rope.freq_base", 10000.0),
        dims=dims,
        neox=ROPE_NEOX[architecture],
        scale=_rope_factor(model) if scaled else 1.0,
        divisors=_read_divisors(model, dims // 2) if ROPE_FREQS in model.tensors else None,
    )


def _read_divisors(model: GGUFModel, pairs: int) -> tuple[float, ...]:
    check_size(model, ROPE_FREQS, pairs)
    with TensorFile(model) as file:
        values = file.read(ROPE_FREQS).view(np.float32).tolist()
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ModelError(f"{model.path}: the tensor {ROPE_FREQS} has factors that are not positive; {DAMAGED_ADVICE}")
    return tuple(values)


def check_size(model: GGUFModel, name: str, *asked: int) -> None:
    has = model.tensors[name].shape
    if (*has, 1, 1, 1, 1)[:4] != (*asked, 1, 1, 1)[:4]:
        found, wanted = (" x ".join(map(str, shape)) for shape in (has, asked))
        raise ModelError(f"{model.path}: the tensor {name} is {found}, but should be {wanted}; {DAMAGED_ADVICE}")


def _rope_factor(model: GGUFModel) -> float:
    """The factor by which positions are scaled; 0 means none."""
    for suffix in ("rope.scaling.factor", "rope.scale_linear"):
        if f"{model.spec.architecture}.{suffix}" in model.metadata:
            return _positive(model, suffix, 1.0) if _number(model, suffix, 1.0) else 1.0
    return 1.0


def _number(model: GGUFModel, suffix: str, default: float) -> float:
    return model.get(f"{model.spec.architecture}.{suffix}", float(default))


def _positive(model: GGUFModel, suffix: str, default: float | None) -> float:
    key = f"{model.spec.architecture}.{suffix}"
    if default is None and key not in model.metadata:
        raise ModelError(f"{model.path}: the metadata key {key} is missing; use a complete .gguf file")
    value = _number(model, suffix, default or 0.0)
    if not (math.isfinite(value) and value > 0):
        raise ModelError(
            f"{model.path}: the metadata key {key} is {value}, not a positive number; use another .gguf file"
        )
    return value


def _shown(value: object) -> str:
    """A value from a file on one line, without quotes if it needs none."""
    return value if isinstance(value, str) and value.isprintable() and len(value) <= 60 else short(value)


def _unsupported_experts(model: GGUFModel) -> str | None:
    if _number(model, "expert_count", 0) > 1 or any("_exps." in name for name in model.tensors):
        return "it is a mixture of experts"
    return None


def _unsupported_keys(model: GGUFModel) -> str | None:
    for suffix, harmless in _UNSUPPORTED_KEYS.items():
        value = model.get(f"{model.spec.architecture}.{suffix}", cast(Any, None))
        if value is not None and value not in harmless:
            return f"its {suffix} is {_shown(value)}, which is not supported"
    window = _number(model, "attention.sliding_window", 0)
    if 0 < window < model.spec.context_length:
        return f"its attention has a sliding window of {window:g} tokens"
    return None


def _unsupported_rope(model: GGUFModel) -> str | None:
    kind = model.get(f"{model.spec.architecture}.rope.scaling.type", "linear")
    if kind not in ("none", "linear") and not (kind == "yarn" and _rope_factor(model) == 1.0):
        return f"its RoPE scaling is {_shown(kind)}, not none or linear"
    head_dim = model.spec.layers[0].attention.head_dim_k
    dims = _number(model, "rope.dimension_count", head_dim)
    if not 0 < dims <= head_dim or dims % 2:
        return f"its RoPE rotates {dims:g} of {head_dim} dimensions of a head"
    return None


def _unsupported_heads(model: GGUFModel) -> str | None:
    shape = model.spec.layers[0].attention
    if shape.head_dim_k != shape.head_dim_v:
        return f"its keys have {shape.head_dim_k} dimensions and its values {shape.head_dim_v}"
    if shape.n_heads % shape.n_kv_heads:
        return f"its {shape.n_heads} heads cannot be divided among {shape.n_kv_heads} KV heads"
    return None


def _unsupported_tensors(model: GGUFModel, types: Container[int]) -> str | None:
    architecture, spec = model.spec.architecture, replace(model.spec, tied=False)
    attention = replace(spec.layers[0].attention, qkv_bias=True, qk_norm="head" if architecture == "qwen3" else "")
    known = {item.name for item in outer_tensors(spec)} | ({ROPE_FREQS} if architecture == "llama" else set())
    in_layers = {item.name for item in layer_tensors(spec, LayerSpec(attention), 0)}
    for name, info in model.tensors.items():
        match = _LAYER_TENSOR.fullmatch(name)
        in_layer = match is not None and int(match[1]) < spec.n_layers and f"blk.0.{match[2]}" in in_layers
        if not in_layer and name not in known:
            return f"it has the tensor {_shown(name)}, which is unknown for {architecture}"
        if info.type not in types or (name == ROPE_FREQS and info.type != GGMLQuantizationType.F32):
            return f"its tensor {name} is of type {GGMLQuantizationType(info.type).name}"
    return None

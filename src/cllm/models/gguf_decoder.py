"""What the native and torch engines need from a GGUF file: everything about the model in numbers, and its tensors.

`architectures` says what they know. `unsupported_reason` names whatever else a file asks for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator
from dataclasses import replace
from typing import Any

from gguf import GGMLQuantizationType

from cllm.errors import ModelError
from cllm.models.architectures import ARCHITECTURES, Architecture
from cllm.models.features import features_of
from cllm.models.gguf import DAMAGED_ADVICE, GGUFModel
from cllm.models.gguf_header import short
from cllm.models.gguf_rotation import (
    FREQUENCIES,
    LONG,
    SCALINGS,
    SHORT,
    check_size,
    read_rotation,
    read_sliding_rotation,
    rope_dims,
    scaling,
)
from cllm.models.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, Rotation, Temperature
from cllm.models.tensors import TensorSpec, all_tensors, layer_tensors, outer_tensors

_FACTORS = (FREQUENCIES, LONG, SHORT)
_VECTORS_IN_ROWS = ("ssm_a", "ssm_d", "ssm_norm")
"""Files have them as matrices, the norm with a row for each group."""
_OPTIONAL = ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias")
_ATTENTION = AttentionSpec(1, 1, 1, 1, qkv_bias=True, output_bias=True)
"""Has all tensors that it may have."""
_QKV = ("attn_q", "attn_k", "attn_v")
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,8})\.(.+)")

# Keys of features that are not supported, or only in architectures that list them, and the values that do not use them.
_UNSUPPORTED_KEYS: dict[str, tuple[object, ...]] = {
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.causal": (True,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "rope.dimension_sections": (),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "use_parallel_residual": (False,),
}


def unsupported_reason(model: GGUFModel, types: Container[int], features: Container[str] = ()) -> str | None:
    """Why an engine cannot run the model, as one clause; None if it can, unless the file is damaged. It supports
    tensors of these `types`, and these of `cllm.models.features`."""
    architecture = ARCHITECTURES.get(model.spec.architecture)
    if architecture is None:
        return f"its architecture is {model.spec.architecture}, not one of {', '.join(ARCHITECTURES)}"
    if model.ranks:
        return "it ranks documents instead of generating text (pooling_type 4)"
    if not model.is_causal:
        return "its attention is not causal"
    for check in (_unsupported_experts, _unsupported_layers, _unsupported_keys, _unsupported_rope, _unsupported_heads):
        reason = check(model, architecture)
        if reason is not None:
            return reason
    return _unsupported_tensors(model, architecture, types) or _unsupported_features(model, features)


def decoder_spec(model: GGUFModel, context: int | None = None) -> ModelSpec:
    """All of a model for which there is no `unsupported_reason`, for texts of up to `context` tokens (by default as
    many as it was trained for): LongRoPE turns keys in another way where they may be long."""
    architecture, keys = ARCHITECTURES[model.spec.architecture], model.keys
    full = None
    if model.spec.attentions:
        full = read_rotation(model, architecture, context or model.spec.context_length)
    rms_eps = _number(model, architecture, "attention.layer_norm_epsilon") or None
    logit_scale = _number(model, architecture, "logit_scale")
    return replace(
        model.spec,
        layers=_read_layers(model, architecture, full),
        rms_eps=keys.positive("attention.layer_norm_rms_epsilon", rms_eps),
        embedding_scale=(
            math.sqrt(model.spec.n_embd)
            if architecture.scaled_embedding
            else _number(model, architecture, "embedding_scale") or 1.0
        ),
        residual_scale=_number(model, architecture, "residual_scale") or 1.0,
        logit_scale=1.0 / logit_scale if logit_scale else 1.0,
        logit_softcap=_number(model, architecture, "final_logit_softcapping"),
        layer_input_size=keys.count("embedding_length_per_layer_input", 0),
    )


def stored_tensors(model: GGUFModel, spec: ModelSpec) -> Iterator[TensorSpec]:
    """The tensors to load, as they are in the file, with their sizes checked. Raises at the first one missing, however
    many are claimed."""
    architecture = ARCHITECTURES[spec.architecture]
    for item in all_tensors(spec):
        found, whole = _find(model, spec, item._replace(name=architecture.name_in_file(item)))
        if found.name in model.tensors:
            if item.role not in _VECTORS_IN_ROWS or math.prod(model.tensors[found.name].shape) != whole:
                check_size(model, found.name, *reversed((whole, *item.shape[1:])))
            yield found
        elif not item.role.endswith(_OPTIONAL):
            raise ModelError(f"{model.path}: the tensor {found.name} is missing; {DAMAGED_ADVICE}")


def _find(model: GGUFModel, spec: ModelSpec, item: TensorSpec) -> tuple[TensorSpec, int]:
    """Where a tensor lies, and how many rows are there (of a vector: values)."""
    if item.layer < 0:
        return item, item.shape[0]
    layer, prefix = spec.layers[item.layer], f"blk.{item.layer}."
    part, _, kind = item.name.removeprefix(prefix).partition(".")
    fused = f"{prefix}attn_qkv.{kind}"
    if part in _QKV and item.name not in model.tensors and fused in model.tensors:
        attention = layer.attends
        first = {"attn_q": 0, "attn_k": attention.q_rows, "attn_v": attention.q_rows + attention.k_size}[part]
        return item._replace(name=fused, first=first), attention.qkv_size
    up = model.tensors.get(f"{prefix}ffn_up.weight")
    gated = part in ("ffn_gate", "ffn_up") and layer.feeds.gated
    if gated and up is not None and up.shape[1:] == (2 * item.rows,):
        first = item.rows if part == "ffn_up" else 0
        return item._replace(name=f"{prefix}ffn_up.weight", first=first), 2 * item.rows
    return item, item.shape[0]


def _read_layers(model: GGUFModel, architecture: Architecture, full: Rotation | None) -> tuple[LayerSpec, ...]:
    sizes, window = model.spec.layers, _read_window(model, architecture)
    recurrence = architecture.recurrence and architecture.recurrence(model)
    if recurrence and len(sizes) > len(model.tensors):
        raise ModelError(
            f"{model.path}: has {len(model.tensors)} tensors, too few for {len(sizes)} layers; {DAMAGED_ADVICE}"
        )
    sliding = [False] * len(sizes)
    if window and architecture.windows is not None:
        sliding = model.keys.sliding(len(sizes), architecture.windows.period)
    common = _common_attention(model, architecture, full)
    kinds: dict[LayerSpec, LayerSpec] = {}
    layers = []
    for index, n_ff in enumerate(_read_widths(model, architecture)):
        attention, slides = sizes[index].attention, sliding[index]
        if attention is not None:
            attention = replace(attention, **common)
        if attention is not None and slides:
            assert architecture.windows is not None and full is not None
            turned = read_sliding_rotation(model.keys, full, architecture.windows.base, attention.head_dim_k)
            attention = replace(attention, rotation=turned, window=window if window < model.spec.context_length else 0)
        layer = LayerSpec(
            attention,
            FeedForwardSpec(n_ff, architecture.activation, architecture.activation != "relu2") if n_ff else None,
            architecture.norms,
            recurrence=recurrence if sizes[index].recurrence is not None else None,
        )
        if architecture.layer is not None:
            layer = architecture.layer(model, index, slides, layer)
        layers.append(kinds.setdefault(layer, layer))
    return tuple(layers)


def _read_widths(model: GGUFModel, architecture: Architecture) -> list[int]:
    """Values between the matrices of each layer's feed-forward; 0: the layer has none."""
    keys, suffix, n_layers = model.keys, "feed_forward_length", model.spec.n_layers
    if architecture.recurrence is None:
        return keys.sizes(suffix, n_layers)
    return keys.counts(suffix, n_layers)


def _common_attention(model: GGUFModel, architecture: Architecture, full: Rotation | None) -> dict[str, Any]:
    """Fields of `AttentionSpec`."""
    beta = _number(model, architecture, "attention.temperature_scale")
    length = model.keys.size("rope.scaling.original_context_length", model.spec.context_length)
    biases = tuple(f"{part}.bias" for part in (*_QKV, "attn_qkv"))
    return {
        "rotation": full,
        "qkv_bias": any(name.endswith(biases) for name in model.tensors),
        "output_bias": any(name.endswith("attn_output.bias") for name in model.tensors),
        "qk_norm": architecture.qk_norm,
        "scale": _number(model, architecture, "attention.scale") or None,
        "softcap": _number(model, architecture, "attn_logit_softcapping"),
        "temperature": Temperature(beta, length) if beta else None,
    }


def _read_window(model: GGUFModel, architecture: Architecture) -> int:
    default = 0 if architecture.windows is None else architecture.windows.default
    return model.keys.count("attention.sliding_window", default)


def _number(model: GGUFModel, architecture: Architecture, suffix: str) -> float:
    """0 where the key means nothing."""
    return model.keys.number(suffix, architecture.keys[suffix]) if suffix in architecture.keys else 0.0


def _shown(value: object) -> str:
    """A value from a file on one line, without quotes if it needs none."""
    return value if isinstance(value, str) and value.isprintable() and len(value) <= 60 else short(value)


def _unsupported_experts(model: GGUFModel, architecture: Architecture) -> str | None:
    if model.keys.number("expert_count", 0) > 1 or any("_exps." in name for name in model.tensors):
        return "it is a mixture of experts"
    return None


def _unsupported_layers(model: GGUFModel, architecture: Architecture) -> str | None:
    if architecture.recurrence is None and (model.spec.recurrent or len(model.spec.attentions) < model.spec.n_layers):
        return f"not every layer of it is attention, as it is in {model.spec.architecture}"
    return None


def _unsupported_keys(model: GGUFModel, architecture: Architecture) -> str | None:
    for suffix, harmless in _UNSUPPORTED_KEYS.items():
        value = model.keys.any(suffix)
        if value is not None and suffix not in architecture.keys and value not in harmless:
            return f"its {suffix} is {_shown(value)}, which is not supported"
    window = model.keys.number("attention.sliding_window", 0)
    if architecture.windows is None and 0 < window < model.spec.context_length:
        return f"its attention has a sliding window of {window:g} tokens"
    return None


def _unsupported_rope(model: GGUFModel, architecture: Architecture) -> str | None:
    kind = scaling(model.keys)
    if kind not in SCALINGS:
        return f"its RoPE scaling is {_shown(kind)}, not one of {', '.join(SCALINGS)}"
    heads = {attention.head_dim_k for attention in model.spec.attentions}
    if not heads:
        return None
    dims, sliding = rope_dims(model), model.keys.count("rope.dimension_count_swa", min(heads))
    for turned, head_dim in ((dims, max(heads)), (sliding, min(heads))):
        if not 0 < turned <= head_dim or turned % 2:
            return f"its RoPE rotates {turned} of {head_dim} dimensions of a head"
    return None


def _unsupported_heads(model: GGUFModel, architecture: Architecture) -> str | None:
    for shape in set(model.spec.attentions):
        if shape.head_dim_k != shape.head_dim_v:
            return f"its keys have {shape.head_dim_k} dimensions and its values {shape.head_dim_v}"
        if shape.n_heads % shape.n_kv_heads:
            return f"its {shape.n_heads} heads cannot be divided among {shape.n_kv_heads} KV heads"
    return None


def _unsupported_tensors(model: GGUFModel, architecture: Architecture, types: Container[int]) -> str | None:
    known = _known_tensors(model, architecture)
    for name, info in model.tensors.items():
        match = _LAYER_TENSOR.fullmatch(name)
        if model.leaves_aside(name):
            continue
        in_layer = match is not None and int(match[1]) < model.spec.n_layers and f"blk.0.{match[2]}" in known
        if not in_layer and (match is not None or name not in known):
            return f"it has the tensor {_shown(name)}, which is unknown for {model.spec.architecture}"
        if info.type not in types or (name in _FACTORS and info.type != GGMLQuantizationType.F32):
            return f"its tensor {name} is of type {GGMLQuantizationType(info.type).name}"
    return None


def _unsupported_features(model: GGUFModel, features: Container[str]) -> str | None:
    try:
        missing = [name for name in features_of(decoder_spec(model)) if name not in features]
    except ModelError:
        return None  # damaged, as loading it will say
    return f"it needs what is not supported: {', '.join(missing)}" if missing else None


def _known_tensors(model: GGUFModel, architecture: Architecture) -> set[str]:
    """Names that tensors may have; those of layers as if they were of the first one."""
    inputs = model.keys.count("embedding_length_per_layer_input", 0)
    spec = replace(model.spec, tied=False, layer_input_size=inputs)
    attention = replace(_ATTENTION, qk_norm=architecture.qk_norm) if spec.attentions else None
    layer = LayerSpec(attention, norms=architecture.norms, output_scale=spec.architecture == "gemma4")
    items = [*outer_tensors(spec), *layer_tensors(spec, layer, 0)]
    if architecture.recurrence is not None:
        items += layer_tensors(spec, LayerSpec(None, recurrence=architecture.recurrence(model)), 0)
    names = set(map(architecture.name_in_file, items))
    if "blk.0.attn_q.weight" not in model.tensors:
        names |= {"blk.0.attn_qkv.weight", "blk.0.attn_qkv.bias"}
    return names | set(_FACTORS if architecture.divisors else ())

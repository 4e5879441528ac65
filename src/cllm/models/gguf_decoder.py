"""What the header of a GGUF file must hold for our own engines: the model's numbers, and its tensors with their sizes.

They run plain decoders: Llama and its kin. Whatever else a file asks for is named, so that it can be refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from gguf import GGMLQuantizationType

from cllm.errors import ModelError
from cllm.models.gguf import GGUFModel
from cllm.models.gguf_header import short

# Whether an architecture pairs the dimension i of a head with i + half of them (or, if not, 2i with 2i + 1).
ROPE_NEOX = {"llama": False, "qwen2": True, "qwen3": True}


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


class Wanted(NamedTuple):
    """A tensor as the engine takes it: `role` is its name without layer and ".weight", a vector has one row."""

    name: str
    layer: int
    role: str
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class Numbers:
    """What the metadata says beyond `ModelShape`."""

    n_ff: int
    rms_eps: float
    rope_base: float
    rope_dims: int
    rope_frequency_scale: float


def foreign(model: GGUFModel, types: Container[int]) -> str | None:
    """What the model asks for that a plain decoder does not do, as one clause. Tensors may be of these `types`."""
    if model.shape.architecture not in ROPE_NEOX:
        return f"its architecture is {model.shape.architecture}, not one of {', '.join(ROPE_NEOX)}"
    if model.ranks:
        return "it ranks documents instead of generating text (pooling_type 4)"
    if not model.is_causal:
        return "its tokens see those behind them"
    for check in (_foreign_experts, _foreign_keys, _foreign_rope, _foreign_heads):
        reason = check(model)
        if reason is not None:
            return reason
    return _foreign_tensors(model, types)


def read_numbers(model: GGUFModel) -> Numbers:
    architecture, factor = model.shape.architecture, rope_factor(model)
    scaled = model.get(f"{architecture}.rope.scaling.type", "linear") == "linear"
    return Numbers(
        n_ff=_feed_forward_length(model),
        rms_eps=_positive(model, "attention.layer_norm_rms_epsilon", None),
        rope_base=_positive(model, "rope.freq_base", 10000.0),
        rope_dims=int(number(model, "rope.dimension_count", model.shape.head_dim_k)),
        rope_frequency_scale=1.0 / factor if scaled else 1.0,
    )


def _feed_forward_length(model: GGUFModel) -> int:
    key = f"{model.shape.architecture}.feed_forward_length"
    value = model.get(key, cast(Any, None))
    if isinstance(value, list) and value and all(entry == value[0] for entry in value):
        value = value[0]  # one entry per layer, all the same
    if type(value) is not int or not 0 < value < 2**31:
        raise ModelError(
            f"{model.path}: the metadata key {key} is {shown(value)}, not a usable size; give another .gguf file"
        )
    return value


def rope_factor(model: GGUFModel) -> float:
    """How much longer positions are stretched; a factor of 0 stands for none."""
    for suffix in ("rope.scaling.factor", "rope.scale_linear"):
        if f"{model.shape.architecture}.{suffix}" in model.metadata:
            return _positive(model, suffix, 1.0) if number(model, suffix, 1.0) else 1.0
    return 1.0


def number(model: GGUFModel, suffix: str, default: float) -> float:
    return model.get(f"{model.shape.architecture}.{suffix}", float(default))


def _positive(model: GGUFModel, suffix: str, default: float | None) -> float:
    key = f"{model.shape.architecture}.{suffix}"
    if default is None and key not in model.metadata:
        raise ModelError(f"{model.path}: the metadata key {key} is missing; give a complete .gguf model")
    value = number(model, suffix, default or 0.0)
    if not (math.isfinite(value) and value > 0):
        raise ModelError(
            f"{model.path}: the metadata key {key} is {value}, not a positive number; give another .gguf file"
        )
    return value


def outer_tensors(model: GGUFModel, rope_dims: int) -> Iterator[Wanted]:
    shape = model.shape
    yield Wanted("token_embd.weight", -1, "token_embd", shape.n_vocab, shape.n_embd)
    yield Wanted("output_norm.weight", -1, "output_norm", 1, shape.n_embd)
    yield Wanted("output.weight", -1, "output", shape.n_vocab, shape.n_embd)
    if shape.architecture == "llama":
        yield Wanted("rope_freqs.weight", -1, "rope_freqs", 1, rope_dims // 2)


def layer_tensors(model: GGUFModel, layer: int, n_ff: int) -> Iterator[Wanted]:
    shape = model.shape
    n_embd, head_dim = shape.n_embd, shape.head_dim_k
    q_size, kv_size = shape.n_heads * head_dim, shape.n_kv_heads * head_dim
    sizes = {
        "attn_norm.weight": (1, n_embd),
        "attn_q.weight": (q_size, n_embd),
        "attn_k.weight": (kv_size, n_embd),
        "attn_v.weight": (kv_size, n_embd),
        "attn_q.bias": (1, q_size),
        "attn_k.bias": (1, kv_size),
        "attn_v.bias": (1, kv_size),
        "attn_output.weight": (n_embd, q_size),
        "ffn_norm.weight": (1, n_embd),
        "ffn_gate.weight": (n_ff, n_embd),
        "ffn_up.weight": (n_ff, n_embd),
        "ffn_down.weight": (n_embd, n_ff),
    }
    if shape.architecture == "qwen3":
        sizes |= {"attn_q_norm.weight": (1, head_dim), "attn_k_norm.weight": (1, head_dim)}
    for name, (rows, cols) in sizes.items():
        yield Wanted(f"blk.{layer}.{name}", layer, name.removesuffix(".weight"), rows, cols)


def shown(value: object, limit: int = 60) -> str:
    """A value from a file, fit for one line; without quotes where it needs none."""
    return value if isinstance(value, str) and value.isprintable() and len(value) <= limit else short(value, limit)


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
    if shape.n_heads % shape.n_kv_heads:
        return f"its {shape.n_heads} heads do not divide among {shape.n_kv_heads} kv heads"
    return None


def _foreign_tensors(model: GGUFModel, types: Container[int]) -> str | None:
    known = {item.name for item in outer_tensors(model, 1)}
    in_layers = {item.name for item in layer_tensors(model, 0, 1)}
    for name, info in model.tensors.items():
        match = _LAYER_TENSOR.fullmatch(name)
        in_layer = match is not None and int(match[1]) < model.shape.n_layers and f"blk.0.{match[2]}" in in_layers
        if not in_layer and name not in known:
            return f"it has the tensor {shown(name)}, whose use is unknown for {model.shape.architecture}"
        if info.type not in types or (name == "rope_freqs.weight" and info.type != GGMLQuantizationType.F32):
            return f"its tensor {name} is of type {GGMLQuantizationType(info.type).name}"
    return None

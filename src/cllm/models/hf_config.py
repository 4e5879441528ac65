"""`config.json` of a Hugging Face model: the parameters of a plain decoder. Anything else is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from cllm.errors import ModelError
from cllm.models.gguf_header import short
from cllm.models.json_file import Fields
from cllm.models.spec import MOST_LAYERS, AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, Rotation

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
MOST_HEAD_DIM = 1 << 16
_DEFAULT_ROPE_BASE = 10000.0
_DEFAULT_RMS_EPS = 1e-6

# Keys of features that are not supported, and the values that do not use them.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
}


def read_config(fields: Fields) -> ModelSpec:
    """Its `tied` is false if the file does not say."""
    architecture = _architecture(fields)
    _check_quantised(fields)
    for key, harmless in _UNSUPPORTED.items():
        if key in fields and fields.values[key] not in harmless:
            raise fields.unsupported(key, "which is not supported")
    n_embd, n_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    head_dim = fields.size("head_dim", max(1, n_embd // n_heads))
    n_kv_heads = fields.size("num_key_value_heads", n_heads)
    if head_dim % 2:
        raise fields.unsupported("head_dim", "but RoPE needs an even number")
    if head_dim > MOST_HEAD_DIM:
        raise fields.unsupported("head_dim", f"but only up to {MOST_HEAD_DIM} is supported")
    if n_heads % n_kv_heads:
        raise fields.invalid("num_key_value_heads", f"a divisor of num_attention_heads, {n_heads}")
    n_layers, n_vocab = fields.size("num_hidden_layers"), fields.size("vocab_size")
    context_length = fields.size("max_position_embeddings")
    _check_window(fields, architecture, context_length)
    rotation = _read_rotation(fields, head_dim)
    has_bias = fields.flag("attention_bias", False)
    attention = AttentionSpec(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim_k=head_dim,
        head_dim_v=head_dim,
        rotation=rotation,
        qkv_bias=architecture == "qwen2" or has_bias,
        output_bias=architecture != "qwen2" and has_bias,
        qk_norm="head" if architecture == "qwen3" else "",
    )
    layer = LayerSpec(attention, FeedForwardSpec(fields.size("intermediate_size")))
    return ModelSpec(
        architecture=architecture,
        n_embd=n_embd,
        n_vocab=n_vocab,
        context_length=context_length,
        layers=(layer,) * min(n_layers, MOST_LAYERS),
        rms_eps=fields.number("rms_norm_eps", _DEFAULT_RMS_EPS),
        tied=fields.flag("tie_word_embeddings", False),
    )


def _architecture(fields: Fields) -> str:
    found = fields.values.get("architectures")
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], str) and found[0] in ARCHITECTURES:
        return ARCHITECTURES[found[0]]
    raise fields.unsupported("architectures", f"not one of {', '.join(ARCHITECTURES)}")


def _check_quantised(fields: Fields) -> None:
    quantised = fields.part("quantization_config")
    if quantised is None:
        return
    method = short(quantised.values.get("quant_method", "a quantised type"))
    raise ModelError(
        f"{fields.path}: its weights are quantised as {method} (quantization_config), which is not supported; use the "
        "model in bf16 (backend.torch.dtype=fp8 converts it), or a .gguf file"
    )


def _check_window(fields: Fields, architecture: str, context_length: int) -> None:
    """Some configurations have a sliding window but do not use it."""
    kinds = fields.values.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
            raise fields.unsupported("layer_types", "but only full_attention is supported")
        return
    if architecture.startswith("qwen"):
        if fields.flag("use_sliding_window", False):
            raise fields.unsupported("use_sliding_window", "which is not supported")
    elif "sliding_window" in fields and fields.size("sliding_window") < context_length:
        raise fields.unsupported("sliding_window", f"but only attention over all {context_length} tokens is supported")


def _rope_kind(rope: Fields) -> str:
    return rope.text("rope_type" if "rope_type" in rope else "type", "default")


def _read_rotation(fields: Fields, head_dim: int) -> Rotation:
    """Newer configurations have everything in `rope_parameters`."""
    plain = Rotation(fields.number("rope_theta", _DEFAULT_ROPE_BASE), head_dim, neox=True)
    named = [part for key in ("rope_parameters", "rope_scaling") if (part := fields.part(key)) and part.values]
    if not named:
        return plain
    rope = named[0]
    if any(_rope_kind(part) != _rope_kind(rope) for part in named):
        raise fields.unsupported("rope_scaling", "but rope_parameters has another type")
    per_layer = next((key for key, value in rope.values.items() if isinstance(value, dict)), None)
    if per_layer is not None:
        raise rope.unsupported(per_layer, "but only one type for all layers is supported")
    plain = replace(plain, base=rope.number("rope_theta", plain.base))
    key = "rope_type" if "rope_type" in rope else "type"
    kind = _rope_kind(rope)
    if "partial_rotary_factor" in rope and rope.values["partial_rotary_factor"] != 1:
        raise rope.unsupported("partial_rotary_factor", "but only 1 is supported")
    if kind == "default":
        return plain
    if kind == "linear":
        return replace(plain, scale=rope.number("factor"))
    if kind != "llama3":
        raise rope.unsupported(key, "but only default, linear and llama3 are supported")
    return replace(plain, divisors=_llama3_divisors(rope, plain))


def _llama3_divisors(rope: Fields, plain: Rotation) -> tuple[float, ...]:
    """Llama 3's way to a longer context than it was trained for at first: pairs that go round less than `low` times in
    that are slowed down by `factor`, those that do more than `high` times are not, and those between in part."""
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.invalid("low_freq_factor", f"less than high_freq_factor, {high:g}")
    trained, factor = rope.size("original_max_position_embeddings"), rope.number("factor")
    turns = plain.base ** -(np.arange(0, plain.dims, 2) / plain.dims)
    fast = np.clip((trained * turns / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
    return tuple((1.0 / (fast + (1.0 - fast) / factor)).tolist())

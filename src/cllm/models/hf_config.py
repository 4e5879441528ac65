"""`config.json` of a Hugging Face model: the parameters of a plain decoder. Anything else is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cllm.errors import ModelError
from cllm.models.gguf_header import short
from cllm.models.json_file import Fields
from cllm.models.shape import ModelShape

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_DEFAULT_ROPE_BASE = 10000.0
_DEFAULT_RMS_EPS = 1e-6

# Keys of features that are not supported, and the values that do not use them.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
}


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3's RoPE scaling for longer contexts."""

    factor: float
    low: float
    high: float
    trained: int


@dataclass(frozen=True, slots=True)
class HFParams:
    """Parameters of the configuration beyond `ModelShape`."""

    n_ff: int
    rms_eps: float
    rope_base: float
    rope_scale: float
    """Positions are divided by this."""
    llama3: Llama3Rope | None
    qkv_bias: bool
    output_bias: bool
    head_norm: bool
    tied: bool | None
    """Whether the output head is the embedding; None: if there is no separate head."""


def read_config(fields: Fields) -> tuple[ModelShape, HFParams]:
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
    if n_heads % n_kv_heads:
        raise fields.invalid("num_key_value_heads", f"a divisor of num_attention_heads, {n_heads}")
    shape = ModelShape(
        architecture=architecture,
        n_layers=fields.size("num_hidden_layers"),
        n_embd=n_embd,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim_k=head_dim,
        head_dim_v=head_dim,
        n_vocab=fields.size("vocab_size"),
        context_length=fields.size("max_position_embeddings"),
    )
    _check_window(fields, shape)
    base, scale, llama3 = _read_rope(fields)
    has_bias = fields.flag("attention_bias", False)
    return shape, HFParams(
        n_ff=fields.size("intermediate_size"),
        rms_eps=fields.number("rms_norm_eps", _DEFAULT_RMS_EPS),
        rope_base=base,
        rope_scale=scale,
        llama3=llama3,
        qkv_bias=architecture == "qwen2" or has_bias,
        output_bias=architecture != "qwen2" and has_bias,
        head_norm=architecture == "qwen3",
        tied=fields.flag("tie_word_embeddings", False) if "tie_word_embeddings" in fields else None,
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


def _check_window(fields: Fields, shape: ModelShape) -> None:
    """Some configurations have a sliding window but do not use it."""
    kinds = fields.values.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
            raise fields.unsupported("layer_types", "but only full_attention is supported")
        return
    if shape.architecture.startswith("qwen"):
        if fields.flag("use_sliding_window", False):
            raise fields.unsupported("use_sliding_window", "which is not supported")
    elif "sliding_window" in fields and fields.size("sliding_window") < shape.context_length:
        raise fields.unsupported(
            "sliding_window", f"but only attention over all {shape.context_length} tokens is supported"
        )


def _rope_kind(rope: Fields) -> str:
    return rope.text("rope_type" if "rope_type" in rope else "type", "default")


def _read_rope(fields: Fields) -> tuple[float, float, Llama3Rope | None]:
    """Base, linear scale and Llama 3 scaling. Newer configurations have everything in `rope_parameters`."""
    base = fields.number("rope_theta", _DEFAULT_ROPE_BASE)
    named = [part for key in ("rope_parameters", "rope_scaling") if (part := fields.part(key)) and part.values]
    if not named:
        return base, 1.0, None
    rope = named[0]
    if any(_rope_kind(part) != _rope_kind(rope) for part in named):
        raise fields.unsupported("rope_scaling", "but rope_parameters has another type")
    per_layer = next((key for key, value in rope.values.items() if isinstance(value, dict)), None)
    if per_layer is not None:
        raise rope.unsupported(per_layer, "but only one type for all layers is supported")
    base = rope.number("rope_theta", base)
    key = "rope_type" if "rope_type" in rope else "type"
    kind = _rope_kind(rope)
    if "partial_rotary_factor" in rope and rope.values["partial_rotary_factor"] != 1:
        raise rope.unsupported("partial_rotary_factor", "but only 1 is supported")
    if kind == "default":
        return base, 1.0, None
    if kind == "linear":
        return base, rope.number("factor"), None
    if kind != "llama3":
        raise rope.unsupported(key, "but only default, linear and llama3 are supported")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.invalid("low_freq_factor", f"less than high_freq_factor, {high:g}")
    trained = rope.size("original_max_position_embeddings")
    return base, 1.0, Llama3Rope(rope.number("factor"), low, high, trained)

"""`config.json` of a Hugging Face model: a decoder of a known architecture in numbers. Anything else is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cllm.errors import ModelError
from cllm.models.gguf_header import short
from cllm.models.hf_architectures import ARCHITECTURES, TEXT_CLASSES, TEXT_PARTS, HFArchitecture
from cllm.models.hf_recurrence import read_parts, read_recurrence
from cllm.models.hf_rotation import read_rotation, read_temperature
from cllm.models.json_file import Fields
from cllm.models.spec import MOST_LAYERS, Activation, AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec

MOST_HEAD_DIM = 1 << 16
_DEFAULT_RMS_EPS = 1e-6
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu"}
_WINDOW, _FULL = "sliding_attention", "full_attention"

# Keys of features that not every architecture has, and the values that do not use them.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "mlp_bias": (False,),
    "use_bias": (False,),
    "partial_rotary_factor": (1, 1.0),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "use_sliding_window": (False,),
    "use_bidirectional_attention": (False, "vision"),
    "enable_moe_block": (False,),
    "no_rope_layers": (),
    "num_local_experts": (0,),
    "lm_head_multiplier": (1, 1.0),
    "attn_output_gate": (True,),
    "mamba_hidden_act": ("silu", "swish"),
    "mamba_proj_bias": (False,),
    "projectors_bias": (False,),
    "conv_bias": (False,),
    "mamba_conv_bias": (True,),
    "use_conv_bias": (True,),
}


def text_part(fields: Fields) -> Fields | None:
    """The configuration of the text part, if this is a model of more than text."""
    if not _is_one_of(fields.values.get("architectures"), TEXT_PARTS):
        return None
    part = fields.part("text_config")
    if part is None or part.values.get("model_type") not in TEXT_CLASSES:
        raise fields.unsupported("text_config", f"not one of {', '.join(TEXT_CLASSES)}")
    return part


def find_architecture(fields: Fields) -> HFArchitecture:
    found: Any = fields.values.get("architectures")
    if _is_one_of(found, ARCHITECTURES):
        return ARCHITECTURES[found[0]]
    if found is None and (name := TEXT_CLASSES.get(str(fields.values.get("model_type")))):
        return ARCHITECTURES[name]
    raise fields.unsupported("architectures", f"not one of {', '.join([*ARCHITECTURES, *TEXT_PARTS])}")


def _is_one_of(found: object, known: Sequence[str] | Mapping[str, object]) -> bool:
    return isinstance(found, list) and len(found) == 1 and isinstance(found[0], str) and found[0] in known


def read_config(fields: Fields, architecture: HFArchitecture) -> ModelSpec:
    """Its `tied` is false if the file does not say."""
    _check_quantised(fields)
    for key, harmless in _UNSUPPORTED.items():
        if key in fields and key not in architecture.reads and fields.values[key] not in harmless:
            raise fields.unsupported(key, "which is not supported")
    n_embd = fields.size("hidden_size")
    layers = (_read_hybrid if architecture.recurrence else _read_layers)(fields, architecture)
    scale = math.sqrt(n_embd) if architecture.scaled_embedding else fields.number("embedding_multiplier", 1.0)
    spec = ModelSpec(
        architecture=architecture.name,
        n_embd=n_embd,
        n_vocab=fields.size("vocab_size"),
        context_length=fields.size("max_position_embeddings", architecture.defaults.get("max_position_embeddings")),
        layers=layers,
        rms_eps=fields.number(architecture.eps, 1e-5 if architecture.eps != "rms_norm_eps" else _DEFAULT_RMS_EPS),
        tied=fields.flag("tie_word_embeddings", False),
        embedding_scale=scale,
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=fields.number("lm_head_multiplier", 1.0) / fields.number("logits_scaling", 1.0),
        logit_softcap=fields.number("final_logit_softcapping") if "final_logit_softcapping" in fields else 0.0,
    )
    return _as_gemma4(fields, spec) if architecture.name == "gemma4" else spec


def _check_quantised(fields: Fields) -> None:
    quantised = fields.part("quantization_config")
    if quantised is None:
        return
    method = short(quantised.values.get("quant_method", "a quantised type"))
    raise ModelError(
        f"{fields.path}: its weights are quantised as {method} (quantization_config), which is not supported; use the "
        "model in bf16 (backend.torch.dtype=fp8 converts it), or a .gguf file"
    )


# -- layers ----------------------------------------------------------------------------------------------------------


def _read_hybrid(fields: Fields, architecture: HFArchitecture) -> tuple[LayerSpec, ...]:
    """Layers of a model some of which carry a state. Equal ones are one object."""
    parts = read_parts(fields, architecture)
    turns = architecture.unturned == "" or fields.values.get("position_embedding_type") == "rope"
    attention, recurrence, feed_forward = None, None, None
    if {"attention", "both"} & set(parts):
        attention = _read_attention(fields, architecture, slides=False, turns=turns)
    if {"state", "both"} & set(parts):
        recurrence = read_recurrence(fields, architecture)
    if not architecture.single or "feed_forward" in parts:
        feed_forward = _read_feed_forward(fields, architecture)
    kinds = {
        part: LayerSpec(
            attention if part in ("attention", "both") else None,
            feed_forward if part == "feed_forward" or not architecture.single else None,
            recurrence=recurrence if part in ("state", "both") else None,
        )
        for part in dict.fromkeys(parts)
    }
    return tuple(kinds[part] for part in parts)


def _read_feed_forward(fields: Fields, architecture: HFArchitecture) -> FeedForwardSpec:
    if architecture.single:
        if fields.text("mlp_hidden_act", "relu2") != "relu2":
            raise fields.unsupported("mlp_hidden_act", "but only relu2 is supported")
        return FeedForwardSpec(fields.size("intermediate_size"), "relu2", gated=False)
    key = {"granitehybrid": "shared_intermediate_size"}.get(architecture.name, "intermediate_size")
    key = "block_ff_dim" if "block_ff_dim" in fields else key
    size = fields.size(key)
    if architecture.name == "lfm2" and fields.flag("block_auto_adjust_ff_dim", True):
        multiple = fields.size("block_multiple_of", 256)
        size = int(fields.number("block_ffn_dim_multiplier", 1.0) * (2 * size // 3))
        size = -(-size // multiple) * multiple
    return FeedForwardSpec(size, _read_activation(fields, architecture))


def _read_layers(fields: Fields, architecture: HFArchitecture) -> tuple[LayerSpec, ...]:
    """Equal ones are one object."""
    n_layers = min(fields.size("num_hidden_layers"), MOST_LAYERS)
    slides = _read_sliding(fields, architecture, n_layers)
    turns = _read_turning(fields, architecture, slides)
    feed_forward = FeedForwardSpec(fields.size("intermediate_size"), _read_activation(fields, architecture))
    kinds = {
        (slides_, turns_): LayerSpec(
            _read_attention(fields, architecture, slides=slides_, turns=turns_), feed_forward, architecture.norms
        )
        for slides_, turns_ in dict.fromkeys(zip(slides, turns, strict=True))
    }
    return tuple(kinds[kind] for kind in zip(slides, turns, strict=True))


def _read_activation(fields: Fields, architecture: HFArchitecture) -> Activation:
    key = "hidden_activation" if "hidden_activation" in fields else "hidden_act"
    name = fields.text(key, architecture.defaults.get("hidden_act", "silu"))
    if name not in _ACTIVATIONS:
        raise fields.unsupported(key, "which is not supported")
    return _ACTIVATIONS[name]


def _read_sliding(fields: Fields, architecture: HFArchitecture, n_layers: int) -> list[bool]:
    """Which layers have a window. Some configurations have one but do not use it."""
    switch, kinds = "use_sliding_window", fields.values.get("layer_types")
    switched = switch in architecture.reads
    if not switched and architecture.period is None:
        if kinds is not None and (not isinstance(kinds, list) or any(kind != _FULL for kind in kinds)):
            raise fields.unsupported("layer_types", f"but only {_FULL} is supported")
        if kinds is None and _read_window(fields):
            context = fields.size("max_position_embeddings")
            raise fields.unsupported("sliding_window", f"but only attention over all {context} tokens is supported")
        return [False] * n_layers
    if (switched and not fields.flag(switch, False)) or "sliding_window" not in fields:
        return [False] * n_layers
    if architecture.period == 0:
        return [True] * n_layers
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != n_layers or not set(map(str, kinds)) <= {_WINDOW, _FULL}:
            raise fields.unsupported("layer_types", f"not {n_layers} of {_WINDOW} and {_FULL}")
        return [kind == _WINDOW for kind in kinds]
    if architecture.period is None:
        raise fields.unsupported(switch, "which is not supported without layer_types")
    key = "sliding_window_pattern"
    period = fields.size(key, architecture.period) if key in architecture.reads else architecture.period
    return [(index + 1) % period != 0 for index in range(n_layers)]


def _read_window(fields: Fields) -> int:
    """0: none, or one that no text is longer than."""
    window = fields.size("sliding_window") if "sliding_window" in fields else 0
    return window if window < fields.size("max_position_embeddings") else 0


def _read_turning(fields: Fields, architecture: HFArchitecture, slides: list[bool]) -> list[bool]:
    """Which layers know about positions."""
    if architecture.unturned == "full" and "sliding_window" in fields:
        return slides
    if architecture.unturned != "listed":
        return [True] * len(slides)
    listed = fields.values.get("no_rope_layers")
    if listed is None:
        period = fields.size("no_rope_layer_interval", 4)
        return [(index + 1) % period != 0 for index in range(len(slides))]
    if not isinstance(listed, list) or len(listed) != len(slides) or any(each not in (0, 1) for each in listed):
        raise fields.invalid("no_rope_layers", f"a list of {len(slides)} times 0 or 1")
    return [bool(each) for each in listed]


def _read_attention(fields: Fields, architecture: HFArchitecture, *, slides: bool, turns: bool) -> AttentionSpec:
    n_heads, defaults = fields.size("num_attention_heads"), architecture.defaults
    head_dim = fields.size("head_dim", defaults.get("head_dim", max(1, fields.size("hidden_size") // n_heads)))
    n_kv_heads = fields.size("num_key_value_heads", min(n_heads, defaults.get("num_key_value_heads", n_heads)))
    _check_heads(fields, "head_dim", head_dim, "num_key_value_heads", n_kv_heads)
    return AttentionSpec(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim_k=head_dim,
        head_dim_v=head_dim,
        rotation=read_rotation(fields, architecture, head_dim, slides=slides) if turns else None,
        qkv_bias=_has_bias(fields, architecture, architecture.qkv_bias),
        output_bias=_has_bias(fields, architecture, architecture.output_bias),
        qk_norm=architecture.qk_norm,
        qk_norm_last=architecture.qk_norm_last,
        scale=_read_scale(fields, head_dim),
        window=_read_window(fields) if slides else 0,
        softcap=fields.number("attn_logit_softcapping") if "attn_logit_softcapping" in fields else 0.0,
        temperature=read_temperature(fields, architecture),
        gated=architecture.gated,
    )


def _check_heads(fields: Fields, dim_key: str, head_dim: int, kv_key: str, n_kv_heads: int) -> None:
    n_heads = fields.size("num_attention_heads")
    if head_dim % 2:
        raise fields.unsupported(dim_key, "but RoPE needs an even number")
    if head_dim > MOST_HEAD_DIM:
        raise fields.unsupported(dim_key, f"but only up to {MOST_HEAD_DIM} is supported")
    if n_heads % n_kv_heads:
        raise fields.invalid(kv_key, f"a divisor of num_attention_heads, {n_heads}")


def _has_bias(fields: Fields, architecture: HFArchitecture, bias: bool | str) -> bool:
    return bias if isinstance(bias, bool) else fields.flag(bias, architecture.defaults.get(bias, False))


def _read_scale(fields: Fields, head_dim: int) -> float | None:
    """None if it is what most models have."""
    if "attention_multiplier" in fields:
        scale = fields.number("attention_multiplier")
    else:
        scale = fields.number("query_pre_attn_scalar", head_dim) ** -0.5
    return None if scale == head_dim**-0.5 else scale


def _as_gemma4(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Layers without a window have heads of their own size, and the last layers the keys and values of earlier ones."""
    architecture, v_is_k = ARCHITECTURES["Gemma4ForCausalLM"], fields.flag("attention_k_eq_v", False)
    slides = _read_sliding(fields, architecture, spec.n_layers)
    slides[-1] = False
    dim, n_kv_heads = _read_global_heads(fields, slides, spec.layers[0].attends.n_kv_heads, v_is_k=v_is_k)
    full = read_rotation(fields, architecture, dim, slides=False)
    own = spec.n_layers - _count(fields, "num_kv_shared_layers", spec.n_layers - 1)
    wide = 2 if fields.flag("use_double_wide_mlp", False) else 1
    last = {kind: index for index, kind in enumerate(slides[:own])}
    layers: list[LayerSpec] = []
    kinds: dict[tuple[bool, bool], LayerSpec] = {}
    for index, sliding in enumerate(slides):
        shares = index >= own
        if shares and sliding not in last:
            raise fields.unsupported("num_kv_shared_layers", "which leaves no layer whose keys these could share")
        if (sliding, shares) not in kinds:
            layer = spec.layers[slides.index(sliding)]
            attention = replace(layer.attends, scale=1.0, v_norm=True, kv_from=last[sliding] if shares else None)
            if not sliding:
                attention = replace(attention, head_dim_k=dim, head_dim_v=dim, n_kv_heads=n_kv_heads, window=0)
                attention = replace(attention, rotation=full, v_is_k=v_is_k)
            n_ff = layer.feeds.size * (wide if shares else 1)
            kinds[sliding, shares] = replace(
                layer, attention=attention, feed_forward=replace(layer.feeds, size=n_ff), output_scale=True
            )
        layers.append(kinds[sliding, shares])
    size = _count(fields, "hidden_size_per_layer_input", 1 << 20, 256)
    if size and fields.size("vocab_size_per_layer_input", 262144) != spec.n_vocab:
        raise fields.unsupported("vocab_size_per_layer_input", f"but only vocab_size, {spec.n_vocab}, is supported")
    return replace(spec, layers=tuple(layers), layer_input_size=size)


def _read_global_heads(fields: Fields, slides: list[bool], n_kv_heads: int, *, v_is_k: bool) -> tuple[int, int]:
    """The size of heads of layers without a window, and their KV heads. Newer files list them layer by layer."""
    listed = fields.part("per_layer_config")
    dim_key, kv_key = "global_head_dim", "num_global_key_value_heads"
    place, default = fields, 512
    if listed is not None:
        places = [listed.part(str(index)) for index, sliding in enumerate(slides) if not sliding]
        dim_key, kv_key, v_is_k, default = "head_dim", "num_key_value_heads", True, fields.size("head_dim", 256)
        place = places[0] or Fields(fields.path, {})
        alike = all((each.values if each else {}) == place.values for each in places)
        if not alike or len(listed.values) > len(places) or not place.values.keys() <= {dim_key, kv_key}:
            raise fields.unsupported("per_layer_config", "but only equal layers without a window are supported")
    dim, n_kv_heads = place.size(dim_key, default), place.size(kv_key, n_kv_heads) if v_is_k else n_kv_heads
    _check_heads(fields, dim_key, dim, kv_key, n_kv_heads)
    return dim, n_kv_heads


def _count(fields: Fields, key: str, most: int, default: int = 0) -> int:
    value = fields.values.get(key, default)
    value = 0 if value is None else value
    if type(value) is not int or not 0 <= value <= most:
        raise fields.invalid(key, f"a number from 0 to {most}")
    return value

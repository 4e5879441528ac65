"""Layers of Hugging Face models that carry a state: which those are, how large it is, and what its weights become."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cllm.models.hf_architectures import HFArchitecture
from cllm.models.json_file import Fields
from cllm.models.spec import (
    MOST_KERNEL,
    MOST_LAYERS,
    MOST_STATE_HEADS,
    DeltaNetSpec,
    Mamba2Spec,
    ShortConvSpec,
)

LayerPart = Literal["attention", "state", "both", "feed_forward"]
_PARTS: Mapping[str, LayerPart] = {
    **dict.fromkeys(("full_attention", "attention", "*"), "attention"),
    **dict.fromkeys(("linear_attention", "mamba", "conv", "M"), "state"),
    **dict.fromkeys(("mlp", "-"), "feed_forward"),
}
"""What a layer has, by its names for that; beside that all have a feed-forward, or none."""
_LISTS = ("hybrid_override_pattern", "layers_block_type", "layer_types")
_NUMBERS_OF_ATTENTION = ("full_attn_idxs", "attn_layer_indices")
_UNLIMITED = ([0, math.inf], [0, {"__float__": "Infinity"}])


def read_parts(fields: Fields, architecture: HFArchitecture) -> list[LayerPart]:
    if architecture.layers != "listed":
        return [architecture.layers] * min(fields.size("num_hidden_layers"), MOST_LAYERS)
    key = next((key for key in _LISTS if key in fields), None)
    if key is None:
        return _unlisted(fields, architecture)
    listed = fields.values[key]
    count = fields.size("num_hidden_layers", len(listed)) if isinstance(listed, (list, str)) and listed else 0
    if not 0 < count <= MOST_LAYERS or len(listed) != count:
        raise fields.invalid(key, "what each of num_hidden_layers layers is")
    wrong = next((kind for kind in listed if not isinstance(kind, str) or kind not in _PARTS), None)
    if wrong is not None:
        experts = ", a mixture of experts" if wrong in ("moe", "E") else ""
        raise fields.unsupported(key, f"but a layer of the kind {wrong!r:.40}{experts} is not supported")
    return [_PARTS[kind] for kind in listed]


def _unlisted(fields: Fields, architecture: HFArchitecture) -> list[LayerPart]:
    n_layers = min(fields.size("num_hidden_layers"), MOST_LAYERS)
    for key in _NUMBERS_OF_ATTENTION:
        if key in fields:
            numbers = fields.values[key]
            if not isinstance(numbers, list) or any(type(each) is not int for each in numbers):
                raise fields.invalid(key, "a list of layers")
            return ["attention" if index in set(numbers) else "state" for index in range(n_layers)]
    if "full_attention_interval" not in architecture.defaults:
        raise fields.invalid("layer_types", "a list of what each layer is")
    interval = fields.size("full_attention_interval", architecture.defaults["full_attention_interval"])
    return ["attention" if (index + 1) % interval == 0 else "state" for index in range(n_layers)]


def read_recurrence(fields: Fields, architecture: HFArchitecture) -> DeltaNetSpec | Mamba2Spec | ShortConvSpec:
    limits = fields.values.get("time_step_limit")
    if limits is not None and limits not in _UNLIMITED:
        raise fields.unsupported("time_step_limit", "but only time steps without limits are supported")
    keys = architecture.state_keys
    if architecture.recurrence == "short_conv":
        return ShortConvSpec(fields.size("hidden_size"), _size(fields, architecture, keys[0], MOST_KERNEL))
    first, second, third, fourth, last = keys
    kernel = _size(fields, architecture, last, MOST_KERNEL)
    if architecture.recurrence == "delta_net":
        n_k_heads, n_v_heads = (_size(fields, architecture, key, MOST_STATE_HEADS) for key in (first, second))
        _check_divides(fields, first, n_k_heads, second, n_v_heads)
        dims = [_size(fields, architecture, key) for key in (third, fourth)]
        return DeltaNetSpec(n_k_heads, n_v_heads, dims[0], dims[1], kernel)
    n_heads, state_size, n_groups = (
        _size(fields, architecture, key, MOST_STATE_HEADS) for key in (first, third, fourth)
    )
    _check_divides(fields, fourth, n_groups, first, n_heads)
    if fields.values.get(second) == "auto":
        inner = fields.size("mamba_d_ssm", fields.size("mamba_expand", 2) * fields.size("hidden_size"))
        _check_divides(fields, first, n_heads, "the inner size", inner)
        head_dim = inner // n_heads
    else:
        head_dim = _size(fields, architecture, second)
    norm = architecture.name != "falcon-h1" or fields.flag("mamba_rms_norm", False)
    if norm and architecture.name == "falcon-h1" and fields.flag("mamba_norm_before_gate", True):
        raise fields.unsupported("mamba_norm_before_gate", "but only norms behind the gate are supported")
    return Mamba2Spec(n_heads, head_dim, state_size, n_groups, kernel, norm)


def _size(fields: Fields, architecture: HFArchitecture, key: str, most: int = 1 << 31) -> int:
    size = fields.size(key, architecture.defaults.get(key))
    if size > most:
        raise fields.invalid(key, f"a size of up to {most}")
    return size


def _check_divides(fields: Fields, key: str, part: int, whole_name: str, whole: int) -> None:
    if whole % part:
        raise fields.invalid(key, f"a divisor of {whole_name}, {whole}")


def read_row_factors(fields: Fields, spec: Any) -> dict[str, NDArray[np.float32]]:
    """By what rows of matrices are multiplied when they are loaded: one number by role, or one for each row. Falcon-H1
    multiplies what goes into them or comes out instead."""
    if not isinstance(spec, Mamba2Spec) or "ssm_multipliers" not in fields.values:
        return {}
    into, key = fields.number("attention_in_multiplier", 1.0), fields.number("key_multiplier", 1.0)
    gate, down = fields.numbers("mlp_multipliers", 2) if "mlp_multipliers" in fields else (1.0, 1.0)
    parts = fields.numbers("ssm_multipliers", 5) if "ssm_multipliers" in fields else [1.0] * 5
    groups = spec.n_groups * spec.state_size
    rows = np.repeat(parts, (spec.inner_size, spec.inner_size, groups, groups, spec.n_heads))
    found = {
        "attn_q": into,
        "attn_k": into * key,
        "attn_v": into,
        "attn_output": fields.number("attention_out_multiplier", 1.0),
        "ssm_in": rows * fields.number("ssm_in_multiplier", 1.0),
        "ssm_out": fields.number("ssm_out_multiplier", 1.0),
        "ffn_gate": gate,
        "ffn_down": down,
    }
    return {role: np.atleast_1d(np.asarray(factor, np.float32)) for role, factor in found.items()}

"""How the `config.json` of a Hugging Face model says that positions turn heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cllm.models.hf_architectures import HFArchitecture
from cllm.models.json_file import Fields
from cllm.models.spec import Rotation, Temperature

Floats = NDArray[np.float64]

_BASES = {"gemma3": 1e6, "gemma4": 1e6, "olmo3": 5e5, "lfm2": 1e6}
_WINDOW_BASES = {"gemma3": 1e4, "gemma4": 1e4, "olmo3": 5e5}
_DEFAULT_BASE = 1e4
_PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.25}


def read_rotation(fields: Fields, architecture: HFArchitecture, head_dim: int, *, slides: bool) -> Rotation:
    """How layers with a window turn, or those without."""
    rope, base = _parameters(fields, architecture, slides=slides)
    plain = Rotation(rope.number("rope_theta", base), head_dim, architecture.neox)
    kind = _kind(rope)
    if kind == "proportional":  # of all dimensions, but the slower pairs do not turn
        divisors = np.full(head_dim // 2, rope.number("factor", 1.0))
        divisors[int(rope.number("partial_rotary_factor", 1.0) * head_dim // 2) :] = math.inf
        return replace(plain, divisors=tuple(divisors.tolist()))
    plain = replace(plain, dims=_turned_dims(fields, rope, architecture, head_dim))
    if kind == "default":
        return plain
    if kind == "linear":
        return replace(plain, scale=rope.number("factor"))
    if kind == "dynamic" and "alpha" in architecture.reads and "alpha" in rope:
        return replace(plain, base=plain.base * rope.number("alpha") ** (plain.dims / (plain.dims - 2)))
    if architecture.name == "phi3" and kind in ("su", "yarn"):  # its names for it before it had one
        kind = "longrope"
    if kind not in _STRETCHED:
        raise rope.unsupported(_kind_key(rope), f"but only default, linear, {', '.join(_STRETCHED)} are supported")
    divisors, magnitude = _STRETCHED[kind](fields, rope, plain)
    return replace(plain, divisors=tuple(divisors.tolist()), magnitude=magnitude)


def read_temperature(fields: Fields, architecture: HFArchitecture) -> Temperature | None:
    if "llama_4_scaling_beta" not in architecture.reads:
        return None
    rope, _ = _parameters(fields, architecture, slides=False)
    if "llama_4_scaling_beta" not in rope:
        return None
    return Temperature(rope.number("llama_4_scaling_beta"), _trained(fields, rope))


def _parameters(fields: Fields, architecture: HFArchitecture, *, slides: bool) -> tuple[Fields, float]:
    """The object with the parameters, and the base if it has none. Newer files have everything in `rope_parameters`."""
    found = fields.part("rope_parameters")
    name = architecture.name
    if architecture.rope_by_kind:
        if found is not None and (part := found.part("sliding_attention" if slides else "full_attention")):
            return part, (_WINDOW_BASES if slides else _BASES)[name]
        if slides:
            base = fields.number("rope_local_base_freq", _WINDOW_BASES[name])
            return Fields(fields.path, {}), base if name != "olmo3" else fields.number("rope_theta", base)
    named = [part for part in (found, fields.part("rope_scaling")) if part and part.values]
    base = fields.number("rope_theta", _BASES.get(name, _DEFAULT_BASE))
    if not named:
        return Fields(fields.path, _PROPORTIONAL if name == "gemma4" else {}), base
    rope = named[0]
    if any(_kind(part) != _kind(rope) for part in named):
        raise fields.unsupported("rope_scaling", "but rope_parameters has another type")
    per_layer = next((key for key, value in rope.values.items() if isinstance(value, dict)), None)
    if per_layer is not None:
        raise rope.unsupported(per_layer, "but only one type for all layers is supported")
    return rope, base


def _kind_key(rope: Fields) -> str:
    return "rope_type" if "rope_type" in rope else "type"


def _kind(rope: Fields) -> str:
    return rope.text(_kind_key(rope), "default")


def _turned_dims(fields: Fields, rope: Fields, architecture: HFArchitecture, head_dim: int) -> int:
    place = rope if "partial_rotary_factor" in rope else fields
    share = place.number("partial_rotary_factor", architecture.defaults.get("partial_rotary_factor", 1.0))
    if share == 1.0:
        return head_dim
    dims = int(head_dim * share)
    if "partial_rotary_factor" not in architecture.reads or share > 1:
        raise place.unsupported("partial_rotary_factor", "but only 1 is supported")
    if dims < 2 or dims % 2:
        raise place.unsupported("partial_rotary_factor", f"which turns {dims} of {head_dim} dimensions of a head")
    return dims


def _trained(fields: Fields, rope: Fields) -> int:
    """The context before it was stretched."""
    key = "original_max_position_embeddings"
    return (fields if key in fields else rope).size(key, fields.size("max_position_embeddings"))


def _turns(plain: Rotation) -> Floats:
    turns: Floats = plain.base ** -(np.arange(0, plain.dims, 2) / plain.dims)
    return turns


def _llama3(fields: Fields, rope: Fields, plain: Rotation) -> tuple[Floats, float]:
    """Llama 3's way to a longer context than it was trained for at first: pairs that go round less than `low` times in
    that are slowed down by `factor`, those that do more than `high` times are not, and those between in part."""
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise rope.invalid("low_freq_factor", f"less than high_freq_factor, {high:g}")
    trained, factor = rope.size("original_max_position_embeddings"), rope.number("factor")
    fast = np.clip((trained * _turns(plain) / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
    return 1.0 / (fast + (1.0 - fast) / factor), 1.0


def _yarn(fields: Fields, rope: Fields, plain: Rotation) -> tuple[Floats, float]:
    """YaRN: as Llama 3's, but with a ramp over the numbers of the pairs, and larger vectors."""
    trained = _trained(fields, rope)
    factor = rope.number("factor", fields.size("max_position_embeddings") / trained)
    ends = [
        plain.dims * math.log(trained / (rope.number(key, default) * 2 * math.pi)) / (2 * math.log(plain.base))
        for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    ]
    if rope.flag("truncate", True):
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], plain.dims - 1)
    slow = np.clip((np.arange(plain.dims // 2) - low) / (high - low or 0.001), 0.0, 1.0)
    parts = [rope.number(key) if rope.values.get(key) else 0.0 for key in ("mscale", "mscale_all_dim")]
    over, under = parts if all(parts) else (1.0, 0.0)
    grown = math.log(max(factor, 1.0)) / 10
    magnitude = rope.number("attention_factor", (over * grown + 1.0) / (under * grown + 1.0))
    return 1.0 / (1.0 - slow + slow / factor), magnitude


def _longrope(fields: Fields, rope: Fields, plain: Rotation) -> tuple[Floats, float]:
    """LongRoPE has divisors for texts as long as the model was trained with at first, and others for longer ones. A
    cached key must serve both: where long texts are allowed, theirs are taken."""
    trained, context = _trained(fields, rope), fields.size("max_position_embeddings")
    key = "long_factor" if context > trained else "short_factor"
    divisors = rope.numbers(key, plain.dims // 2)
    factor = rope.number("factor", context / trained)
    grown = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return np.array(divisors), rope.number("attention_factor", grown)


_STRETCHED: dict[str, Callable[[Fields, Fields, Rotation], tuple[Floats, float]]] = {
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}

"""How a GGUF file says that positions turn queries and keys: llama.cpp's reading of it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from cllm.errors import ModelError
from cllm.models.architectures import Architecture
from cllm.models.gguf import DAMAGED_ADVICE, GGUFModel, TensorFile
from cllm.models.gguf_header import short
from cllm.models.gguf_keys import Keys
from cllm.models.spec import Rotation

SCALINGS = ("none", "linear", "yarn", "longrope")
FREQUENCIES, LONG, SHORT = (f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short"))


def read_rotation(model: GGUFModel, architecture: Architecture, context: int) -> Rotation:
    """The one of layers that see the whole text, for contexts of up to so many tokens."""
    keys = model.keys
    base, dims = keys.positive("rope.freq_base", 10000.0), rope_dims(model)
    if "rope.scaling.alpha" in architecture.keys and (alpha := keys.number("rope.scaling.alpha", 0.0)) > 0 and dims > 2:
        base *= alpha ** (dims / (dims - 2))
    plain = Rotation(base, dims, architecture.neox, magnitude=keys.positive("rope.scaling.attn_factor", 1.0))
    kind, factor = scaling(keys), scaling_factor(keys)
    if "rope.dimension_sections" in architecture.keys:
        plain = replace(plain, divisors=_read_sections(keys, dims // 2))
    if architecture.divisors and (name := _divisors_name(model, context)) is not None:
        plain = replace(plain, divisors=_read_divisors(model, name, dims // 2))
    if kind == "yarn":
        return _yarn(keys, plain, factor)
    return replace(plain, scale=1.0 if kind == "none" else factor)


def scaling(keys: Keys) -> str:
    return keys.get(f"{keys.architecture}.rope.scaling.type", "linear")


def scaling_factor(keys: Keys) -> float:
    """The factor by which positions are scaled; 0 means none."""
    for suffix in ("rope.scaling.factor", "rope.scale_linear"):
        if keys.any(suffix) is not None:
            return keys.positive(suffix, 1.0) if keys.number(suffix, 1.0) else 1.0
    return 1.0


def rope_dims(model: GGUFModel) -> int:
    """How much of a head is turned in layers that see the whole text: theirs may be larger than others."""
    largest = max({attention.head_dim_k for attention in model.spec.attentions})
    return model.keys.count("rope.dimension_count", largest)


def _original_context(keys: Keys) -> int:
    return keys.size("rope.scaling.original_context_length", keys.size("context_length"))


def _divisors_name(model: GGUFModel, context: int) -> str | None:
    if FREQUENCIES in model.tensors:
        return FREQUENCIES
    name = LONG if context > _original_context(model.keys) else SHORT
    return name if name in model.tensors else None


def _read_divisors(model: GGUFModel, name: str, pairs: int) -> tuple[float, ...]:
    check_size(model, name, pairs)
    with TensorFile(model) as file:
        values = file.read(name).view(np.float32).tolist()
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ModelError(f"{model.path}: the tensor {name} has factors that are not positive; {DAMAGED_ADVICE}")
    return tuple(values)


def _read_sections(keys: Keys, pairs: int) -> tuple[float, ...] | None:
    """Where pairs of dimensions take turns in following the time, the height and the width of an image, a text is at
    the same position in all three. Pairs that follow none of them do not turn."""
    sections = keys.any("rope.dimension_sections")
    if not isinstance(sections, list) or not 3 <= len(sections) <= 4 or not all(type(n) is int for n in sections):
        key = f"{keys.architecture}.rope.dimension_sections"
        raise keys.wrong_kind(key, "missing" if sections is None else short(sections), "a list of 4 numbers")
    if (whole := sum(sections)) <= 0:
        return None
    turns = [(pair % whole) < 3 * sections[pair % whole % 3] for pair in range(pairs)]
    return None if all(turns) else tuple(1.0 if each else math.inf for each in turns)


def _yarn(keys: Keys, plain: Rotation, factor: float) -> Rotation:
    """Pairs that go round often in the original context turn as they did, those that do so less than once `factor`
    times slower, those between in part. Scores become sharper."""
    if factor == 1.0:
        return plain
    original = _original_context(keys)
    if plain.base <= 1:
        raise ModelError(f"{keys.path}: YaRN needs a rope.freq_base above 1, not {plain.base}; use another .gguf file")

    def pair(turns: float) -> float:
        """The pair of dimensions that goes round so often."""
        return plain.dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(plain.base))

    fast, slow = (
        keys.positive(f"rope.scaling.yarn_beta_{name}", default) for name, default in (("fast", 32.0), ("slow", 1.0))
    )
    low, high = max(0, math.floor(pair(fast))), min(plain.dims - 1, math.ceil(pair(slow)))
    unchanged = 1 - np.clip((np.arange(plain.dims // 2) - low) / max(0.001, high - low), 0, 1)
    divisors = 1 / (unchanged + (1 - unchanged) / factor)
    if plain.divisors is not None:
        divisors = divisors * np.array(plain.divisors)
    all_dims = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    sharper = keys.positive("rope.scaling.yarn_attn_factor", _sharpness(factor, 1.0) / _sharpness(factor, all_dims))
    return replace(plain, divisors=tuple(divisors.tolist()), magnitude=plain.magnitude * sharper)


def _sharpness(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 1.0 + 0.1 * weight * math.log(factor)


def read_sliding_rotation(keys: Keys, full: Rotation, base: float | None, head_dim: int) -> Rotation:
    if base is None:
        return full
    dims = keys.count("rope.dimension_count_swa", min(full.dims, head_dim))
    return Rotation(keys.positive("rope.freq_base_swa", base or full.base), dims, full.neox)


def check_size(model: GGUFModel, name: str, *asked: int) -> None:
    has = model.tensors[name].shape
    if (*has, 1, 1, 1, 1)[:4] != (*asked, 1, 1, 1)[:4]:
        found, wanted = (" x ".join(map(str, shape)) for shape in (has, asked))
        raise ModelError(f"{model.path}: the tensor {name} is {found}, but should be {wanted}; {DAMAGED_ADVICE}")

"""Default values of sampling parameters that a request does not set.

In order of precedence: `model.sampling` in the configuration, the registry's entry for the model, its own files,
OpenAI's documented defaults.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cllm.config import Config
from cllm.engine.params import RANGES, RECOMMENDABLE, SamplingParams
from cllm.errors import ModelError
from cllm.models.gguf import GGUFModel
from cllm.models.gguf_header import short
from cllm.models.hf_directory import HFModel
from cllm.models.json_file import read_json
from cllm.models.registry import recommended_sampling

log = logging.getLogger("cllm")

Number = int | float

_PLAIN: dict[str, Number] = {name: getattr(SamplingParams(), name) for name in RECOMMENDABLE}
_ORDINARY = "default"
_GENERATION_CONFIG = "generation_config.json"
_MOST_BYTES = 1 << 20
_GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
"""Where llama.cpp has another name."""
_FLOAT32_DIGITS = 7
"""A GGUF file stores 0.95 as a 32-bit float, which is 0.949999988."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    values: Mapping[str, Number] = field(default_factory=lambda: dict(_PLAIN))
    """For every parameter that a model's authors may recommend."""
    sources: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(_PLAIN, _ORDINARY))
    """`configuration`, `registry`, `generation_config.json`, `GGUF metadata` or `default`."""

    @property
    def recommended(self) -> dict[str, Number]:
        """The values with a source other than OpenAI's defaults."""
        return {name: value for name, value in self.values.items() if self.sources[name] != _ORDINARY}


def sampling_defaults(config: Config, model: GGUFModel | HFModel | None) -> SamplingDefaults:
    """`model`: None for the fake backend."""
    values, sources = dict(_PLAIN), dict.fromkeys(_PLAIN, _ORDINARY)
    layers: list[tuple[str, Mapping[str, Number]]] = []
    if isinstance(model, HFModel):
        layers.append((_GENERATION_CONFIG, _in_directory(model.path)))
    elif model is not None:
        layers.append(("GGUF metadata", _in_gguf(model)))
    if model is not None:
        layers.append(("registry", recommended_sampling(config.model.name)))
    layers.append(("configuration", config.model.sampling.model_dump(exclude_none=True)))
    for source, layer in layers:
        values.update(layer)
        sources.update(dict.fromkeys(layer, source))
    return SamplingDefaults(values, sources)


def _in_gguf(model: GGUFModel) -> dict[str, Number]:
    """From the metadata `general.sampling.*`."""
    found: dict[str, Any] = {}
    for name in RECOMMENDABLE:
        value: Any = model.metadata.get(f"general.sampling.{_GGUF_NAMES.get(name, name)}")
        found[name] = float(f"{value:.{_FLOAT32_DIGITS}g}") if isinstance(value, float) else value
    return dict(_usable(found, model.path))


def _in_directory(path: Path) -> dict[str, Number]:
    """From a Hugging Face directory's generation_config.json, if it has one."""
    file = path / _GENERATION_CONFIG
    try:
        found = read_json(file, _MOST_BYTES) or {}
    except ModelError as error:
        log.warning("%s; ignoring its sampling parameters", error)
        return {}
    return dict(_usable({name: found.get(name) for name in RECOMMENDABLE}, file))


def _usable(found: Mapping[str, Any], place: Path) -> Iterator[tuple[str, Number]]:
    """Skips values that make no sense: they are no reason not to run the model."""
    for name, value in found.items():
        if value is None:
            continue
        if RANGES[name].has_type_of(value) and RANGES[name].passed_by(value) is None:
            yield name, value
        else:
            log.warning("%s: ignoring the recommended %s = %s, which is not a valid value", place, name, short(value))

"""The metadata of a GGUF file as values of the kind that is asked for. Anything else is a `ModelError`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from cllm.errors import ModelError
from cllm.models.gguf_header import short

T = TypeVar("T")

_MAX_SIZE = 2**31 - 1  # of any number in a model's shape


@dataclass(frozen=True, slots=True)
class Keys:
    """A suffix is what follows the architecture's name in a key."""

    path: Path
    architecture: str
    metadata: Mapping[str, Any]

    def get(self, key: str, default: T) -> T:
        """The value of `key`, which must be of the default's type (a `None` default takes any type)."""
        value = self.metadata.get(key)
        if value is None:
            return default
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(default, float) and type(value) is int:
            value = float(value)
        if default is not None and type(value) is not type(default):
            raise self.wrong_kind(key, f"a {type(value).__name__}", f"a {type(default).__name__}")
        return cast(T, value)

    def any(self, suffix: str) -> Any:
        return self.get(f"{self.architecture}.{suffix}", cast(Any, None))

    def strings(self, key: str) -> list[str]:
        value: list[Any] = self.get(key, [])
        if value and not isinstance(value[0], str):
            raise self.wrong_kind(key, f"a list of {type(value[0]).__name__}", "a list of str")
        return value

    def number(self, suffix: str, default: float) -> float:
        return self.get(f"{self.architecture}.{suffix}", float(default))

    def positive(self, suffix: str, default: float | None) -> float:
        """None as the default: the key is required."""
        key = f"{self.architecture}.{suffix}"
        if default is None and key not in self.metadata:
            raise self._missing(key)
        value = self.number(suffix, default or 0.0)
        if not (math.isfinite(value) and value > 0):
            raise ModelError(
                f"{self.path}: the metadata key {key} is {value}, not a positive number; use another .gguf file"
            )
        return value

    def size(self, suffix: str, default: int | None = None) -> int:
        """One for the whole model, or the same for all layers. No default: the key is required."""
        value = self.any(suffix)
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]  # one entry per layer, all the same
        value = default if value is None else value
        if value is None:
            raise self._missing(f"{self.architecture}.{suffix}")
        return self._checked(suffix, value)

    def count(self, suffix: str, default: int) -> int:
        """A size that may be 0."""
        value = self.any(suffix)
        return default if value is None else self.size(suffix) if value else 0

    def counts(self, suffix: str, n_layers: int) -> list[int]:
        """One for each layer, which may be 0; none if the key is missing. Layers behind those may have some, too."""
        value = self.any(suffix)
        if isinstance(value, list) and len(value) >= n_layers:
            return [self.checked_count(suffix, entry) for entry in value[:n_layers]]
        return [self.count(suffix, 0)] * n_layers

    def checked_count(self, suffix: str, value: Any) -> int:
        """An entry of a list, which may be 0."""
        return self._checked(suffix, value) if value != 0 or type(value) is not int else 0

    def sizes(self, suffix: str, n_layers: int, default: list[int] | None = None) -> list[int]:
        """One for each layer."""
        value = self.any(suffix)
        value = default if value is None else value
        if not isinstance(value, list) or len(value) != n_layers:
            return [self.size(suffix)] * n_layers
        for distinct in set(value):
            self._checked(suffix, distinct)
        return value

    def sliding(self, n_layers: int, period: int) -> list[bool]:
        """Which layers attend to a window, if every layer but each `period`-th does so; 0: all do. The file may say
        another period, or which layers they are."""
        suffix = "attention.sliding_window_pattern"
        value = period if self.any(suffix) is None else self.any(suffix)
        if isinstance(value, list) and len(value) == n_layers:
            return list(map(bool, value))
        if type(value) is not int or value < 0:
            key = f"{self.architecture}.{suffix}"
            raise self.wrong_kind(key, short(value), f"a number, or a list for {n_layers} layers")
        return [not value or index % value < value - 1 for index in range(n_layers)]

    def wrong_kind(self, key: str, found: str, wanted: str) -> ModelError:
        return ModelError(f"{self.path}: the metadata key {key} is {found}, not {wanted}; use another .gguf file")

    def _missing(self, key: str) -> ModelError:
        return ModelError(f"{self.path}: the metadata key {key} is missing; use a complete .gguf file")

    def _checked(self, suffix: str, value: Any) -> int:
        if type(value) is not int or not 0 < value <= _MAX_SIZE:
            key = f"{self.architecture}.{suffix}"
            raise ModelError(
                f"{self.path}: the metadata key {key} is {short(value)}, not a valid size; use another .gguf file"
            )
        return value

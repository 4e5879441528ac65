"""How long prompts and answers are: a number, or a distribution, written as `name:parameter:parameter`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cllm.errors import ConfigError

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]

_KINDS: dict[str, tuple[str, Callable[..., Draw]]] = {
    "uniform": ("LOW:HIGH", lambda low, high: lambda rng, n: rng.uniform(low, high, n)),
    "exponential": ("MEAN", lambda mean: lambda rng, n: rng.exponential(mean, n)),
    "lognormal": ("MEDIAN:SIGMA", lambda median, sigma: lambda rng, n: rng.lognormal(math.log(median), sigma, n)),
}


@dataclass(frozen=True)
class Lengths:
    """Whole numbers from 1 to `longest`."""

    text: str
    longest: int
    draw_raw: Draw

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        raw = np.clip(np.rint(self.draw_raw(rng, count)), 1, self.longest)
        values: list[int] = raw.astype(np.int64).tolist()
        return values


def parse_lengths(name: str, text: str, longest: int) -> Lengths:
    kind, *parameters = text.split(":")
    if not parameters and (number := _number(kind)) > 0:
        return Lengths(text, longest, lambda rng, n: np.full(n, number))
    if kind not in _KINDS or len(parameters) != _KINDS[kind][0].count(":") + 1:
        known = ", ".join(f"{each}:{form}" for each, (form, _) in _KINDS.items())
        raise ConfigError(f"{name}={text}: lengths are written as a number of tokens above 0, or as {known}")
    numbers = [_number(parameter) for parameter in parameters]
    if not all(number > 0 for number in numbers):
        raise ConfigError(f"{name}={text}: every parameter of a length must be a number above 0")
    if kind == "uniform" and numbers[0] > numbers[1]:
        raise ConfigError(f"{name}={text}: the low end is above the high one")
    return Lengths(text, longest, _KINDS[kind][1](*numbers))


def _number(text: str) -> float:
    """Finite, or NaN."""
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan

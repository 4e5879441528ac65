"""Sampling parameters: one validated, immutable record."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

from cllm.errors import InvalidRequestError
from cllm.kv.window import MIN_RECENT
from cllm.structured.structure import Structure

MAX_LOGPROBS = 20
MAX_CHOICES = 128
_MAY_BE_NONE = ("max_tokens", "logprobs", "prompt_logprobs")


class Range(NamedTuple):
    """Limits of a number. A float as `low` allows fractions."""

    low: float
    high: float | None = None
    open_low: bool = False

    def has_type_of(self, value: Any) -> bool:
        """Whether it is a number, and a whole one where that is needed."""
        kinds = (int, float) if isinstance(self.low, float) else int
        return isinstance(value, kinds) and not isinstance(value, bool)

    def passed_by(self, value: float) -> str | None:
        """What the number must be, if it is out of range."""
        low, high, open_low = self
        below = value <= low if open_low else value < low
        if (isinstance(value, int) or math.isfinite(value)) and not below and (high is None or value <= high):
            return None
        above = "more than" if open_low else "at least"
        return f"{above} {low}" + ("" if high is None else f" and at most {high}")


RANGES = {
    "max_tokens": Range(0),
    "n": Range(1, MAX_CHOICES),
    "temperature": Range(0.0, 100.0),
    "top_p": Range(0.0, 1.0, open_low=True),
    "top_k": Range(-1),
    "min_p": Range(0.0, 1.0),
    "repetition_penalty": Range(0.0, 100.0, open_low=True),
    "frequency_penalty": Range(-2.0, 2.0),
    "presence_penalty": Range(-2.0, 2.0),
    "logprobs": Range(0, MAX_LOGPROBS),
    "prompt_logprobs": Range(0, MAX_LOGPROBS),
    "min_tokens": Range(0),
}
MAX_BIAS = 100
_WHOLE = (int, Integral)
_LIST = (list, tuple, Collection)
_TYPES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("seed", lambda seed: seed is None or isinstance(seed, _WHOLE), "a whole number or None"),
    ("stop", lambda stop: isinstance(stop, _LIST) and all(isinstance(each, str) for each in stop), "strings"),
    ("stop_token_ids", lambda ids: isinstance(ids, _LIST) and all(isinstance(id, _WHOLE) for id in ids), "token ids"),
    ("logit_bias", lambda biases: isinstance(biases, (dict, Mapping)) and _are_biases(biases), "numbers by token id"),
    ("ignore_eos", lambda ignored: isinstance(ignored, bool), "True or False"),
    (
        "context_window",
        lambda window: window is None or window == "configured" or isinstance(window, ContextWindow),
        "a ContextWindow, None or 'configured'",
    ),
    ("structured", lambda structure: structure is None or isinstance(structure, Structure), "a Structure or None"),
)
RECOMMENDABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters that a model's authors may recommend."""


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """A rolling window: once the text is longer, the model sees its first `keep` tokens and at least the `recent` last
    ones. Both are rounded up to whole blocks of memory."""

    recent: int
    keep: int = 4

    def __post_init__(self) -> None:
        for name, low in (("recent", MIN_RECENT), ("keep", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**31:
                raise InvalidRequestError(
                    f"context_window.{name} is {value!r}; it must be a whole number of at least {low}",
                    f"context_window.{name}",
                )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Out-of-range values raise `InvalidRequestError`, whose `param` names the field. `SamplingParams()` has the defaults
    below, whatever the model; `with_model_defaults` leaves open what is not given, for the model's defaults.
    """

    max_tokens: int | None = 128
    """The most tokens to generate; `None`: as many as the context holds; 0: only compute the prompt."""
    n: int = 1
    """Independent answers to the same prompt. The prompt is computed once."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 disables it."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """Same seed, same output, whatever else is running (llama_cpp and torch: within rounding). `None`: a random one."""
    logprobs: int | None = None
    """Also report the chosen token's log probability and this many alternatives."""
    prompt_logprobs: int | None = None
    """Also report the log probability of every prompt token but the first, and this many alternatives. The whole prompt
    is computed for that, even if it is cached."""
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    """Never choose the model's end of text, so that only `max_tokens`, `stop` and `stop_token_ids` end the answer."""
    min_tokens: int = 0
    context_window: ContextWindow | Literal["configured"] | None = "configured"
    """A rolling window, which lets prompt and answer exceed the context. By default that of kv.window; `None`: no
    window. With a window, `max_tokens` of None means as many as the context holds, whatever the prompt."""
    structured: Structure | None = None
    """The structure of the answers. They end when it is complete, whatever `ignore_eos` and `min_tokens` say."""
    unset: frozenset[str] = frozenset()
    """Names of parameters that get the model's defaults (see `with_model_defaults`)."""

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            _check_range(self, name, allowed)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, fits, expected in _TYPES:
            if not fits(value := getattr(self, name)):
                raise InvalidRequestError(f"{name} is {value!r}; it must be {expected}", name)
        if self.prompt_logprobs is not None and isinstance(self.context_window, ContextWindow):
            raise InvalidRequestError(
                "prompt_logprobs is not available with a rolling window (context_window), which drops parts of the "
                "prompt; use one or the other",
                "prompt_logprobs",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens ({self.max_tokens})", "min_tokens"
            )
        for token, bias in self.logit_bias.items():
            if not math.isfinite(bias) or abs(bias) > MAX_BIAS:
                raise InvalidRequestError(
                    f"logit_bias[{token}] is {bias}; it must be between -{MAX_BIAS} and {MAX_BIAS}", "logit_bias"
                )
        if any(not text for text in self.stop):
            raise InvalidRequestError("stop must not contain an empty string", "stop")

    @classmethod
    def with_model_defaults(cls, **given: Any) -> SamplingParams:
        """With the given values; the rest of `RECOMMENDABLE` gets the model's defaults when it is submitted."""
        return cls(**given, unset=frozenset(RECOMMENDABLE) - given.keys())

    def completed(self, defaults: Mapping[str, float]) -> SamplingParams:
        """With the model's defaults for what was left open."""
        if not self.unset:
            return self
        chosen: dict[str, Any] = {name: value for name, value in defaults.items() if name in self.unset}
        return replace(self, **chosen, unset=frozenset())

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _are_biases(biases: Mapping[Any, Any]) -> bool:
    return all(isinstance(id, _WHOLE) and isinstance(bias, (int, float, Real)) for id, bias in biases.items())


def _check_range(params: SamplingParams, name: str, allowed: Range) -> None:
    value = getattr(params, name)
    if value is None and name in _MAY_BE_NONE:
        return
    if not allowed.has_type_of(value):
        wanted = "a number" if isinstance(allowed.low, float) else "a whole number"
        raise InvalidRequestError(f"{name} is {value!r}; it must be {wanted}", name)
    if (limit := allowed.passed_by(value)) is not None:
        raise InvalidRequestError(f"{name} is {value}; it must be {limit}", name)

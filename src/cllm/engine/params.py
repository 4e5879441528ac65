"""What a caller may ask of generation: one checked, immutable record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from cllm.errors import InvalidRequestError
from cllm.kv.window import MIN_RECENT
from cllm.structured.structure import Structure

MAX_LOGPROBS = 20
MAX_CHOICES = 128
_MAY_BE_NONE = ("max_tokens", "logprobs", "prompt_logprobs")


class Range(NamedTuple):
    """What a number may be. A float as `low` allows fractions."""

    low: float
    high: float | None = None
    open_low: bool = False

    def passed_by(self, value: float) -> str | None:
        """What the number must be, if it is not."""
        low, high, open_low = self
        below = value <= low if open_low else value < low
        if math.isfinite(value) and not below and (high is None or value <= high):
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
RECOMMENDABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What the authors of a model may recommend."""


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """A rolling window: of a text that grows beyond it, the first `keep` tokens and at least the `recent` last ones are
    remembered. Both are rounded up to whole blocks of memory."""

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

    Out-of-range values raise `InvalidRequestError`, whose `param` names the field. What is written here is what holds:
    `SamplingParams()` samples at temperature 1 from any model. `with_model_defaults` leaves what is not given to the
    model.
    """

    max_tokens: int | None = 128
    """Most tokens to generate; `None` means as many as the context holds, 0 that only the prompt is computed."""
    n: int = 1
    """Independent answers to the same prompt. The prompt is computed once."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 switches it off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """Same seed, same output, whatever else is running. `None` draws one at random."""
    logprobs: int | None = None
    """Also report the chosen token's log probability and this many alternatives."""
    prompt_logprobs: int | None = None
    """Also report the log probability of every token of the prompt but the first, and this many alternatives. All of
    the prompt is computed for that, whatever is cached."""
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    """Never choose the model's end of text, so that only `max_tokens`, `stop` and `stop_token_ids` end the answer."""
    min_tokens: int = 0
    context_window: ContextWindow | Literal["configured"] | None = "configured"
    """A rolling window, with which prompt and answer may be longer than the context. Default: what kv.window says;
    `None`: no window. `max_tokens` of None then means as many as the context holds, whatever the prompt."""
    structured: Structure | None = None
    """What the answers must look like. They end when they do, whatever `ignore_eos` and `min_tokens` say."""
    unset: frozenset[str] = frozenset()
    """Names of parameters that are the model's to say (see `with_model_defaults`)."""

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            _check_range(self, name, allowed)
        if self.prompt_logprobs is not None and isinstance(self.context_window, ContextWindow):
            raise InvalidRequestError(
                "prompt_logprobs is not available with a rolling window (context_window), which forgets "
                "parts of it; leave one of them out",
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
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if any(not text for text in self.stop):
            raise InvalidRequestError("stop holds an empty string", "stop")

    @classmethod
    def with_model_defaults(cls, **given: Any) -> SamplingParams:
        """These; what else the authors of a model recommend, or model.sampling sets, holds where it is submitted."""
        return cls(**given, unset=frozenset(RECOMMENDABLE) - given.keys())

    def completed(self, defaults: Mapping[str, float]) -> SamplingParams:
        """With the model's values for what was left to it."""
        if not self.unset:
            return self
        chosen: dict[str, Any] = {name: value for name, value in defaults.items() if name in self.unset}
        return replace(self, **chosen, unset=frozenset())

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _check_range(params: SamplingParams, name: str, allowed: Range) -> None:
    low = allowed.low
    value = getattr(params, name)
    if value is None and name in _MAY_BE_NONE:
        return
    kinds = (int, float) if isinstance(low, float) else int
    if isinstance(value, bool) or not isinstance(value, kinds):
        wanted = "a number" if isinstance(low, float) else "a whole number"
        raise InvalidRequestError(f"{name} is {value!r}; it must be {wanted}", name)
    if (limit := allowed.passed_by(value)) is not None:
        raise InvalidRequestError(f"{name} is {value}; it must be {limit}", name)

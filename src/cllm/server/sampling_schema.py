"""The sampling parameters that every generating endpoint takes, whatever its dialect."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from cllm.engine.params import SamplingParams
from cllm.server.validation import AtMost, Int32, Int64, RequestModel, Text, Texts, wrong

_PASSED_ON = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
)

_TOKEN_ID = re.compile(r"[0-9]{1,10}")


def _ids_to_numbers(biases: Any) -> Any:
    """Stops at the first wrong entry, where pydantic would report every one."""
    if isinstance(biases, dict):
        for key, bias in biases.items():
            if not _TOKEN_ID.fullmatch(key):
                raise wrong(f"has the key {key[:40]!r}; keys are token ids")
            if type(bias) not in (int, float):
                raise wrong(f"has a bias that is not a number for token {key}")
    return biases


Biases = Annotated[dict[str, float], BeforeValidator(_ids_to_numbers), AtMost("max_logit_bias", "tokens")]


class SamplingFields(RequestModel):
    """`null` means the default. Ranges are checked by `SamplingParams`, once for all ways in."""

    temperature: float | None = Field(None, description="0 is greedy. Default 1.")
    top_p: float | None = Field(None, description="Keep the likeliest tokens up to this mass. Default 1.")
    top_k: Int32 | None = Field(None, description="Keep this many likeliest tokens; 0 or -1: all.")
    min_p: float | None = Field(None, description="Drop tokens below this share of the likeliest one's.")
    repetition_penalty: float | None = Field(None, description="Above 1 discourages repetition. Default 1.")
    frequency_penalty: float | None = Field(None, description="-2 to 2. Default 0.")
    presence_penalty: float | None = Field(None, description="-2 to 2. Default 0.")
    logit_bias: Biases | None = Field(None, description="Token id -> bias from -100 to 100.", examples=[{"42": -100}])
    seed: Int64 | None = Field(None, description="Same seed, same output, whatever else is running.")
    stop: Text | Annotated[Texts, AtMost("max_stop_strings", "strings")] | None = Field(
        None, description="The answer ends before any of these."
    )
    stop_token_ids: Annotated[list[Int32], Field(fail_fast=True), AtMost("max_stop_token_ids", "token ids")] | None = (
        Field(None, description="The answer ends at any of these tokens.")
    )
    ignore_eos: bool | None = Field(None, description="Go on past the end-of-answer token.")
    min_tokens: Int32 | None = Field(None, description="No end before this many tokens. Default 0.")
    priority: Int32 | None = Field(None, description="Lower goes first. Default 0.")
    timeout: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Seconds after which the request fails; scheduler.request_timeout_s is the most.",
    )

    def sampling(self, *, max_tokens: int | None, **own: Any) -> SamplingParams:
        """These fields as `SamplingParams`; `own` is what the endpoint names in its own way."""
        given = {name: value for name in _PASSED_ON if (value := getattr(self, name)) is not None}
        given.update((name, value) for name, value in own.items() if value is not None)
        return SamplingParams(
            **given,
            max_tokens=max_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
        )

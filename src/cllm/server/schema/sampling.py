"""The sampling parameters that all generating endpoints share."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from cllm.engine.params import MAX_BIAS, RANGES, ContextWindow, SamplingParams
from cllm.errors import named
from cllm.kv.window import MIN_RECENT
from cllm.server.schema.messages import CacheControl
from cllm.server.schema.structure import StructureFields
from cllm.server.schema.validation import (
    A_STRING_OR_STRINGS,
    TOKEN_IDS_AS_KEYS,
    AtMost,
    Int32,
    Int64,
    RequestModel,
    TokenIds,
    Words,
    shorten,
    wrong,
)
from cllm.text.detokenizer import MAX_STOP_CHARACTERS

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def _check_biases(biases: Any) -> Any:
    """One error for all wrong entries; pydantic would report each by itself."""
    if isinstance(biases, dict):
        keys = [shorten(repr(key)) for key in biases if not _TOKEN_ID.fullmatch(key)]
        if keys:
            raise wrong(f"has the {named('key', keys)}; keys are token ids")
        tokens = [key for key, bias in biases.items() if type(bias) not in (int, float)]
        if tokens:
            raise wrong(f"has a bias that is not a number for {named('token', tokens)}")
    return biases


Bias = Annotated[float, Field(json_schema_extra={"minimum": -MAX_BIAS, "maximum": MAX_BIAS})]
Biases = Annotated[
    dict[str, Bias],
    BeforeValidator(_check_biases),
    AtMost("max_logit_bias", "tokens"),
    Field(json_schema_extra={TOKEN_IDS_AS_KEYS: True}),
]
StopString = Annotated[Words, Field(json_schema_extra={"maxLength": MAX_STOP_CHARACTERS})]

StopStrings = Annotated[list[StopString], Field(fail_fast=True), AtMost("max_stop_strings", "strings")]
Stop = Annotated[StopString | StopStrings, A_STRING_OR_STRINGS]
StopTokens = Annotated[TokenIds, AtMost("max_stop_token_ids", "token ids")]


RETURN_PROGRESS = Field(
    None, description="In a stream: report the prompt's progress (`prompt_progress`) until the first token."
)


@dataclass(frozen=True)
class _InRange:
    """Marks a field of `SamplingParams`, with its range."""

    name: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        low, high, open_low = RANGES[self.name]
        shown: dict[str, Any] = {"exclusiveMinimum" if open_low else "minimum": low}
        return {**handler(schema), **(shown if high is None else {**shown, "maximum": high})}

    def _check(self, value: float) -> float:
        if (limit := RANGES[self.name].passed_by(value)) is not None:
            raise wrong(f"is {value}; it must be {limit}")
        return value


def in_range(name: str) -> Any:
    """The ranges of `SamplingParams`, which also checks them itself."""
    return _InRange(name)


class ContextWindowFields(RequestModel):
    recent: Annotated[Int32, Field(json_schema_extra={"minimum": MIN_RECENT})] = Field(
        description="Minimum number of recent tokens to keep, in whole blocks."
    )
    keep: Annotated[Int32, Field(json_schema_extra={"minimum": 0})] = Field(
        4, description="First tokens of the prompt, which are always kept."
    )


class SamplingFields(StructureFields):
    """`null` means the default: the model's, as GET /model/info shows. `SamplingParams` checks the ranges."""

    temperature: Annotated[float, in_range("temperature")] | None = Field(
        None, description="0 is greedy. Default: the model's, else 1."
    )
    top_p: Annotated[float, in_range("top_p")] | None = Field(
        None, description="Keep the likeliest tokens up to this mass. Default: the model's, else 1."
    )
    top_k: Annotated[Int32, in_range("top_k")] | None = Field(
        None, description="Keep this many likeliest tokens; 0 or -1: all. Default: the model's, else all."
    )
    min_p: Annotated[float, in_range("min_p")] | None = Field(
        None, description="Drop tokens below this share of the likeliest one's. Default: the model's, else 0."
    )
    repetition_penalty: Annotated[float, in_range("repetition_penalty")] | None = Field(
        None, description="Above 1 discourages repetition. Default: the model's, else 1."
    )
    frequency_penalty: Annotated[float, in_range("frequency_penalty")] | None = Field(
        None, description="-2 to 2. Default 0."
    )
    presence_penalty: Annotated[float, in_range("presence_penalty")] | None = Field(
        None, description="-2 to 2. Default 0."
    )
    logit_bias: Biases | None = Field(None, description="Token id -> bias from -100 to 100.", examples=[{"42": -100}])
    seed: Int64 | None = Field(
        None, description="Same seed, same output, whatever else is running (llama_cpp and torch: within rounding)."
    )
    stop: Stop | None = Field(None, description="Stop before any of these strings.")
    stop_token_ids: StopTokens | None = Field(None, description="Stop at any of these tokens.")
    ignore_eos: bool | None = Field(None, description="Continue past the end-of-sequence token.")
    min_tokens: Annotated[Int32, in_range("min_tokens")] | None = Field(
        None, description="Minimum number of tokens to generate, at most max_tokens. Default 0."
    )
    context_window: ContextWindowFields | None = Field(
        None,
        description="A rolling window: prompt and answer may be longer than the context, and what lies between the "
        "first and the most recent tokens is forgotten. null: none. Default: kv.window of the server.",
        examples=[{"keep": 16, "recent": 2048}],
    )
    cache_control: CacheControl | None = Field(
        None,
        description="Keep the prompt in the KV cache for a while (a hint, within the server's kv.pin_limit).",
        examples=[{"type": "ephemeral", "ttl": "5m"}],
    )
    return_cache_details: bool | None = Field(
        None,
        description="Also say how much of the prompt was cached, though not in a way that all layers could go on from.",
    )
    priority: Int32 | None = Field(None, description="Lower values run first. Default 0.")
    timeout: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Seconds after which the request fails, at most scheduler.request_timeout_s."
    )

    def sampling(self, *, max_tokens: int | None, **own: Any) -> SamplingParams:
        """These fields as `SamplingParams`; `own`: parameters that the endpoint names differently."""
        given = {name: value for name in _PASSED_ON if (value := getattr(self, name)) is not None}
        given.update((name, value) for name, value in own.items() if value is not None)
        if "context_window" in self.model_fields_set:
            asked = self.context_window
            given["context_window"] = None if asked is None else ContextWindow(asked.recent, asked.keep)
        return SamplingParams.with_model_defaults(
            **given,
            max_tokens=max_tokens,
            structured=self.structure,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
        )


_PASSED_ON = SamplingFields.model_fields.keys() & {field.name for field in fields(SamplingParams)} - {
    "context_window",
    "logit_bias",
    "stop",
}
"""Parameters that need no conversion."""

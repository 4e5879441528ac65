"""Settings of sampling: what holds for a model where a request does not say."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

_ELSE = "(null: what the model's authors recommend, else {})"


class SamplingConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    temperature: float | None = Field(
        default=None,
        ge=0,
        le=100,
        description=f"temperature of requests that set none; 0 is greedy {_ELSE.format(1)}",
    )
    top_p: float | None = Field(
        default=None, gt=0, le=1, description=f"top_p of requests that set none {_ELSE.format(1)}"
    )
    top_k: int | None = Field(
        default=None, ge=-1, description=f"top_k of requests that set none; 0 or -1 is all tokens {_ELSE.format(0)}"
    )
    min_p: float | None = Field(
        default=None, ge=0, le=1, description=f"min_p of requests that set none {_ELSE.format(0)}"
    )
    repetition_penalty: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description=f"repetition_penalty of requests that set none {_ELSE.format(1)}",
    )

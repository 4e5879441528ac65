"""Settings of drafts: tokens that are guessed from what was written before, and checked several at a time."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class DraftsConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    enabled: bool = Field(
        default=True,
        description="guess the next tokens from the request's own text and from recent answers, and check them in one "
        "step; only while that is measured to be faster, and never with other answers than without "
        "(not on torch)",
    )
    max_tokens: int = Field(default=16, ge=1, le=64, description="most drafted tokens of one answer in a step")
    max_step_tokens: int = Field(default=48, ge=1, le=128, description="most drafted tokens of all answers in a step")
    recent_tokens: int = Field(
        default=262_144,
        ge=0,
        le=1 << 26,
        description="tokens of recent answers that drafts are looked up in, of all keys together, 20 bytes each; each "
        "key finds its own alone, a quarter of all at most; 0 keeps none",
    )

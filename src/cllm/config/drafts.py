"""Settings of drafts: tokens that are guessed from what was written before, and checked several at a time."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class DraftsConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    enabled: bool = Field(
        default=True,
        description="draft the next tokens from the request's own text and recent answers and verify them in one "
        "step; used only while measured faster; answers do not change (llama.cpp: within its rounding; not on torch)",
    )
    max_tokens: int = Field(default=16, ge=1, le=64, description="most drafted tokens of one answer in a step")
    max_step_tokens: int = Field(default=48, ge=1, le=128, description="most drafted tokens of all answers in a step")
    recent_tokens: int = Field(
        default=262_144,
        ge=0,
        le=1 << 26,
        description="how many tokens of recent answers to keep for drafts, over all keys (about 20 bytes each); a key "
        "sees only its own and may use a quarter; 0: none",
    )

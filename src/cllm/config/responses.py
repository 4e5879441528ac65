"""Settings of /v1/responses: the answers that are kept, so that a later request can go on from one of them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ResponsesConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    max_stored: int = Field(
        default=1024,
        ge=0,
        le=1 << 20,
        description="most responses kept for previous_response_id and GET, over all keys; a key sees only its own; 0: "
        "none are kept",
    )
    max_stored_bytes: int = Field(
        default=67_108_864, ge=0, description="most bytes they take, each with its whole conversation"
    )
    stored_s: float = Field(default=3600.0, gt=0, description="how long a response is kept after its last use")

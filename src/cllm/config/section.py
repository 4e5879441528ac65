"""What all sections of the settings are."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Strict, so that `port: true` or `port: "8000"` is an error and not a guess."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

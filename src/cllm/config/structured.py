"""Settings of structured output: answers by a JSON schema, a regular expression, a choice or a grammar."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class StructuredConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    max_source_kb: int = Field(
        default=256, ge=1, le=1 << 14, description="largest schema, regular expression or grammar of a request, in KiB"
    )
    compile_timeout_s: float = Field(
        default=5.0, gt=0, le=600, description="how long a request waits for its schema or grammar to be compiled"
    )
    max_compiling: int = Field(
        default=64, ge=1, le=4096, description="schemas and grammars that may wait to be compiled; more get 429"
    )
    max_cached: int = Field(default=128, ge=0, le=1 << 16, description="compiled schemas and grammars to keep")

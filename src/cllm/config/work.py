"""Settings of the processes that do what cannot be bounded beforehand."""

from __future__ import annotations

from pydantic import Field

from cllm.config.section import Section


class WorkConfig(Section):
    processes: int = Field(
        default=2,
        ge=1,
        le=64,
        description="worker processes that render chat templates, compile large grammars and tokenise large texts at "
        "the same time; each API key may have one more, up to 8",
    )
    max_cpu_s: float = Field(default=5.0, gt=0, le=600, description="CPU time that one such job may take")
    max_memory_mb: int = Field(default=512, ge=16, le=1 << 20, description="memory that one such job may take, in MiB")
    max_waiting: int = Field(
        default=256, ge=1, le=1 << 16, description="maximum number of jobs of one API key that wait; more get 429"
    )

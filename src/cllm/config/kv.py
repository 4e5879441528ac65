"""Settings of the KV cache, and the prefixes to compute before the first request (`kv.warm`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from cllm.config.section import Section
from cllm.kv.window import MIN_RECENT

Role = Literal["system", "developer", "user", "assistant"]


class WarmMessage(Section):
    role: Role
    content: str


class WarmPrefix(Section):
    """Exactly one of prompt, messages and file. A plain string is a prompt."""

    prompt: str | None = Field(default=None, min_length=1)
    messages: tuple[WarmMessage, ...] | None = Field(default=None, strict=False, min_length=1)
    file: Path | None = Field(default=None, strict=False)
    """A text file, or messages if its name ends in .json."""
    role: Role | None = None
    """The role of the text's message; without one, the text is the raw beginning of a prompt."""
    pin: bool = True
    ttl_s: float | None = Field(default=None, gt=0)
    shared: bool = True
    """Whether all API keys share this prefix; otherwise only the operator's key uses it."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_a_prompt(cls, data: Any) -> Any:
        return {"prompt": data} if isinstance(data, str) else data

    @model_validator(mode="after")
    def _is_one_thing(self) -> WarmPrefix:
        given = [name for name in ("prompt", "messages", "file") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none of them"
            raise PydanticCustomError(
                "warm", "{problem}", {"problem": f"one of prompt, messages and file, not {found}"}
            )
        if self.role is not None and self.messages is not None:
            problem = "messages, or a text with a role, not both"
            raise PydanticCustomError("warm", "{problem}", {"problem": problem})
        return self


class WindowConfig(Section):
    recent: int | None = Field(
        default=None,
        ge=MIN_RECENT,
        description="rolling window: minimum number of recent tokens to keep, for requests that set no "
        "context_window; answers may then grow beyond the context (null: no window)",
    )
    keep: int = Field(
        default=4, ge=0, description="first tokens of the prompt that always stay in the window (attention sinks)"
    )


class DiskConfig(Section):
    enabled: bool = Field(
        default=True,
        description="keep the K/V of prompts and answers on disk across restarts (fake backend: only if set "
        "explicitly)",
    )
    directory: Path | None = Field(
        default=None,
        strict=False,
        description="directory of the K/V on disk; servers may share it (null: kv in cLLM's cache directory)",
    )
    max_mb: float = Field(
        default=2048.0,
        gt=0,
        le=1e9,
        description="hard limit of the directory's size in MiB, over all models and servers",
    )


class HostConfig(Section):
    max_mb: float | None = Field(
        default=None,
        ge=0,
        description="host memory in MiB per model for K/V evicted from the GPU, so that it need not be computed again "
        "(torch; null: a quarter of the free memory, at most the size of the GPU's KV cache; 0: none)",
    )


class KVConfig(Section):
    release_after_s: float | None = Field(
        default=10.0,
        gt=0,
        description="return unused KV memory to the OS when no request has started or ended for this long, even while "
        "answers are generated (null: never)",
    )
    idle_mb: float | None = Field(
        default=None,
        ge=0,
        description="KV memory in MiB to keep while idle, including cached prefixes (null: a quarter of the KV "
        "memory, at least 8192 tokens or one slot)",
    )
    large_pages: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="use 2 MiB pages for KV memory (native); auto: if the OS offers them on request",
    )
    placement: Literal["runs", "any"] = Field(
        default="runs",
        description="runs: place a prompt's blocks next to each other, apart from generated ones (paged backends)",
    )
    compaction: Literal["auto", "off", "always"] = Field(
        default="auto",
        description="defragment the KV blocks (paged backends): when it pays, never, or always (for benchmarks)",
    )
    compaction_share: float = Field(
        default=0.03,
        gt=0,
        le=1,
        description="share of a step's time that compaction and releasing memory may take while answers are generated",
    )
    window: WindowConfig = WindowConfig()
    host: HostConfig = HostConfig()
    disk: DiskConfig = DiskConfig()
    warm: tuple[WarmPrefix, ...] = Field(
        default=(),
        strict=False,
        description="prompts, messages or files to compute K/V for when the server starts (docs/warm.md)",
    )
    warm_before_ready: bool = Field(
        default=True, description="accept requests only after kv.warm is computed; false: compute it while serving"
    )
    pin_limit: float = Field(
        default=0.25,
        ge=0,
        lt=1,
        description="share of the KV memory for pinned prefixes (llama_cpp: of the store); 0: no pins",
    )
    pin_marks: bool = Field(
        default=True, description="pin prefixes that requests mark with cache_control, for the TTL they give"
    )

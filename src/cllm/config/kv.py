"""Settings of the KV cache, and the prefixes to compute before the first request (`kv.warm`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from cllm.config.section import Section, must_be, setting
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
            raise must_be(f"one of prompt, messages and file, not {found}")
        if self.role is not None and self.messages is not None:
            raise must_be("messages, or a text with a role, not both")
        return self


class WindowConfig(Section):
    recent: int | None = setting(
        None,
        "rolling window: minimum number of recent tokens to keep, for requests that set no "
        "context_window; answers may then grow beyond the context (null: no window)",
        ge=MIN_RECENT,
    )
    keep: int = setting(4, "first tokens of the prompt that always stay in the window (attention sinks)", ge=0)


class SnapshotConfig(Section):
    most: int = setting(
        32,
        "layers with a window or a state: maximum number of places of a cached prompt from where others can go on, "
        "beside pins",
        ge=1,
    )
    share: float = setting(
        2.0,
        "the memory that these may take, as a multiple of what the prompt takes in layers that attend to everything; "
        "up to three are kept whatever they take",
        gt=0,
    )


class DiskConfig(Section):
    enabled: bool = setting(
        True, "keep the K/V of prompts and answers on disk across restarts (fake backend: only if set explicitly)"
    )
    directory: Path | None = setting(
        None, "directory of the K/V on disk; servers may share it (null: kv in cLLM's cache directory)", strict=False
    )
    max_mb: float = setting(
        2048.0, "hard limit of the directory's size in MiB, over all models and servers", gt=0, le=1e9
    )


class HostConfig(Section):
    max_mb: float | None = setting(
        None,
        "host memory in MiB per model for K/V evicted from the GPU, so that it need not be computed again "
        "(torch; null: a quarter of the free memory, at most the size of the GPU's KV cache; 0: none)",
        ge=0,
    )


class KVConfig(Section):
    release_after_s: float | None = setting(
        10.0,
        "return unused KV memory to the OS when no request has started or ended for this long, even while "
        "answers are generated (null: never)",
        gt=0,
    )
    idle_mb: float | None = setting(
        None,
        "KV memory in MiB to keep while idle, including cached prefixes (null: a quarter of the KV "
        "memory, at least 8192 tokens or one slot)",
        ge=0,
    )
    large_pages: Literal["auto", "always", "never"] = setting(
        "auto", "use 2 MiB pages for KV memory (native); auto: if the OS offers them on request"
    )
    placement: Literal["runs", "any"] = setting(
        "runs", "runs: place a prompt's blocks next to each other, apart from generated ones (paged backends)"
    )
    free_behind_windows: bool = setting(
        True,
        "keep the K/V of layers with a sliding window apart, and free what is behind the window (native; torch on a "
        "CPU); false: keep all of it, so that cached prefixes can be continued anywhere",
    )
    compaction: Literal["auto", "off", "always"] = setting(
        "auto", "defragment the KV blocks (paged backends): when it pays, never, or always (for benchmarks)"
    )
    compaction_share: float = setting(
        0.03,
        "share of a step's time that compaction and releasing memory may take while answers are generated",
        gt=0,
        le=1,
    )
    window: WindowConfig = WindowConfig()
    snapshots: SnapshotConfig = SnapshotConfig()
    host: HostConfig = HostConfig()
    disk: DiskConfig = DiskConfig()
    warm: tuple[WarmPrefix, ...] = setting(
        (), "prompts, messages or files to compute K/V for when the server starts (docs/warm.md)", strict=False
    )
    warm_before_ready: bool = setting(
        True, "accept requests only after kv.warm is computed; false: compute it while serving"
    )
    pin_limit: float = setting(
        0.25, "share of the KV memory for pinned prefixes (llama_cpp: of the store); 0: no pins", ge=0, lt=1
    )
    pin_marks: bool = setting(True, "pin prefixes that requests mark with cache_control, for the TTL they give")

"""Every setting cLLM has: name, type, range, default and what it is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from cllm.config.chat import ChatConfig
from cllm.config.drafts import DraftsConfig
from cllm.config.entries import ModelEntry
from cllm.config.patterns import what_is_wrong
from cllm.config.problems import InvalidConfigError
from cllm.config.relations import check_relations
from cllm.config.responses import ResponsesConfig
from cllm.config.sampling import SamplingConfig
from cllm.config.section import Section
from cllm.config.server import ServerConfig
from cllm.config.structured import StructuredConfig
from cllm.config.warm import WarmPrefix
from cllm.kv.window import MIN_RECENT

BackendType = Literal["auto", "native", "llama_cpp", "torch", "fake"]
InstructionSet = Literal["auto", "amx", "avx512", "avxvnni", "avx2", "generic"]
KVType = Literal["f16", "q8_0", "q4_0", "bf16", "f32", "fp8", "int8"]
LLAMA_CPP_MAX_SEQ = 256
"""llama.cpp's own compiled-in limit of sequences per context."""


class ModelConfig(Section):
    name: str = Field(
        default="smollm2",
        min_length=1,
        description="a known name, a .gguf file, a Hugging Face directory, hf:org/repo, hf:org/repo:Q4_K_M or "
        "hf:org/repo/file.gguf",
    )
    chat_template: Path | None = Field(
        default=None, strict=False, description="Jinja file to use instead of the model's own chat template"
    )
    alias: str | None = Field(default=None, min_length=1, description="name shown to clients (null: the model's name)")
    sampling: SamplingConfig = SamplingConfig()


class NativeConfig(Section):
    instruction_set: InstructionSet = Field(
        default="auto",
        description="instructions to compute and to choose tokens with; auto takes the best that the CPU has",
    )


class LlamaCppConfig(Section):
    n_seq_max: int = Field(
        default=8, ge=1, le=LLAMA_CPP_MAX_SEQ, description="most sequences at once, each with room for a full context"
    )
    slots_on_demand: bool = Field(
        default=True,
        description="take memory for more sequences when they come, and give it back when it is quiet; "
        "false takes all of it at the start",
    )
    n_batch: int = Field(default=2048, ge=1, le=1 << 20, description="most tokens in one call of llama_decode")
    n_ubatch: int = Field(default=512, ge=1, le=1 << 20, description="most tokens llama.cpp computes at a time")
    flash_attention: bool = Field(default=True, description="flash attention; quantised V needs it")
    mmap: bool = Field(default=True, description="map the model file instead of reading it into memory")
    mlock: bool = Field(default=False, description="keep the model from being swapped out")


class TorchConfig(Section):
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$",
        description="auto, cpu, cuda or cuda:1; auto is the GPU if there is one",
    )
    dtype: Literal["auto", "bf16", "f16", "f32", "fp8"] = Field(
        default="auto",
        description="type of the weights in memory; auto is bf16 on a GPU (f16 below compute "
        "capability 8.0) and f32 on a CPU; fp8 halves bf16 "
        "(a GPU needs compute capability 8.9 or newer for it)",
    )
    batch_invariant: bool = Field(
        default=False,
        description="give every request the same answer to the bit alone and among others; slower (native always does)",
    )


class FakeConfig(Section):
    layout: Literal["paged", "slots"] = Field(default="paged", description="which kind of KV memory to imitate")
    latency_ms: float = Field(default=0.0, ge=0, le=60_000, description="time every step takes")
    vocab_size: int = Field(default=320, ge=258, le=1 << 20, description="tokens in the vocabulary: 256 bytes and more")


class BackendConfig(Section):
    type: BackendType = Field(
        default="auto",
        description="what runs the model; auto is torch for Hugging Face directories and where there is a GPU, "
        "otherwise native, or llama_cpp for models native cannot run",
    )
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="compute threads (null: chosen from the CPUs cLLM may use)"
    )
    native: NativeConfig = NativeConfig()
    llama_cpp: LlamaCppConfig = LlamaCppConfig()
    torch: TorchConfig = TorchConfig()
    fake: FakeConfig = FakeConfig()


class ResourcesConfig(Section):
    kv_cache_max_size: int | None = Field(
        default=None, ge=1, description="most sequences in the KV cache, running and held (null: as memory allows)"
    )
    kv_cache_max_memory_mb: float | None = Field(
        default=None, gt=0, description="hard limit of KV memory in MiB (null: kv_memory_fraction decides)"
    )
    max_memory_mb: float | None = Field(
        default=None,
        gt=0,
        description="hard limit of the weights and KV memory of all models together in MiB (null: with several models "
        "half of the memory that is free at the start)",
    )
    kv_memory_fraction: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="share of the memory left after the weights that the KV cache may take (on a GPU 0.9 unless set)",
    )
    max_context_length: int | None = Field(
        default=None, ge=2, description="most tokens in a sequence (null: the model's own; on a CPU at most 8192)"
    )
    kv_type_k: KVType = Field(
        default="f16",
        description="type of cached keys; q8_0 and q4_0 on native and llama_cpp, bf16, f32, fp8 and int8 on torch",
    )
    kv_type_v: KVType = Field(default="f16", description="type of cached values; on torch that of the keys")
    block_size: int = Field(
        default=16, ge=1, le=1024, description="tokens in a KV block (paged backends; native: a multiple of 16)"
    )


class WindowConfig(Section):
    recent: int | None = Field(
        default=None,
        ge=MIN_RECENT,
        description="rolling window: most recent tokens that stay, at least, in requests that do not set their own "
        "context_window; answers go on beyond the context (null: no window)",
    )
    keep: int = Field(
        default=4, ge=0, description="first tokens of a prompt that stay for good in such a window (attention sinks)"
    )


class DiskConfig(Section):
    enabled: bool = Field(
        default=True,
        description="keep K/V of prompts and answers on disk, so that they outlive the server (with the fake backend "
        "only where this is set)",
    )
    directory: Path | None = Field(
        default=None,
        strict=False,
        description="where K/V of prompts are kept; servers may share it (null: kv in cLLM's cache directory)",
    )
    max_mb: float = Field(
        default=2048.0,
        gt=0,
        le=1e9,
        description="hard limit of all K/V in that directory in MiB, of all models and servers",
    )


class HostConfig(Section):
    max_mb: float | None = Field(
        default=None,
        ge=0,
        description="host memory in MiB for K/V that leave a GPU's, from where they come back sooner than they are "
        "computed, for each model (torch; null: on a GPU a quarter of what is free, at most what the GPU has for K/V; "
        "0: none)",
    )


class KVConfig(Section):
    release_after_s: float | None = Field(
        default=10.0,
        gt=0,
        description="after so long without a request that comes or ends, free KV memory goes back to the OS, "
        "even while answers are generated (null: never)",
    )
    idle_mb: float | None = Field(
        default=None,
        ge=0,
        description="KV memory in MiB that may stay taken while idle, cached prefixes included "
        "(null: a quarter of the KV memory, at least one full context)",
    )
    large_pages: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="2 MiB pages for KV memory (native); auto uses them where the OS grants them on request",
    )
    placement: Literal["runs", "any"] = Field(
        default="runs",
        description="runs puts a prompt's blocks side by side, apart from generated ones (paged backends)",
    )
    compaction: Literal["auto", "off", "always"] = Field(
        default="auto",
        description="move KV blocks together (paged backends): when it pays, never, or all the time, for measuring",
    )
    compaction_share: float = Field(
        default=0.03,
        gt=0,
        le=1,
        description="share of a step's time that compaction and giving memory back may take "
        "while answers are generated",
    )
    window: WindowConfig = WindowConfig()
    host: HostConfig = HostConfig()
    disk: DiskConfig = DiskConfig()
    warm: tuple[WarmPrefix, ...] = Field(
        default=(),
        strict=False,
        description="prompts, messages or files whose K/V are computed when the server starts; see docs/warm.md",
    )
    warm_before_ready: bool = Field(
        default=True, description="take requests only when kv.warm is computed; false computes it beside them"
    )
    pin_limit: float = Field(
        default=0.25,
        ge=0,
        lt=1,
        description="share of KV memory that pinned prefixes may take (llama_cpp: of the store); 0: no pins",
    )
    pin_marks: bool = Field(
        default=True, description="pin what requests mark with cache_control, for as long as the mark says"
    )


class SchedulerConfig(Section):
    max_running: int | None = Field(
        default=None, ge=1, description="most requests computed at once (null: n_seq_max; 256 on paged backends)"
    )
    max_queue: int = Field(default=256, ge=1, description="most requests waiting; more are refused with 429")
    kv_cache_eviction_threshold: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="share of the cache in use from which held sequences are evicted (llama_cpp: of the store)",
    )
    eviction_policy: Literal["lru", "slru"] = Field(
        default="lru", description="what goes first: lru, or slru, which spares what was found again"
    )
    inter_token_target_ms: float = Field(
        default=100.0,
        gt=0,
        description="mean time between an answer's tokens that others' prompts may cause while few of them wait",
    )
    max_gap_ms: float | None = Field(
        default=None,
        gt=0,
        description="longest time between two tokens of an answer (P99), however many prompts arrive, if the answers "
        "themselves leave room for that (null: 250; llama_cpp: 1000, since small chunks of prompts cost it more)",
    )
    prefill_target_ms: float = Field(
        default=1000.0, gt=0, description="step time to keep to while nobody is generating"
    )
    max_step_tokens: int | None = Field(
        default=None, ge=1, le=1 << 20, description="most prompt tokens in one step (null: 512; 8192 on a GPU)"
    )
    watermark: float = Field(
        default=0.02, ge=0, lt=1, description="share of KV memory kept free when admitting (paged backends)"
    )
    ageing_s: float = Field(default=10.0, gt=0, description="waiting this long raises a request by one priority")
    request_timeout_s: float = Field(default=600.0, gt=0, description="a request older than this ends with 408")


BILLING_HEADER = r"x-anthropic-billing-header:(?:[ \t]*[\w.-]+=[^;\s]*;?)+[ \t]*"
"""What coding agents put before their system prompt, another one with every request: names and values, with semicolons
between them. The prompt itself may begin behind the last one, on the same line."""


class PromptConfig(Section):
    volatile_patterns: tuple[str, ...] = Field(
        default=(BILLING_HEADER,),
        strict=False,
        description="regular expressions of what changes with every request at the beginning of lines of system "
        "prompts; it is taken out, so that the prefix stays the same",
    )

    @field_validator("volatile_patterns")
    @classmethod
    def _patterns_are_some(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            if (wrong := what_is_wrong(pattern)) is not None:
                problem = f"regular expressions; {pattern!r} {wrong}"
                raise PydanticCustomError("pattern", "{problem}", {"problem": problem})
        return patterns


class LogConfig(Section):
    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least important to log")
    format: Literal["text", "json"] = Field(default="text", description="text, or one JSON object per line")
    efficiency_interval_s: float = Field(
        default=60.0, ge=0, description="time between cache-efficiency lines; 0 switches them off"
    )


class Config(Section):
    """The whole tree. One that exists is valid: impossible combinations raise `ConfigError` here."""

    model: ModelConfig = ModelConfig()
    models: tuple[ModelEntry, ...] = Field(
        default=(),
        strict=False,
        description="several models at once: names, or entries with settings of their own (docs/models.md); "
        "then model.name counts for nothing",
    )
    backend: BackendConfig = BackendConfig()
    resources: ResourcesConfig = ResourcesConfig()
    kv: KVConfig = KVConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    drafts: DraftsConfig = DraftsConfig()
    structured: StructuredConfig = StructuredConfig()
    server: ServerConfig = ServerConfig()
    prompt: PromptConfig = PromptConfig()
    chat: ChatConfig = ChatConfig()
    responses: ResponsesConfig = ResponsesConfig()
    log: LogConfig = LogConfig()

    def at(self, key: str) -> Any:
        """The value of a dotted key, such as "server.port"."""
        value: Any = self
        for part in key.split("."):
            value = getattr(value, part)
        return value

    @model_validator(mode="after")
    def _relations_hold(self, info: ValidationInfo) -> Config:
        if problems := check_relations(self, (info.context or {}).get("origins", {})):
            raise InvalidConfigError(problems)
        return self

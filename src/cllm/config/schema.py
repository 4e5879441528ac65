"""The configuration schema: every setting with its type, range, default and description."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationInfo, field_validator, model_validator

from cllm.config.backend import BackendConfig
from cllm.config.cluster import ClusterConfig
from cllm.config.consistency import check_consistency
from cllm.config.errors import InvalidConfigError
from cllm.config.kv import KVConfig
from cllm.config.line_pattern import pattern_error
from cllm.config.model_entry import ModelEntry
from cllm.config.section import Section, must_be, setting
from cllm.config.server import ResponsesConfig, ServerConfig, StructuredConfig, WorkConfig

_HTTP_URL = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")

KVType = Literal["f16", "q8_0", "q4_0", "bf16", "f32", "fp8", "int8"]


_DEFAULT = "(null: the model authors' recommendation, or {})"


class SamplingConfig(Section):
    temperature: float | None = setting(None, f"default temperature; 0 is greedy {_DEFAULT.format(1)}", ge=0, le=100)
    top_p: float | None = setting(None, f"default top_p {_DEFAULT.format(1)}", gt=0, le=1)
    top_k: int | None = setting(None, f"default top_k; 0 or -1: all tokens {_DEFAULT.format(0)}", ge=-1)
    min_p: float | None = setting(None, f"default min_p {_DEFAULT.format(0)}", ge=0, le=1)
    repetition_penalty: float | None = setting(None, f"default repetition_penalty {_DEFAULT.format(1)}", gt=0, le=100)


class ModelConfig(Section):
    name: str = setting(
        "smollm2",
        "smollm2, a .gguf file, a Hugging Face directory, hf:org/repo, hf:org/repo:Q4_K_M or hf:org/repo/file.gguf",
        min_length=1,
    )
    chat_template: Path | None = setting(None, "Jinja file that replaces the model's chat template", strict=False)
    alias: str | None = setting(None, "model name shown to clients (null: the model's own)", min_length=1)
    sampling: SamplingConfig = SamplingConfig()


class ResourcesConfig(Section):
    kv_cache_max_size: int | None = setting(
        None,
        "maximum number of sequences in the KV cache, running or held; pinned ones do not count (null: "
        "limited by memory only)",
        ge=1,
    )
    kv_cache_max_memory_mb: float | None = setting(
        None, "hard limit of the KV memory in MiB (null: set by kv_memory_fraction)", gt=0
    )
    max_memory_mb: float | None = setting(
        None,
        "hard limit of the weights and KV memory of all models in MiB (null: with several models, half of "
        "the memory that is free at the start)",
        gt=0,
    )
    kv_memory_fraction: float = setting(
        0.25,
        "share of the memory left after loading the weights to use for the KV cache (on a GPU 0.9 unless set)",
        gt=0,
        le=1,
    )
    max_context_length: int | None = setting(
        None,
        "maximum number of tokens in a sequence (null: the model's own context, as far as the KV memory holds it)",
        ge=2,
    )
    kv_type_k: KVType = setting(
        "f16", "type of the cached keys; native and llama_cpp: f16, q8_0, q4_0; torch: f16, bf16, f32, fp8, int8"
    )
    kv_type_v: KVType = setting("f16", "type of the cached values; torch: the same as kv_type_k")
    block_size: int = setting(16, "tokens per KV block (paged backends; native: a multiple of 16)", ge=1, le=1024)


class SchedulerConfig(Section):
    max_running: int | None = setting(
        None,
        "maximum number of running requests (null: kv_cache_max_size, at most 256, on paged backends; "
        "llama_cpp: n_seq_max)",
        ge=1,
    )
    max_queue: int = setting(256, "maximum number of waiting requests; more are refused with 429", ge=1)
    kv_cache_eviction_threshold: float = setting(
        0.8, "share of the cache in use above which held sequences are evicted (llama_cpp: of the store)", gt=0, le=1
    )
    eviction_policy: Literal["worth", "lru", "slru"] = setting(
        "worth",
        "what is evicted first: worth: what saves the least computing per byte, with age (as lru, except where layers "
        "have a window or a state); lru: what was not used for the longest time; slru: the same, but what was never "
        "reused first",
    )
    inter_token_target_ms: float = setting(
        100.0,
        "target for the mean time between tokens while other requests' prompts are computed and few of them wait",
        gt=0,
    )
    max_gap_ms: float | None = setting(
        None,
        "maximum time between two tokens of an answer (P99), however many prompts arrive, as far as "
        "decoding itself allows (null: 250; llama_cpp: 1000, as small prompt chunks are slower there)",
        gt=0,
    )
    prefill_target_ms: float = setting(1000.0, "target for the step time while only prompts are computed", gt=0)
    max_step_tokens: int | None = setting(
        None, "maximum number of prompt tokens per step (null: 512; 8192 on a GPU)", ge=1, le=1 << 20
    )
    watermark: float = setting(
        0.02, "share of the KV memory to keep free when admitting requests (paged backends)", ge=0, lt=1
    )
    ageing_s: float = setting(10.0, "waiting time after which a request moves up by one priority", gt=0)
    request_timeout_s: float = setting(600.0, "maximum age of a request; older ones end with 408", gt=0)


class DraftsConfig(Section):
    enabled: bool = setting(
        True,
        "speculative decoding: draft tokens from the request's own text and recent answers, and verify "
        "them in one step; used only while it is faster; answers do not change (llama_cpp: within its rounding; "
        "not on torch, nor where layers carry a state)",
    )
    max_tokens: int = setting(16, "maximum number of drafted tokens per answer and step", ge=1, le=64)
    max_step_tokens: int = setting(48, "maximum number of drafted tokens per step, over all answers", ge=1, le=128)
    recent_tokens: int = setting(
        262_144,
        "tokens of recent answers to keep for drafts, over all keys (about 20 bytes each); a key sees "
        "only its own answers and may use a quarter of this; 0: none",
        ge=0,
        le=1 << 26,
    )


BILLING_HEADER = r"x-anthropic-billing-header:(?:[ \t]*[\w.-]+=[^;\s]*;?)+[ \t]*"
"""Names and values, separated by semicolons, that coding agents put before their system prompt and change with every
request. The prompt itself may follow on the same line."""


class PromptConfig(Section):
    volatile_patterns: tuple[str, ...] = setting(
        (BILLING_HEADER,),
        "regular expressions for text at the start of lines of system prompts that changes with every "
        "request; it is removed, so that the prefix stays cached",
        strict=False,
    )

    @field_validator("volatile_patterns")
    @classmethod
    def _patterns_are_valid(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            if (wrong := pattern_error(pattern)) is not None:
                raise must_be(f"regular expressions; {pattern!r} {wrong}")
        return patterns


class ChatConfig(Section):
    tool_format: Literal["auto", "hermes", "qwen3_coder", "llama3", "mistral", "json"] = setting(
        "auto", "format of the model's tool calls (docs/tools.md); auto: that of its chat template"
    )
    reasoning: Literal["auto", "on", "off"] = setting(
        "auto",
        "return reasoning as reasoning_content; auto: if the chat template marks it; off: leave it in the "
        "text; a request may override this",
    )
    reasoning_format: Literal["auto", "think", "mistral", "seed", "cohere"] = setting(
        "auto", "marks around reasoning; auto: those of the chat template, or <think>"
    )


class LogConfig(Section):
    level: Literal["debug", "info", "warning", "error"] = setting("info", "lowest level to log")
    format: Literal["text", "json"] = setting("text", "text lines, or one JSON object per line")
    efficiency_interval_s: float = setting(60.0, "interval of the cache-efficiency lines; 0: off", ge=0)


class ObserveConfig(Section):
    otlp_endpoint: str | None = setting(
        None,
        "URL of an OpenTelemetry collector, such as http://127.0.0.1:4318, that gets a trace of each "
        "request over OTLP/HTTP; needs the extra otel (null: the variable OTEL_EXPORTER_OTLP_ENDPOINT, or no traces)",
    )

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_a_url(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not _HTTP_URL.fullmatch(endpoint):
            raise must_be("a URL such as http://127.0.0.1:4318")
        return endpoint


class Config(Section):
    """All settings. An instance is always valid: contradictory settings raise `ConfigError`."""

    model: ModelConfig = ModelConfig()
    models: tuple[ModelEntry, ...] = setting(
        (),
        "several models: names, or entries with their own settings (docs/models.md); replaces model.name",
        strict=False,
    )
    backend: BackendConfig = BackendConfig()
    resources: ResourcesConfig = ResourcesConfig()
    kv: KVConfig = KVConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    drafts: DraftsConfig = DraftsConfig()
    structured: StructuredConfig = StructuredConfig()
    work: WorkConfig = WorkConfig()
    server: ServerConfig = ServerConfig()
    prompt: PromptConfig = PromptConfig()
    chat: ChatConfig = ChatConfig()
    responses: ResponsesConfig = ResponsesConfig()
    cluster: ClusterConfig = ClusterConfig()
    log: LogConfig = LogConfig()
    observe: ObserveConfig = ObserveConfig()

    def at(self, key: str) -> Any:
        """The value of a dotted key, such as "server.port"."""
        value: Any = self
        for part in key.split("."):
            value = getattr(value, part)
        return value

    @model_validator(mode="after")
    def _is_consistent(self, info: ValidationInfo) -> Config:
        if problems := check_consistency(self, (info.context or {}).get("origins", {})):
            raise InvalidConfigError(problems)
        return self

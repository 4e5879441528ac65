"""Settings of the HTTP server, of stored responses, structured output and worker processes."""

from __future__ import annotations

from pathlib import Path

from pydantic import field_validator
from pydantic_core import PydanticKnownError

from cllm.config.section import Section, setting


class ServerConfig(Section):
    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0: all addresses", min_length=1)
    port: int = setting(8000, "port to listen on; 0: any free port", ge=0, le=65_535)
    api_key: str | None = setting(None, "API key that clients must send (null: no key)", min_length=1, repr=False)
    api_keys: Path | None = setting(
        None,
        "file of named API keys, created by `cllm keys add`; each key has its own cached prefixes (null: none)",
        strict=False,
    )
    share_prefixes: bool = setting(
        False,
        "share cached prefixes, and recent answers for drafts, between all keys; clients can then guess "
        "each other's prompts and answers from cached_tokens and timing",
    )
    cors_origins: tuple[str, ...] = setting(
        (), 'web origins that may call the API from a browser; ["*"]: any', strict=False
    )
    max_connections: int = setting(1024, "maximum number of connections; fewer if the open-file limit is lower", ge=1)
    max_header_bytes: int = setting(65_536, "maximum size of the request line and headers", ge=1024)
    max_body_bytes: int = setting(4_194_304, "maximum size of a request body", ge=1024)
    max_bodies_bytes: int = setting(
        67_108_864, "maximum size of all request bodies being received; beyond it, the newest clients wait", ge=1024
    )
    header_timeout_s: float = setting(10.0, "time a client has to send the headers", gt=0)
    body_timeout_s: float = setting(60.0, "time a client has to send the body", gt=0)
    write_timeout_s: float = setting(30.0, "disconnect a client that has not read its answer for this long", gt=0)
    sse_keepalive_s: float = setting(
        15.0,
        "send a comment on a stream that has been silent for this long, so that proxies keep it open; 0: never",
        ge=0,
    )
    max_json_values: int = setting(
        262_144, "maximum number of values in a JSON body; a string counts as one", ge=16_384
    )
    max_json_keys: int = setting(32_768, "maximum number of keys in a JSON body", ge=16_384)
    max_messages: int = setting(4096, "maximum number of messages in a chat", ge=1)
    max_prompts: int = setting(128, "maximum number of answers per request: prompts x n", ge=1)
    max_inputs: int = setting(2048, "maximum number of texts to embed, or documents to rank, per request", ge=1)
    max_stop_strings: int = setting(16, "maximum number of stop strings per request", ge=0)
    max_stop_token_ids: int = setting(1024, "maximum number of stop tokens per request", ge=0)
    max_logit_bias: int = setting(1024, "maximum number of tokens in logit_bias", ge=0)
    max_logprobs: int = setting(
        1_000_000, "maximum number of log probabilities per request: n x tokens x (1 + top_logprobs)", ge=0
    )
    max_encode_tokens: int = setting(
        131_072, "maximum number of tokens that POST /encode counts, and of a prompt with a rolling window", ge=1
    )
    root_path: str = setting(
        "",
        "path prefix of the server behind a proxy, such as /llm; removed from requests that include it",
        pattern=r"^(/[A-Za-z0-9._~-]+)*$",
    )
    page: bool = setting(True, "serve the web page at / and its event stream at /kv/stream")
    page_shows_prompts: bool = setting(
        False, "show the beginning of cached prompts on the page, to everyone who can open it"
    )
    max_watchers: int = setting(32, "maximum number of open pages; more are refused with 503", ge=1)
    metrics_prefix: str = setting("cllm", "prefix of all metric names", pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$")
    shutdown_grace_s: float = setting(10.0, "time that running requests have to finish at shutdown", ge=0)

    @property
    def needs_key(self) -> bool:
        return self.api_key is not None or self.api_keys is not None

    @field_validator("api_key")
    @classmethod
    def _key_is_one(cls, key: str | None) -> str | None:
        """A blank key comes from an unset variable, not from someone who wants no key."""
        if key is not None and not key.strip():
            raise PydanticKnownError("string_too_short", {"min_length": 1})
        return key


class ResponsesConfig(Section):
    max_stored: int = setting(
        1024,
        "maximum number of responses stored for previous_response_id and GET, over all keys; each key "
        "sees only its own; 0: store none",
        ge=0,
        le=1 << 20,
    )
    max_stored_bytes: int = setting(
        67_108_864, "maximum size of the stored responses, each with its whole conversation", ge=0
    )
    stored_s: float = setting(3600.0, "time that a response is stored after its last use", gt=0)


class StructuredConfig(Section):
    max_source_kb: int = setting(
        256, "maximum size of a schema, regular expression or grammar, in KiB", ge=1, le=1 << 14
    )
    compile_timeout_s: float = setting(2.0, "CPU time that compiling a schema or grammar may take", gt=0, le=600)
    max_compile_mb: int = setting(32, "memory that compiling a schema or grammar may take, in MiB", ge=8, le=1 << 16)
    max_compiling: int = setting(
        64,
        "maximum number of schemas and grammars of one API key being compiled, or waiting for it; more get 429",
        ge=1,
        le=4096,
    )
    max_cached_mb: int = setting(
        256, "memory of all compiled schemas and grammars, cached or in use, in MiB", ge=1, le=1 << 16
    )


class WorkConfig(Section):
    """Worker processes, which do what cannot be bounded beforehand."""

    processes: int = setting(
        2,
        "worker processes that render chat templates, compile large grammars and tokenise large texts at "
        "the same time; each API key may have one more, up to 8",
        ge=1,
        le=64,
    )
    max_cpu_s: float = setting(5.0, "CPU time that one such job may take", gt=0, le=600)
    max_memory_mb: int = setting(512, "memory that one such job may take, in MiB", ge=16, le=1 << 20)
    max_waiting: int = setting(256, "maximum number of jobs of one API key that wait; more get 429", ge=1, le=1 << 16)

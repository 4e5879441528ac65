"""Settings of the HTTP server, of stored responses and of structured output."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator
from pydantic_core import PydanticKnownError

from cllm.config.section import Section


class ServerConfig(Section):
    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0: all addresses")
    port: int = Field(default=8000, ge=0, le=65_535, description="port to listen on; 0: any free port")
    api_key: str | None = Field(
        default=None, min_length=1, repr=False, description="API key that clients must send (null: no key)"
    )
    api_keys: Path | None = Field(
        default=None,
        strict=False,
        description="file of named API keys, created by `cllm keys add`; each key has its own cached prefixes (null: "
        "none)",
    )
    share_prefixes: bool = Field(
        default=False,
        description="share cached prefixes, and recent answers for drafts, between all keys; clients can then guess "
        "each other's prompts and answers from cached_tokens and timing",
    )
    cors_origins: tuple[str, ...] = Field(
        default=(), strict=False, description='web origins that may call the API from a browser; ["*"]: any'
    )
    max_connections: int = Field(
        default=1024, ge=1, description="maximum number of connections; fewer if the open-file limit is lower"
    )
    max_header_bytes: int = Field(default=65_536, ge=1024, description="maximum size of the request line and headers")
    max_body_bytes: int = Field(default=4_194_304, ge=1024, description="maximum size of a request body")
    max_bodies_bytes: int = Field(
        default=67_108_864,
        ge=1024,
        description="maximum size of all request bodies being received; beyond it, the newest clients wait",
    )
    header_timeout_s: float = Field(default=10.0, gt=0, description="time a client has to send the headers")
    body_timeout_s: float = Field(default=60.0, gt=0, description="time a client has to send the body")
    write_timeout_s: float = Field(
        default=30.0, gt=0, description="disconnect a client that has not read its answer for this long"
    )
    sse_keepalive_s: float = Field(
        default=15.0,
        ge=0,
        description="send a comment on a stream that has been silent for this long, so that proxies keep it open; 0: "
        "never",
    )
    max_json_values: int = Field(
        default=262_144, ge=16_384, description="maximum number of values in a JSON body; a string counts as one"
    )
    max_json_keys: int = Field(default=32_768, ge=16_384, description="maximum number of keys in a JSON body")
    max_messages: int = Field(default=4096, ge=1, description="maximum number of messages in a chat")
    max_prompts: int = Field(default=128, ge=1, description="maximum number of answers per request: prompts x n")
    max_inputs: int = Field(
        default=2048, ge=1, description="maximum number of texts to embed, or documents to rank, per request"
    )
    max_stop_strings: int = Field(default=16, ge=0, description="maximum number of stop strings per request")
    max_stop_token_ids: int = Field(default=1024, ge=0, description="maximum number of stop tokens per request")
    max_logit_bias: int = Field(default=1024, ge=0, description="maximum number of tokens in logit_bias")
    max_logprobs: int = Field(
        default=1_000_000,
        ge=0,
        description="maximum number of log probabilities per request: n x tokens x (1 + top_logprobs)",
    )
    max_encode_tokens: int = Field(
        default=131_072,
        ge=1,
        description="maximum number of tokens that POST /encode counts, and of a prompt with a rolling window",
    )
    root_path: str = Field(
        default="",
        pattern=r"^(/[A-Za-z0-9._~-]+)*$",
        description="path prefix of the server behind a proxy, such as /llm; removed from requests that include it",
    )
    page: bool = Field(default=True, description="serve the web page at / and its event stream at /kv/stream")
    page_shows_prompts: bool = Field(
        default=False, description="show the beginning of cached prompts on the page, to everyone who can open it"
    )
    max_watchers: int = Field(default=32, ge=1, description="maximum number of open pages; more are refused with 503")
    metrics_prefix: str = Field(
        default="cllm", pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$", description="prefix of all metric names"
    )
    shutdown_grace_s: float = Field(
        default=10.0, ge=0, description="time that running requests have to finish at shutdown"
    )

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
    max_stored: int = Field(
        default=1024,
        ge=0,
        le=1 << 20,
        description="maximum number of responses stored for previous_response_id and GET, over all keys; each key "
        "sees only its own; 0: store none",
    )
    max_stored_bytes: int = Field(
        default=67_108_864, ge=0, description="maximum size of the stored responses, each with its whole conversation"
    )
    stored_s: float = Field(default=3600.0, gt=0, description="time that a response is stored after its last use")


class StructuredConfig(Section):
    max_source_kb: int = Field(
        default=256, ge=1, le=1 << 14, description="maximum size of a schema, regular expression or grammar, in KiB"
    )
    compile_timeout_s: float = Field(
        default=2.0, gt=0, le=600, description="CPU time that compiling a schema or grammar may take"
    )
    max_compile_mb: int = Field(
        default=32, ge=8, le=1 << 16, description="memory that compiling a schema or grammar may take, in MiB"
    )
    max_compiling: int = Field(
        default=64,
        ge=1,
        le=4096,
        description="maximum number of schemas and grammars of one API key being compiled, or waiting for it; more "
        "get 429",
    )
    max_cached_mb: int = Field(
        default=256,
        ge=1,
        le=1 << 16,
        description="memory of all compiled schemas and grammars, cached or in use, in MiB",
    )

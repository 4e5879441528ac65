"""Settings of the HTTP server."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator
from pydantic_core import PydanticKnownError

from cllm.config.section import Section


class ServerConfig(Section):
    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 is every one")
    port: int = Field(default=8000, ge=0, le=65_535, description="port to listen on; 0 takes any free one")
    api_key: str | None = Field(
        default=None, min_length=1, repr=False, description="key that clients must send (null: none)"
    )
    api_keys: Path | None = Field(
        default=None,
        strict=False,
        description="file of named keys that clients may send, made by `cllm keys add`; each has cached prefixes of "
        "its own (null: none)",
    )
    share_prefixes: bool = Field(
        default=False,
        description="share cached prefixes, and recent answers for drafts, between all keys; cached_tokens and timing "
        "then tell others' prompts and answers",
    )
    cors_origins: tuple[str, ...] = Field(
        default=(), strict=False, description='web origins that browsers may call from; ["*"] is any'
    )
    max_connections: int = Field(
        default=1024, ge=1, description="most connections at once; fewer where the process may open fewer files"
    )
    max_header_bytes: int = Field(default=65_536, ge=1024, description="largest request line and headers together")
    max_body_bytes: int = Field(default=4_194_304, ge=1024, description="largest request body")
    max_bodies_bytes: int = Field(
        default=67_108_864,
        ge=1024,
        description="most bytes of unfinished bodies of all clients together; beyond it the newest have to wait",
    )
    header_timeout_s: float = Field(default=10.0, gt=0, description="time a client has to send its headers")
    body_timeout_s: float = Field(default=60.0, gt=0, description="time a client has to send a request's body")
    write_timeout_s: float = Field(
        default=30.0, gt=0, description="a client that has not read its answer for this long is cut off"
    )
    sse_keepalive_s: float = Field(
        default=15.0,
        ge=0,
        description="silence after which a stream gets a comment, so that proxies keep it open; 0: none",
    )
    max_json_values: int = Field(
        default=262_144, ge=16_384, description="most values in the JSON of a body; a long text is one"
    )
    max_json_keys: int = Field(default=32_768, ge=16_384, description="most keys in the JSON of a body")
    max_messages: int = Field(default=4096, ge=1, description="most messages in a chat")
    max_prompts: int = Field(default=128, ge=1, description="most answers to a request: its prompts times n")
    max_inputs: int = Field(default=2048, ge=1, description="most texts to embed, or documents to rank, in a request")
    max_stop_strings: int = Field(default=16, ge=0, description="most stop strings in a request")
    max_stop_token_ids: int = Field(default=1024, ge=0, description="most stop tokens in a request")
    max_logit_bias: int = Field(default=1024, ge=0, description="most tokens in a request's logit_bias")
    max_logprobs: int = Field(
        default=1_000_000,
        ge=0,
        description="most log probabilities in an answer to a request: n x tokens x (1 + alternatives asked for)",
    )
    max_encode_tokens: int = Field(
        default=131_072,
        ge=1,
        description="most tokens that POST /encode counts in a text, and in a prompt with a rolling window",
    )
    root_path: str = Field(
        default="",
        pattern=r"^(/[A-Za-z0-9._~-]+)*$",
        description="path that the server has behind a proxy, such as /llm; taken off where the proxy passes it on",
    )
    page: bool = Field(default=True, description="the page at / and its stream of events at /kv/stream")
    page_shows_prompts: bool = Field(
        default=False, description="show on the page how cached prompts begin, to whoever may open it"
    )
    max_watchers: int = Field(default=32, ge=1, description="most pages open at once; more are refused with 503")
    metrics_prefix: str = Field(
        default="cllm", pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$", description="first part of every metric's name"
    )
    shutdown_grace_s: float = Field(default=10.0, ge=0, description="time running requests get to finish at shutdown")

    @property
    def needs_key(self) -> bool:
        return self.api_key is not None or self.api_keys is not None

    @field_validator("api_key")
    @classmethod
    def _key_is_one(cls, key: str | None) -> str | None:
        """Blanks are the mark of a variable that was never set, not of somebody who wants no key."""
        if key is not None and not key.strip():
            raise PydanticKnownError("string_too_short", {"min_length": 1})
        return key

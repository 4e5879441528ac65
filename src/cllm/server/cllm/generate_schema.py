"""Requests and replies of `/generate`, `/encode`, `/benchmark` and `/model/info`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from cllm.server.schema.replies import CacheDetailsReply, ErrorDetail, KVGroup
from cllm.server.schema.sampling import RETURN_PROGRESS, SamplingFields, in_range
from cllm.server.schema.validation import WHOLE, Int32, ModelName, RequestModel, Text, Words

DEFAULT_MAX_TOKENS = 128
MODEL = Field(None, description="A name from GET /v1/models. Default: the one served, or the first of several.")


class GenerateRequest(SamplingFields):
    model_config = ConfigDict(
        json_schema_extra={"example": {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}}
    )

    model: ModelName | None = MODEL
    prompt: Words
    max_tokens: Annotated[Int32, in_range("max_tokens")] | None = Field(
        None, description=f"Maximum number of tokens to generate. Default {DEFAULT_MAX_TOKENS}."
    )
    return_progress: bool | None = RETURN_PROGRESS


class GenerateData(BaseModel):
    id: str
    text: str
    response_time: float = Field(description="Seconds from arrival to the last token.")
    tokens_per_second: float = Field(description="generated_tokens / response_time.")
    generated_tokens: int
    max_tokens: int
    prompt_tokens: int
    cached_tokens: int = Field(description="Prompt tokens found in the KV cache.")
    cache_details: CacheDetailsReply | None = Field(None, description="Only with return_cache_details.")
    finish_reason: str | None = Field(description="`stop` or `length`.")


class GenerateReply(BaseModel):
    success: Literal[True] = True
    data: GenerateData


class EncodeRequest(RequestModel):
    model_config = ConfigDict(json_schema_extra={"example": {"text": "Hello, world"}})

    model: ModelName | None = MODEL
    text: Text


class EncodeData(BaseModel):
    tokens: list[int]
    length: int


class EncodeReply(BaseModel):
    success: Literal[True] = True
    data: EncodeData


class BenchmarkRequest(RequestModel):
    model_config = ConfigDict(json_schema_extra={"example": {"requests": 16, "concurrency": 4, "max_tokens": 32}})

    model: ModelName | None = MODEL
    requests: Annotated[int, Field(ge=1, le=1000), WHOLE] = 16
    concurrency: Annotated[int, Field(ge=1, le=64), WHOLE] = 4
    prompt: Words = Field(
        "Explain in a few sentences why the sky is blue.",
        description="The same for every request: all but the first ones find it in the KV cache.",
    )
    max_tokens: Annotated[int, Field(ge=1, le=4096), WHOLE] = Field(
        32, description="Every request generates exactly this many, past any end-of-sequence token."
    )


class Percentiles(BaseModel):
    p50: float
    p95: float
    p99: float


class BenchmarkRow(BaseModel):
    id: str
    latency: float = Field(description="Seconds from submission to the last token.")
    ttft: float | None = Field(description="Seconds to the first token; null if there was none.")
    generated_tokens: int
    cached_tokens: int
    error: str | None


class BenchmarkData(BaseModel):
    requests: int
    concurrency: int
    failed: int
    duration: float
    tokens_per_second: float = Field(description="Generated tokens of all requests / duration.")
    requests_per_second: float
    latency: Percentiles | None = Field(description="Seconds; of the requests that succeeded.")
    ttft: Percentiles | None
    rows: list[BenchmarkRow]


class BenchmarkReply(BaseModel):
    success: Literal[True] = True
    data: BenchmarkData


class ModelInfo(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    name: str
    backend: str
    architecture: str
    layers: int
    embedding_size: int
    heads: int
    kv_heads: int
    vocab_size: int
    context_length: int = Field(description="Maximum number of prompt and answer tokens together.")
    trained_context_length: int
    kv_layout: str = Field(description="`paged` or `slots`.")
    kv_type_k: str
    kv_type_v: str
    kv_bytes_per_token: int = Field(description="Of the first group.")
    kv_groups: list[KVGroup]
    kv_bytes_total: int
    sampling_defaults: dict[str, int | float] = Field(description="Used for parameters that a request leaves out.")
    sampling_defaults_from: dict[str, str] = Field(
        description="From `configuration`, `registry`, `generation_config.json`, `GGUF metadata` or `default`."
    )


class ModelInfoReply(BaseModel):
    success: Literal[True] = True
    data: ModelInfo


class FailureReply(BaseModel):
    success: Literal[False] = False
    error: ErrorDetail

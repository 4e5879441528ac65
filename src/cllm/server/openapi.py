"""The API's description at /openapi.json: what the server takes, to the limits of its settings and of its model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from cllm.server.anthropic_schema import CountRequest, MessagesRequest
from cllm.server.embeddings_schema import EmbeddingRequest, RerankRequest
from cllm.server.generate_schema import BenchmarkRequest, EncodeRequest, GenerateRequest
from cllm.server.middleware import OPEN_PATHS
from cllm.server.models import LoadRequest, UnloadRequest
from cllm.server.ollama_schema import OllamaChatRequest, OllamaGenerateRequest, ShowRequest
from cllm.server.openai_schema import ChatRequest, CompletionRequest
from cllm.server.responses_schema import ResponsesRequest
from cllm.server.tokens import DetokenizeRequest, TokenizeRequest
from cllm.server.validation import AT_MOST, TOKEN_ID, TOKEN_IDS_AS_KEYS
from cllm.server.warming import WarmRequest

if TYPE_CHECKING:
    from cllm.config import ServerConfig

REQUESTS: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/rerank": RerankRequest,
    "/generate": GenerateRequest,
    "/generate_stream": GenerateRequest,
    "/encode": EncodeRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/apply-template": ChatRequest,
    "/v1/chat/completions/render": ChatRequest,
    "/benchmark": BenchmarkRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/show": ShowRequest,
    "/kv/warm": WarmRequest,
}
"""What each endpoint takes."""
OF_SEVERAL: dict[str, type[BaseModel]] = {"/models/load": LoadRequest, "/models/unload": UnloadRequest}
_REFERENCE = "#/components/schemas/{model}"
_MOST = {"array": "maxItems", "object": "maxProperties", "string": "maxLength"}


def describe(
    app: FastAPI, limits: ServerConfig, vocab_size: int | None, *, with_key: bool, several: bool = False
) -> dict[str, Any]:
    """FastAPI's description, less the 422 that this server never answers, plus the requests, which FastAPI does not
    read for us, and the API key."""
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    if limits.root_path:
        schema["servers"] = [{"url": limits.root_path}]
    bodies = REQUESTS | OF_SEVERAL if several else REQUESTS
    _, requests = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(bodies.values())], ref_template=_REFERENCE
    )
    components = schema.setdefault("components", {})
    components["schemas"] |= _with_limits(requests["$defs"], limits, vocab_size)
    for path, model in bodies.items():
        content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}}
        schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            operation["responses"].pop("422", None)
            if with_key and path not in OPEN_PATHS:
                operation["security"] = [{"ApiKey": []}]
    for unused in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unused, None)
    if with_key:
        components["securitySchemes"] = {"ApiKey": {"type": "http", "scheme": "bearer"}}
    return schema


def _with_limits(schema: Any, limits: ServerConfig, vocab_size: int | None) -> Any:
    """The schema with the marks of validation.py replaced by what they stand for on this server."""
    if isinstance(schema, list):
        return [_with_limits(each, limits, vocab_size) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _with_limits(each, limits, vocab_size) for key, each in schema.items()}
    if (setting := found.pop(AT_MOST, None)) is not None:
        found[_MOST[found["type"]]] = getattr(limits, setting)
    if found.pop(TOKEN_ID, False) and vocab_size is not None:
        found["maximum"] = vocab_size - 1
    if found.pop(TOKEN_IDS_AS_KEYS, False) and vocab_size is not None:
        found["propertyNames"] = {"pattern": f"^({pattern_up_to(vocab_size - 1)})$"}
    return found


def pattern_up_to(most: int) -> str:
    """A regular expression for the numbers from 0 to `most`, as few digits as they need."""
    digits = str(most)
    ways = [r"[0-9]"] if len(digits) > 1 else []
    ways += [f"[1-9][0-9]{{{length - 1}}}" for length in range(2, len(digits))]
    for place, digit in enumerate(digits):
        least = 1 if place == 0 and len(digits) > 1 else 0
        if int(digit) > least:
            rest = len(digits) - place - 1
            ways.append(f"{digits[:place]}[{least}-{int(digit) - 1}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return "|".join([*ways, digits])

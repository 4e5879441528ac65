"""The API's description at /openapi.json, with the limits of the server's settings and its model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from cllm.server.middleware import OPEN_PATHS
from cllm.server.schema.body import BodyReader
from cllm.server.schema.validation import AT_MOST, TOKEN_ID, TOKEN_IDS_AS_KEYS

if TYPE_CHECKING:
    from cllm.config import ServerConfig

_REFERENCE = "#/components/schemas/{model}"
_MOST = {"array": "maxItems", "object": "maxProperties", "string": "maxLength"}


def bodies_of(routes: Iterable[BaseRoute]) -> dict[str, type[BaseModel]]:
    """The request body of each described endpoint that has one, by its path."""
    described = [route for route in routes if isinstance(route, APIRoute) and route.include_in_schema]
    found = ((route.path, each.call) for route in described for each in route.dependant.dependencies)
    return {path: reader.model for path, reader in found if isinstance(reader, BodyReader)}


def describe(
    app: FastAPI, requests: Mapping[str, type[BaseModel]], limits: ServerConfig, vocab_size: int | None
) -> dict[str, Any]:
    """FastAPI's description, without status 422, which this server never returns, and with the request bodies, which
    FastAPI does not parse here, and the API key."""
    with_key = limits.needs_key
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    if limits.root_path:
        schema["servers"] = [{"url": limits.root_path}]
    bodies = {path: model for path, model in requests.items() if path in schema["paths"]}
    _, described = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(bodies.values())], ref_template=_REFERENCE
    )
    components = schema.setdefault("components", {})
    components["schemas"] |= _with_limits(described["$defs"], limits, vocab_size)
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
    """The schema with the marks of validation.py replaced by this server's limits."""
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
    """A regular expression for the numbers from 0 to `most`."""
    digits = str(most)
    ways = [r"[0-9]"] if len(digits) > 1 else []
    ways += [f"[1-9][0-9]{{{length - 1}}}" for length in range(2, len(digits))]
    for place, digit in enumerate(digits):
        least = 1 if place == 0 and len(digits) > 1 else 0
        if int(digit) > least:
            rest = len(digits) - place - 1
            ways.append(f"{digits[:place]}[{least}-{int(digit) - 1}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return "|".join([*ways, digits])

"""What the tests of all clients share: the server, and requests whose answers are certain whatever the model knows.

The model is small: nothing here depends on how good its answers are. Masks make calls and JSON certain; fields are
choices or short, so that they end; messages show the form where nothing else does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict

from cllm.server.auth.key_file import add_key
from server_process import LIMIT_S, serving

MODEL = "smollm2"
OPERATOR_KEY = "sk-for-tests"
CONTEXT = 2048

QUESTION = "What is the capital of France? Answer in one word."
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
TOO_LONG: list[Any] = [{"role": "user", "content": "word " * (2 * CONTEXT)}]
REASONED = 'root ::= "<think>" [a-z ]{3,12} "</think>" [a-z]{3,8}'
"""A grammar of answers that begin with reasoning."""


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    unit: Literal["celsius", "fahrenheit"]


class City(BaseModel):
    """What there is to say about a city."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Paris", "Rome", "Berlin"]
    size: Literal["small", "large"]


class Anything(BaseModel):
    """Any JSON object: where a client sends no schema, the model may choose its names."""

    model_config = ConfigDict(extra="allow")


JSON_MESSAGES: list[Any] = [
    {"role": "user", "content": "Name a colour, as JSON."},
    {"role": "assistant", "content": '{"answer": "red"}'},
    {"role": "user", "content": "Name an animal, as JSON."},
    {"role": "assistant", "content": '{"answer": "dog"}'},
    {"role": "user", "content": "Name a city, as JSON."},
]
"""By example: JSON mode promises an object, not a short one."""

PARAMETERS = Weather.model_json_schema()
FUNCTION: dict[str, Any] = {"name": "weather", "description": "The weather now.", "parameters": PARAMETERS}
TOOL: Any = {"type": "function", "function": FUNCTION}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
TWO_CALLS = {"min_tokens": 40}
"""The answer cannot end after one call, and a mask allows nothing but another."""

CITY_SCHEMA = City.model_json_schema()
CITY_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY_SCHEMA}}


class ServedModel:
    """Where the model answers, and who may ask."""

    def __init__(self, url: str, limited_key: str) -> None:
        self.url = url
        self.openai = f"{url}/v1"
        self.key = OPERATOR_KEY
        self.limited_key = limited_key
        """One request at a time."""

    def idle(self) -> bool:
        kv = httpx.get(f"{self.url}/kv", headers=self.headers).json()
        return bool(kv["running"] == kv["waiting"] == 0)

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, headers=self.headers, timeout=LIMIT_S)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """The limited key has a request that runs."""
        body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        headers = {"authorization": f"Bearer {self.limited_key}"}
        url = f"{self.openai}/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=LIMIT_S) as answer:
            lines = answer.iter_lines()  # kept: without it the stream would be closed
            assert answer.status_code == 200 and next(lines).startswith("data: {")
            yield


@contextmanager
def serve_model(keys: Path, *settings: str) -> Iterator[ServedModel]:
    limited_key = add_key(keys, "one-at-a-time", 1)
    settings = (
        f"resources.max_context_length={CONTEXT}",
        "resources.kv_cache_max_memory_mb=400",
        f"server.api_key={OPERATOR_KEY}",
        f"server.api_keys={keys}",
        *settings,
    )
    with serving(*settings, model=MODEL) as served:
        yield ServedModel(served.url, limited_key)
        served.send(signal.SIGINT)
        assert served.end() == 0, served.lines
        assert not served.logged("Traceback"), served.lines

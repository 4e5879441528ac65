"""Clients of a server, what they ask, and whether an answer is the one that the single server gives."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx

from cllm.config import Config
from cllm.llm import AsyncLLM
from cllm.server.app import create_app

LIMIT_S = 120.0
"""A guard against hanging, not a demand on speed."""

_RANDOM = frozenset({"id", "created", "created_at", "system_fingerprint", "completed_at", "tool_call_id", "call_id"})
_CACHE = frozenset({"prompt_tokens_details", "cached_tokens", "cache_read_input_tokens"})
"""What depends on who was asked before."""


class Answer:
    """An HTTP response, as far as it has come."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.body = b""
        self.whole = False
        """Whether its end has come, and not only that of the connection."""

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        """The data of server-sent events that are complete."""
        lines = self.body.decode().split("\n\n")[:-1]
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]

    @property
    def streamed(self) -> bool:
        return any(value.startswith("text/event-stream") for value in self.header("content-type"))


class BrokenConnection(Exception):
    """A connection that ended before the answer did."""


async def ask(
    url: str,
    body: Mapping[str, Any] | bytes,
    path: str = "/v1/completions",
    *,
    headers: Mapping[str, str] = {},  # noqa: B006 - it is only read
    on_data: Callable[[Answer], None] = lambda answer: None,
    method: str = "POST",
) -> Answer:
    """One request on a connection of its own. `on_data` is called when more of the answer has come."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    lines = [f"{method} {path} HTTP/1.1", "host: test", "content-type: application/json", "connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*lines, f"content-length: {len(content)}", "", ""]).encode() + content)
    try:
        return await asyncio.wait_for(_read(reader, on_data), LIMIT_S)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise BrokenConnection(str(error)) from error
    finally:
        writer.transport.abort()


async def _read(reader: asyncio.StreamReader, on_data: Callable[[Answer], None]) -> Answer:
    answer = Answer()
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip("\r\n").split("\r\n")
    answer.status = int(head[0].split()[1])
    answer.headers = [(name.lower(), value) for name, _, value in (line.partition(": ") for line in head[1:])]
    on_data(answer)
    if length := answer.header("content-length"):
        answer.body = await reader.readexactly(int(length[0]))
    else:
        while size := int(await reader.readuntil(b"\r\n"), 16):
            answer.body += (await reader.readexactly(size + 2))[:-2]
            on_data(answer)
        await reader.readuntil(b"\r\n")
    answer.whole = True
    on_data(answer)
    return answer


# -- what an answer says -----------------------------------------------------------------------------------------------


def meaning(answer: Answer) -> Any:
    """All that must be equal wherever and however often a request was computed: of a stream, the events of each choice
    in their order."""
    if not answer.streamed:
        return answer.status, _plain(answer.json)
    assert answer.status == 200
    events = answer.events
    assert events[-1] == "[DONE]", events[-1]
    choices: dict[int, list[Any]] = defaultdict(list)
    rest = []
    for event in map(json.loads, events[:-1]):
        for choice in event.get("choices", ()):
            choices[choice["index"]].append(_plain(choice))
        if not event.get("choices"):
            rest.append(_plain(event))
    return dict(choices), rest


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items() if key not in _RANDOM | _CACHE}
    return [_plain(each) for each in value] if isinstance(value, list) else value


class Truth:
    """A single server in this process."""

    def __init__(self, client: httpx.AsyncClient, llm: AsyncLLM) -> None:
        self.llm = llm
        self._client = client
        self._known: dict[str, Any] = {}

    async def answer(
        self, body: Mapping[str, Any] | bytes, path: str = "/v1/completions", headers: Mapping[str, str] | None = None
    ) -> Answer:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await self._client.post(
            path, content=content, headers={"content-type": "application/json", **(headers or {})}
        )
        answer = Answer()
        answer.status, answer.body, answer.whole = response.status_code, response.content, True
        answer.headers = [(name.lower(), value) for name, value in response.headers.multi_items()]
        return answer

    async def meaning(self, body: Mapping[str, Any], path: str = "/v1/completions") -> Any:
        key = json.dumps([path, body], sort_keys=True)
        if key not in self._known:
            self._known[key] = meaning(await self.answer(body, path))
        return self._known[key]


@asynccontextmanager
async def single_server(settings: Mapping[str, Any]) -> AsyncIterator[Truth]:
    """With these settings, but without delays."""
    config = Config.model_validate(settings)
    fake = config.backend.fake.model_copy(update={"latency_ms": 0.0})
    config = config.model_copy(update={"backend": config.backend.model_copy(update={"fake": fake})})
    async with AsyncLLM(config) as llm:
        transport = httpx.ASGITransport(app=create_app(llm, config), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=LIMIT_S) as client:
            yield Truth(client, llm)


# -- what is asked -----------------------------------------------------------------------------------------------------

SYSTEM = "You answer questions about trains, and you never forget where they go. " * 4
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {"name": "timetable", "description": "Trains of a day.", "parameters": _SCHEMA},
}


def asked(number: int, tokens: int = 60) -> tuple[str, dict[str, Any]]:
    """The path and body of one of many requests, of all kinds, streamed or whole. Each has one right answer."""
    kind, streams = divmod(number, 2)
    prompt = f"{SYSTEM}Question {number}: where does train {number * 37 % 101} go?"
    chat = {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Train {number}?"}]}
    base: dict[str, Any] = {"max_tokens": tokens, "seed": 1000 + number, "stream": bool(streams)}
    if streams:
        base["stream_options"] = {"include_usage": True}
    kinds: Sequence[tuple[str, dict[str, Any]]] = (
        ("/v1/completions", {"prompt": prompt, "ignore_eos": True, "temperature": 0}),
        ("/v1/completions", {"prompt": prompt, "ignore_eos": True, "temperature": 1.3, "logprobs": 3}),
        ("/v1/completions", {"prompt": prompt, "ignore_eos": True, "temperature": 0.9, "n": 3}),
        ("/v1/completions", {"prompt": prompt, "temperature": 1.0, "stop": ["z", "qu"], "n": 2}),
        ("/v1/chat/completions", {**chat, "temperature": 1.1, "logprobs": True, "top_logprobs": 2}),
        (
            "/v1/chat/completions",
            {
                **chat,
                "temperature": 0.8,
                "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}},
            },
        ),
        ("/v1/completions", {"prompt": [prompt, prompt + " And then?"], "temperature": 0.7, "repetition_penalty": 1.3}),
        ("/v1/chat/completions", {**chat, "temperature": 0.8, "tools": [_TOOL], "tool_choice": "required"}),
    )
    path, body = kinds[kind % len(kinds)]
    return path, {**base, **body}


KINDS = 16
"""How many numbers it takes to ask every kind, whole and streamed."""

"""Clients of a server, what they ask, and whether an answer is the one that the single server gives."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx

from cllm.config import Config
from cllm.llm import AsyncLLM
from cllm.server.app import create_app

LIMIT_S = 180.0
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


class BrokenConnectionError(ConnectionError):
    """A connection that ended before the answer did."""


async def ask(
    url: str,
    body: Mapping[str, Any] | bytes,
    path: str = "/v1/completions",
    *,
    headers: Mapping[str, str] | None = None,
    on_data: Callable[[Answer], None] = lambda answer: None,
    method: str = "POST",
) -> Answer:
    """One request on a connection of its own. `on_data` is called when more of the answer has come."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    lines = [f"{method} {path} HTTP/1.1", "host: test", "content-type: application/json", "connection: close"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    writer.write("\r\n".join([*lines, f"content-length: {len(content)}", "", ""]).encode() + content)
    try:
        return await asyncio.wait_for(_read(reader, on_data), LIMIT_S)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise BrokenConnectionError(str(error)) from error
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
    """All that must be equal wherever and however often a request was computed: of a stream, what its events add up to
    for each choice."""
    if not answer.streamed:
        return answer.status, _plain(answer.json)
    assert answer.status == 200
    events = answer.events
    assert events[-1] == "[DONE]", events[-1]
    choices: dict[int, Any] = {}
    rest = []
    for event in map(json.loads, events[:-1]):
        for choice in event.get("choices", ()):
            choices[choice["index"]] = _added(choices.get(choice["index"]), _plain(choice), "")
        if not event.get("choices"):
            rest.append(_plain(event))
    return choices, rest


_PIECES = frozenset({"text", "content", "arguments"})


def _added(sum_: Any, piece: Any, key: str) -> Any:
    """How the pieces of a stream are put together."""
    if sum_ is None or piece is None:
        return piece if sum_ is None else sum_
    if isinstance(piece, dict):
        return sum_ | {name: _added(sum_.get(name), value, name) for name, value in piece.items()}
    if key == "tool_calls":
        by_index = {each["index"]: each for each in sum_}
        by_index |= {each["index"]: _added(by_index.get(each["index"]), each, "") for each in piece}
        return list(by_index.values())
    return sum_ + piece if isinstance(piece, list) or key in _PIECES else piece


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

    async def check(self, answer: Answer, body: Mapping[str, Any], path: str) -> None:
        assert answer.status == 200, answer.body
        assert meaning(answer) == await self.meaning(body, path), body


@asynccontextmanager
async def single_server(settings: Mapping[str, Any], latency_ms: float = 0.0) -> AsyncIterator[Truth]:
    """With these settings, but without delays."""
    config = Config.model_validate(settings)
    fake = config.backend.fake.model_copy(update={"latency_ms": latency_ms})
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


# -- many clients ------------------------------------------------------------------------------------------------------


class Load:
    """Clients that ask all the time. Each answer is checked."""

    def __init__(self, url: str, truth: Truth, *, tokens: int, pool: int) -> None:
        self.right = 0
        self.wrong: list[AssertionError] = []
        self.broken: list[OSError] = []
        """Connections that ended before the answer."""
        self._url = url
        self._truth = truth
        self._tokens = tokens
        self._numbers = itertools.count()
        self._pool = pool
        self._stopping = False

    async def prepare(self) -> None:
        """Know the right answers: this process has other things to do later."""
        for number in range(self._pool):
            path, body = asked(number, self._tokens)
            await self._truth.meaning(body, path)

    async def client(self) -> None:
        while not self._stopping:
            path, body = asked(next(self._numbers) % self._pool, self._tokens)
            try:
                answer = await ask(self._url, body, path)
            except OSError as error:
                self.broken.append(error)
                await asyncio.sleep(0.1)
            else:
                await self._check(answer, body, path)

    async def _check(self, answer: Answer, body: Mapping[str, Any], path: str) -> None:
        try:
            await self._truth.check(answer, body, path)
        except AssertionError as wrong:
            self.wrong.append(wrong)
        else:
            self.right += 1

    def stop(self) -> None:
        """Let the requests under way end, and send no more."""
        self._stopping = True


@asynccontextmanager
async def load(url: str, truth: Truth, clients: int, *, tokens: int = 60, pool: int = 2 * KINDS) -> AsyncIterator[Load]:
    """So many clients while the block runs, and until they have their answers. Fails if one is wrong."""
    asking = Load(url, truth, tokens=tokens, pool=pool)
    await asking.prepare()
    tasks = [asyncio.create_task(asking.client()) for _ in range(clients)]
    try:
        yield asking
        asking.stop()
        await asyncio.gather(*tasks)
        if asking.wrong:
            raise asking.wrong[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

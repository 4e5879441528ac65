"""What unkind clients do to a server, each as a function that runs in a thread and tells how it was answered."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from cllm.machine.open_files import raise_open_file_limit
from cllm_bench.errors import BenchError

if TYPE_CHECKING:
    from cllm_bench.workloads.hostile import Hostile

ANSWER_LIMIT_S = 300.0
ENDED_LIMIT_S = 20.0
_BLOCK = 65_536

Place = tuple[str, int]


class Attack(NamedTuple):
    """`prepare` makes what is sent, before anything is measured; `run` sends it and returns the answers' statuses."""

    key: str
    label: str
    prepare: Callable[[Hostile], bytes]
    run: Callable[[Place, Hostile, bytes], list[int]]


def ask(place: Place, *pieces: bytes) -> int:
    """Send it all, read to the end; the status, 0 if none came."""
    received = bytearray()
    with suppress(OSError), socket.create_connection(place, timeout=ANSWER_LIMIT_S) as connection:
        with suppress(ConnectionError):
            for piece in pieces:
                connection.sendall(piece)
        while piece := connection.recv(_BLOCK):
            received += piece[: max(0, 64 - len(received))]
    words = received.split(maxsplit=2)
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


def _post(path: str, content: bytes, *, close: bool = True) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "host: bench",
        "content-type: application/json",
        f"content-length: {len(content)}",
    ]
    if close:
        lines.append("connection: close")
    return "\r\n".join([*lines, "", ""]).encode() + content


def _health(place: Place) -> int:
    return ask(place, b"GET /health HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n")


# -- connections ---------------------------------------------------------------------------------------------------


def _headers(place: Place, sizes: Hostile, _: bytes) -> list[int]:
    block = b"x-more: and more\r\n" * (_BLOCK // 18)
    blocks = (block for _ in range(int(sizes.header_mb * 1e6 / len(block))))
    return [ask(place, b"GET /health HTTP/1.1\r\nhost: bench\r\n", *blocks)]


def _hold(place: Place, sizes: Hostile, says: Sequence[bytes]) -> list[int]:
    """Connections that send a byte a second of what they say, or nothing. Meanwhile, is /health still answered?"""
    statuses = []
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(place, timeout=10)) for _ in range(sizes.connections)]
        end = time.monotonic() + sizes.hold_s
        position = 0
        while time.monotonic() < end:
            for number, connection in enumerate(held):
                if text := says[number % len(says)]:
                    with suppress(OSError):
                        connection.send(text[position : position + 1])
            position += 1
            statuses.append(_health(place))
            time.sleep(min(1.0, sizes.hold_s / 4))
    return statuses


def _silent(place: Place, sizes: Hostile, _: bytes) -> list[int]:
    return _hold(place, sizes, [b""])


def _trickle(place: Place, sizes: Hostile, _: bytes) -> list[int]:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    return _hold(place, sizes, [head * 10, b" " * 1000])


def _gone(place: Place, sizes: Hostile, request: bytes) -> list[int]:
    """Two requests at once, and away before either is answered."""
    for _ in range(sizes.at_once):
        with socket.create_connection(place, timeout=10) as connection:
            connection.sendall(request)
            time.sleep(0.05)
    return []


# -- bodies --------------------------------------------------------------------------------------------------------


def _send(place: Place, _: Hostile, request: bytes) -> list[int]:
    return [ask(place, request)]


def _send_many(place: Place, sizes: Hostile, request: bytes) -> list[int]:
    return _send_all(place, [request] * sizes.at_once)


def _send_all(place: Place, requests: Sequence[bytes]) -> list[int]:
    """All at once."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: ask(place, request), requests))


def _completion(body: dict[str, Any]) -> bytes:
    return _post("/v1/completions", json.dumps({"prompt": "hello", **body}, separators=(",", ":")).encode())


def _digits(sizes: Hostile) -> bytes:
    return _completion({"prompt": "0123456789" * (sizes.digits // 10)})


def _chat(body: dict[str, Any]) -> bytes:
    asked = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 64, **body}
    return _post("/v1/chat/completions", json.dumps(asked, separators=(",", ":")).encode())


def _by_schema(schema: Any) -> bytes:
    return _chat({"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}})


def _recursive(_: Hostile) -> bytes:
    node: Any = {"$ref": "#/$defs/node"}
    properties = {f"child{number}": node for number in range(50)}
    shape = {"type": "object", "properties": properties, "anyOf": [node, {"type": "object"}]}
    return _by_schema({"$defs": {"node": shape}, **node})


def _properties(count: int) -> dict[str, Any]:
    return {f"property_{number}": {"type": "string", "pattern": "^[a-z]{1,20}$"} for number in range(count)}


def _new_schemas(place: Place, sizes: Hostile, _: bytes) -> list[int]:
    """Each is another one, so none is found compiled."""
    schemas = ({"type": "object", "properties": _properties(100), "title": str(n)} for n in range(5 * sizes.at_once))
    return _send_all(place, [*map(_by_schema, schemas)])


def _embedding_of(count: int) -> bytes:
    texts = [f"a few words to embed, and their number {number}" for number in range(count)]
    return _post("/v1/embeddings", json.dumps({"input": texts}).encode())


def _texts(sizes: Hostile) -> bytes:
    """As many as are taken by default."""
    return _embedding_of(min(sizes.inputs, 2048))


def _offered(count: int, bytes_each: int) -> bytes:
    schema = {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]}
    tools = [
        {
            "type": "function",
            "function": {"name": f"tool_{number}", "description": "x " * (bytes_each // 2), "parameters": schema},
        }
        for number in range(count)
    ]
    return _chat({"tools": tools, "tool_choice": "required"})


def _logprobs(sizes: Hostile) -> bytes:
    body = {
        "messages": [{"role": "user", "content": "Count."}],
        "n": sizes.answers,
        "max_tokens": sizes.answer_tokens,
        "logprobs": True,
        "top_logprobs": 20,
        "ignore_eos": True,
    }
    return _post("/v1/chat/completions", json.dumps(body).encode())


def _pipelined(sizes: Hostile) -> bytes:
    body = {"prompt": "hello", "max_tokens": sizes.answer_tokens, "ignore_eos": True}
    return _post("/v1/completions", json.dumps(body).encode(), close=False) * 2


ATTACKS = (
    Attack("headers", "headers without end", lambda _: b"", _headers),
    Attack("silent", "connections that say nothing", lambda _: b"", _silent),
    Attack("trickle", "a byte a second", lambda _: b"", _trickle),
    Attack("stop_ids", "stop_token_ids", lambda sizes: _completion({"stop_token_ids": [1] * sizes.token_ids}), _send),
    Attack(
        "bias",
        "logit_bias",
        lambda sizes: _completion({"logit_bias": {str(number): 1 for number in range(sizes.biases)}}),
        _send,
    ),
    Attack(
        "echo", "token ids with echo", lambda sizes: _completion({"prompt": [1] * sizes.token_ids, "echo": True}), _send
    ),
    Attack("prompts", "small prompts", lambda sizes: _completion({"prompt": ["a"] * sizes.prompts}), _send),
    Attack("keys", "unknown keys", lambda sizes: _completion({f"k{number}": 1 for number in range(sizes.keys)}), _send),
    Attack("logprobs", "top_logprobs of many answers", _logprobs, _send),
    Attack("digits", "digits as prompts", _digits, _send_many),
    Attack("recursive", "a recursive schema", _recursive, _send_many),
    Attack(
        "large_schema",
        "a schema of 1 MB",
        lambda sizes: _by_schema({"type": "object", "properties": _properties(int(sizes.source_mb * 1e6 / 66))}),
        _send_many,
    ),
    Attack(
        "wide_schema",
        "900 properties with patterns",
        lambda _: _by_schema({"type": "object", "properties": _properties(900)}),
        _send_many,
    ),
    Attack("new_schemas", "new schemas, all at once", lambda _: b"", _new_schemas),
    Attack(
        "exploding",
        "an exploding regex",
        lambda _: _chat({"guided_regex": "(.*a){30}(a|b|ab)*.{1,1000}c{1,500}(x+x+)+y"}),
        _send_many,
    ),
    Attack("embeddings", "inputs of embeddings", lambda sizes: _embedding_of(sizes.inputs), _send_many),
    Attack("texts", "as many texts to embed as are taken", _texts, _send),
    Attack("large_tools", "1 MB of tools", lambda sizes: _offered(50, int(sizes.source_mb * 1e6 / 50)), _send_many),
    Attack("many_tools", "many tools", lambda sizes: _offered(sizes.tools, 20), _send_many),
    Attack("gone", "two pipelined, then gone", _pipelined, _gone),
)


def allow_connections(number: int) -> None:
    """Raise this process's limit of open files, if that is needed and permitted."""
    wanted = number + 256
    allowed = raise_open_file_limit(wanted)
    if allowed is not None and allowed < wanted:
        raise BenchError(f"{number} connections need more open files than {allowed}: take --size connections=100")

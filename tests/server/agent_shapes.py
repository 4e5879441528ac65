"""What coding agents send first, by shape: parameters, kinds of content and tools as theirs, all texts our own.

`AGENTS` are their requests; `second_turn` is what an agent sends after an answer: all of it again, the answer, and the
result of its calls or the user's next words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

_WORDS = re.findall(r"\w+", "read the file first then change only what was asked and say which lines are new")
NEXT = "Thank you. Do the same for the second file."
RESULT = "3 lines were changed."


def text(words: int) -> str:
    return " ".join(islice(cycle(_WORDS), words))


def _schema(required: Sequence[str], **properties: dict[str, Any]) -> dict[str, Any]:
    described = {name: {**what, "description": text(9)} for name, what in properties.items()}
    return {"type": "object", "properties": described, "required": [*required], "additionalProperties": False}


_STRING: dict[str, Any] = {"type": "string"}
_EDIT = _schema(["path", "new"], path=_STRING, old=_STRING, new=_STRING, everywhere={"type": "boolean"})
_SHELL = _schema(
    ["command"], command=_STRING, timeout_ms={"type": "integer", "exclusiveMinimum": 0, "maximum": 600_000}
)
_ASK = _schema(
    ["questions"],
    questions={
        "type": "array",
        "items": _schema(
            ["header", "options"], header=_STRING, options={"type": "array", "items": _schema([], a=_STRING)}
        ),
    },
)
_SEARCH = _schema(["pattern"], pattern=_STRING, mode={"type": "string", "enum": ["files", "lines"], "default": "files"})
_SCHEMAS = {"shell": _SHELL, "edit": _EDIT, "ask": _ASK, "search": _SEARCH, "look": _schema([])}


def _of_chat(schema: dict[str, Any], name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": text(40), "parameters": schema}}


def _of_response(schema: dict[str, Any], name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": text(20), "strict": False, "parameters": schema}


def _of_messages(schema: dict[str, Any], name: str) -> dict[str, Any]:
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return {"name": name, "description": text(60), "input_schema": dialect}


_CHAT_TOOLS = [_of_chat(schema, name) for name, schema in _SCHEMAS.items()]


@dataclass(frozen=True)
class Agent:
    name: str
    path: str
    body: dict[str, Any]
    left_out: tuple[str, ...] = field(default=())


def _chat(name: str, messages: list[dict[str, Any]], **more: Any) -> Agent:
    return Agent(name, "/v1/chat/completions", {"model": "tiny", "messages": messages, "stream": True, **more})


def _items(*texts: str) -> list[dict[str, str]]:
    return [{"type": "input_text", "text": each} for each in texts]


def _message(role: str, *texts: str) -> dict[str, Any]:
    return {"type": "message", "id": "msg_0193c1d2", "role": role, "content": _items(*texts)}


_USAGE = {"stream_options": {"include_usage": True}}
_EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
AGENTS = [
    _chat(
        "examples in turns, no tools",
        [
            {"role": "system", "content": text(200)},
            *({"role": role, "content": text(n)} for n in (8, 30) for role in ("user", "assistant")),
            {"role": "user", "content": text(100)},
        ],
        temperature=0,
    ),
    _chat(
        "a short system prompt and tools",
        [{"role": "system", "content": text(150)}, {"role": "user", "content": text(3)}],
        tools=_CHAT_TOOLS,
        max_tokens=60,
        **_USAGE,
    ),
    _chat(
        "tool_choice and a dialect in schemas",
        [{"role": "system", "content": text(900)}, {"role": "user", "content": text(3)}],
        tools=[_of_chat({"$schema": "https://json-schema.org/draft/2020-12/schema", **_SHELL}, "bash"), *_CHAT_TOOLS],
        tool_choice="auto",
        max_tokens=60,
        **_USAGE,
    ),
    _chat(
        "parts of content and a turn made up",
        [
            {"role": "system", "content": text(3000)},
            {"role": "user", "content": [{"type": "text", "text": text(60)}]},
            {"role": "assistant", "content": text(6)},
            {"role": "user", "content": [{"type": "text", "text": text(4)}]},
        ],
        tools=_CHAT_TOOLS,
        max_tokens=8000,
        **_USAGE,
    ),
    Agent(
        "messages with cache marks",
        "/v1/messages?beta=true",
        {
            "model": "tiny",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": text(50)}]},
                {"role": "system", "content": text(700)},
            ],
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=9.9.9; cc_entrypoint=cli; cch=0;"},
                {"type": "text", "text": text(10), **_EPHEMERAL},
                {"type": "text", "text": text(800), **_EPHEMERAL},
            ],
            "tools": [_of_messages(schema, name.title()) for name, schema in _SCHEMAS.items()],
            "metadata": {"user_id": text(20)},
            "max_tokens": 60,
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "stream": True,
        },
    ),
    Agent(
        "responses with namespaces and hosted tools",
        "/v1/responses",
        {
            "model": "tiny",
            "input": [
                _message("developer", text(500)),
                _message("developer", text(90), text(200)),
                _message("user", text(40)),
                _message("user", text(2)),
            ],
            "tools": [
                *(_of_response(schema, name) for name, schema in _SCHEMAS.items()),
                {
                    "type": "namespace",
                    "name": "helpers_v1",
                    "description": text(6),
                    "tools": [_of_response(_SHELL, "begin"), _of_response(_EDIT, "finish")],
                },
                {"type": "custom", "name": "patch", "description": text(30)},
                {"type": "web_search", "external_web_access": False},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0193c1d2",
            "client_metadata": {"session_id": "0193c1d2", "turn": text(30)},
        },
        ("web_search",),
    ),
]


@dataclass(frozen=True)
class Answer:
    prompt_tokens: int
    cached_tokens: int
    items: list[Any]
    """As the agent sends them back."""
    results: list[Any]
    """Of its calls."""


def second_turn(agent: Agent, answer: Answer) -> dict[str, Any]:
    body = deepcopy(agent.body)
    if agent.path == "/v1/responses":
        body["input"] += [*answer.items, *(answer.results or [_message("user", NEXT)])]
    elif agent.path.startswith("/v1/messages"):
        said = {"role": "user", "content": answer.results or [{"type": "text", "text": NEXT}]}
        body["messages"] += [{"role": "assistant", "content": answer.items}, said]
    else:
        body["messages"] += [*answer.items, *(answer.results or [{"role": "user", "content": NEXT}])]
    return body


def read_answer(agent: Agent, stream: str) -> Answer:
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    if agent.path == "/v1/responses":
        return _read_response(events[-1]["response"])
    return _read_messages(events) if agent.path.startswith("/v1/messages") else _read_chat(events)


def _read_response(response: dict[str, Any]) -> Answer:
    usage, output = response["usage"], response["output"]
    calls = [item for item in output if item["type"].endswith("_call")]
    results = [{"type": f"{call['type']}_output", "call_id": call["call_id"], "output": RESULT} for call in calls]
    return Answer(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], output, results)


def _read_messages(events: Sequence[dict[str, Any]]) -> Answer:
    usage: dict[str, int] = {}
    blocks: list[dict[str, Any]] = []
    results = []
    for event in events:
        if event["type"] == "message_start":
            usage = event["message"]["usage"]
        elif event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            key = "json" if delta["type"] == "input_json_delta" else "text"
            blocks[-1][key] += delta["partial_json" if key == "json" else "text"]
    for block in blocks:
        given = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(given)
            results.append({"type": "tool_result", "tool_use_id": block["id"], "content": RESULT})
    cached = usage["cache_read_input_tokens"]
    return Answer(usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached, cached, blocks, results)


def _read_chat(events: Sequence[dict[str, Any]]) -> Answer:
    usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for delta in (choice["delta"] for event in events for choice in event["choices"]):
        message["content"] += delta.get("content") or ""
        for part in delta.get("tool_calls") or ():
            if part["index"] not in calls:
                calls[part["index"]] = {**part, "function": {**part["function"]}}
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    if calls:
        message["tool_calls"] = [*calls.values()]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in calls.values()]
    return Answer(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], [message], results)

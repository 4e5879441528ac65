"""Validates chat messages, and converts them to what templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cllm.errors import InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXTS = ("name", "tool_call_id", "reasoning_content")
_FIELDS = ("role", "content", *_TEXTS, "tool_calls")

Message = dict[str, Any]


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    if not messages:
        raise InvalidRequestError("messages is empty; give at least one message", "messages")
    return [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _read_message(message: Mapping[str, Any], where: str) -> Message:
    if not isinstance(message, Mapping):
        raise _error(f"{where} is a {type(message).__name__}; it must be an object with role and content")
    for field in message:
        if field not in _FIELDS:
            raise _error(f"{where}.{field} is not supported; a message has {', '.join(_FIELDS)}")
    role = message.get("role")
    if role not in ROLES:
        raise _error(f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    read: Message = {"role": role, "content": _read_content(content, f"{where}.content")}
    for field in _TEXTS:
        text = message.get(field)
        if text is not None:
            if not isinstance(text, str):
                raise _error(f"{where}.{field} is a {type(text).__name__}; it must be a string")
            read[field] = text
    calls = message.get("tool_calls")
    if calls:
        if role != "assistant":
            raise _error(f"{where}.tool_calls is only allowed in messages of the assistant")
        if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
            raise _error(f"{where}.tool_calls is a {type(calls).__name__}; it must be a list")
        read["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)]
    return read


def _read_call(call: Any, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise _error(f"{where}.function is missing; a call is an object with id, type and function")
    name, call_id = function.get("name"), call.get("id")
    if not isinstance(name, str):
        raise _error(f"{where}.function.name is a {type(name).__name__}; it must be a string")
    if call_id is not None and not isinstance(call_id, str):
        raise _error(f"{where}.id is a {type(call_id).__name__}; it must be a string")
    named = {} if call_id is None else {"id": call_id}
    return {**named, "type": "function", "function": {"name": name, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: Any) -> Any:
    """As an object, which templates expect. Invalid JSON stays text: a model wrote it, and the conversation must go
    on."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return dict(arguments) if isinstance(arguments, Mapping) else json.dumps(arguments)


def _read_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        found = "missing" if content is None else f"a {type(content).__name__}"
        raise _error(f"{where} is {found}; it must be a string or a list of text parts")
    return "\n".join(_read_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _read_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise _error(f"{where}.type is {kind!r}; only 'text' parts are supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise _error(f"{where}.text is a {type(text).__name__}; it must be a string")
    return text


def _error(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, "messages")

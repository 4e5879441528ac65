"""Earlier calls and their results, as chat templates take them."""

from __future__ import annotations

import string
from collections.abc import Mapping
from hashlib import blake2b
from itertools import groupby
from typing import Any

from cllm.dialect.formats import ToolFormat
from cllm.text.messages import Message

ALPHABET = string.ascii_letters + string.digits
MISTRAL_ID = 9
"""Length of the ids that Mistral's templates require."""


def is_of_tools(message: Mapping[str, Any]) -> bool:
    """Invalid messages are reported elsewhere."""
    return isinstance(message, Mapping) and (message.get("role") == "tool" or bool(message.get("tool_calls")))


def with_names(messages: list[Message]) -> list[Message]:
    """Tool results with the names of their tools, which some templates need."""
    calls = (call for message in messages for call in message.get("tool_calls", ()))
    names = {call["id"]: call["function"]["name"] for call in calls if "id" in call}
    return [
        {**message, "name": names[message["tool_call_id"]]}
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names
        else message
        for message in messages
    ]


def with_short_ids(messages: list[Message]) -> list[Message]:
    """Ids as Mistral's templates require them."""
    prepared = []
    for message in messages:
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": _nine(message["tool_call_id"])}
        if "tool_calls" in message:
            calls = [{**call, "id": _nine(call.get("id", ""))} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        prepared.append(message)
    return prepared


def one_by_one(messages: list[Message]) -> list[Message]:
    """Several calls of one message as several messages, each followed by its result, for templates that take no more
    than one call per message."""
    split: list[Message] = []
    waiting: list[Message] = []
    """Calls whose turn has not come."""
    for message in messages:
        if message["role"] == "tool":
            ids = (each["tool_calls"][0].get("id") for each in waiting)
            place = next((place for place, each in enumerate(ids) if each == message.get("tool_call_id")), None)
            split += [message] if place is None else [waiting.pop(place), message]
            continue
        split += waiting
        first, *others = message.get("tool_calls", [None])
        waiting = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in others]
        if others:
            waiting.insert(0, {**message, "tool_calls": [first]})
        else:
            split.append(message)
    return split + waiting


def flatten(messages: list[Message], form: ToolFormat) -> list[Message]:
    """Calls and results as assistant and user text, for templates without tools."""
    flat: list[Message] = []
    for are_results, group in groupby(messages, lambda message: message["role"] == "tool"):
        if are_results:
            flat.append({"role": "user", "content": "\n\n".join(map(_result, group))})
        else:
            flat += [_without_calls(message, form) for message in group]
    return flat


def _result(message: Message) -> str:
    name = f" of {message['name']}" if "name" in message else ""
    return f"Result{name}:\n{message['content']}"


def _without_calls(message: Message, form: ToolFormat) -> Message:
    if "tool_calls" not in message:
        return message
    written = form.write([call["function"] for call in message["tool_calls"]])
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, (message["content"], written)))}


def _nine(call_id: str) -> str:
    """An id as Mistral's templates require it: unchanged, or derived."""
    if len(call_id) == MISTRAL_ID and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(blake2b(call_id.encode(), digest_size=8).digest(), "big")
    return "".join(ALPHABET[number // len(ALPHABET) ** place % len(ALPHABET)] for place in range(MISTRAL_ID))

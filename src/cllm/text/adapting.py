"""Adapts conversations, calls and tools to what a chat template takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cllm.text.messages import Message


def alternating(messages: list[Message], *, system: bool) -> list[Message]:
    """The conversation for templates that want the user and the assistant to take turns: neighbours of one role become
    one message, gaps are filled, and what the system says is said by the user. `system`: unless it says it at the
    beginning."""
    turns: list[Message] = []
    texts: list[list[str]] = []
    """What each turn says."""
    for number, message in enumerate(messages):
        if message["role"] in ("system", "developer") and (number or not system):
            message = {**message, "role": "user"}
        role, last = message["role"], turns[-1]["role"] if turns else "system"
        if role == last and role in ("user", "assistant") and "tool_calls" not in turns[-1]:
            turns[-1] = {**turns[-1], **message}
            texts[-1].append(message["content"])
            continue
        if role == "user" and last == "tool":
            turns.append({"role": "assistant"})
            texts.append(["OK."])  # some templates refuse an empty one
        elif role == "assistant" and last == "system":
            turns.append({"role": "user"})
            texts.append([""])
        turns.append(message)
        texts.append([message["content"]])
    return [{**turn, "content": "\n\n".join(said)} for turn, said in zip(turns, texts, strict=True)]


def with_descriptions(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Empty ones where there are none."""
    function = {"description": "", **tool["function"]}
    parameters = function.get("parameters")
    if isinstance(parameters, dict) and isinstance(properties := parameters.get("properties"), dict):
        filled = {
            key: {"description": "", **each} if isinstance(each, dict) else each for key, each in properties.items()
        }
        function["parameters"] = {**parameters, "properties": filled}
    return {**tool, "function": function}


def as_object(call: Message) -> Message:
    """For arguments that are not JSON: a model wrote them, and sees them."""
    function = call["function"]
    if not isinstance(function["arguments"], str):
        return call
    return {**call, "function": {**function, "arguments": {"arguments": function["arguments"]}}}


def as_text(call: Message) -> Message:
    function = call["function"]
    if isinstance(function["arguments"], str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

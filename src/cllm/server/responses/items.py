"""Turns the items of OpenAI's Responses into messages, and those into what chat templates take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cllm.errors import InvalidRequestError
from cllm.server.responses.tools import CalledTool
from cllm.server.schema.tools import ToolCallIds

if TYPE_CHECKING:
    from cllm.server.inference.blocks import ContentBlocks
    from cllm.server.responses.schema import CustomCall, FunctionCall, FunctionOutput, Item
    from cllm.server.responses.tools import ToolNames

_ORDER = ("reasoning_content", "content", "tool_calls")
"""The order of an answer's fields."""
MOST_ARGUMENT_VALUES = 65_536
"""In one call's arguments: parsing more would block others."""


class ConversationBuilder:
    """Builds messages: an answer's reasoning, text and tool calls become one message again."""

    def __init__(self, before: Sequence[dict[str, Any]] = ()) -> None:
        """`before`: the messages of the responses that this one continues."""
        self.messages: list[dict[str, Any]] = [*before]
        self._calls = ToolCallIds()
        self._open: dict[str, Any] | None = None
        """The assistant message that following items may extend."""
        self._reached = 0
        """The last field of `_ORDER` that it has."""
        for message in before:
            self._remember(message)

    def add(self, given: str | Sequence[Item]) -> None:
        """A request's input."""
        if isinstance(given, str):
            self.messages.append({"role": "user", "content": given})
            return
        for number, item in enumerate(given):
            self._add(item, f"input[{number}]")

    def add_answer(self, blocks: ContentBlocks, names: ToolNames) -> None:
        self._open = None
        for block in blocks.all:
            if block.kind == "call":
                called = names.called.get(block.name, CalledTool(block.name))
                self._assistant("tool_calls")["tool_calls"].append(_call(block.call_id, called, block.text))
            elif block.kind == "text":
                self._assistant("content")["content"] = block.text
            else:
                self._assistant("reasoning_content")["reasoning_content"] = block.text

    def _add(self, item: Item, where: str) -> None:
        if item.type == "function_call" or item.type == "custom_tool_call":
            self._add_call(item, where)
        elif item.type == "function_call_output" or item.type == "custom_tool_call_output":
            self._add_output(item, where)
        elif item.type == "reasoning":
            if (text := item.plain_text) is not None:
                self._assistant("reasoning_content")["reasoning_content"] = text
        elif item.role == "assistant":
            self._assistant("content")["content"] = item.plain_text
        else:
            self._open = None
            self.messages.append({"role": item.role, "content": item.plain_text})

    def _add_call(self, item: FunctionCall | CustomCall, where: str) -> None:
        self._calls.add_call(item.call_id, item.called.flat_name, f"{where}.call_id")
        call = _call(item.call_id, item.called, item.arguments, f"{where}.arguments")
        self._assistant("tool_calls")["tool_calls"].append(call)

    def _add_output(self, item: FunctionOutput, where: str) -> None:
        name = self._calls.add_result(item.call_id, f"{where}.call_id")
        self._open = None
        self.messages.append({"role": "tool", "tool_call_id": item.call_id, "name": name, "content": item.plain_text})

    def _assistant(self, field: str) -> dict[str, Any]:
        """The message to put `field` into: the last one, unless it already has that field or a later one. It may have
        several calls."""
        step = _ORDER.index(field)
        if self._open is None or step < self._reached or (step == self._reached and field != "tool_calls"):
            self._open = {"role": "assistant", "content": ""}
            self.messages.append(self._open)
        if field == "tool_calls":
            self._open.setdefault("tool_calls", [])
        self._reached = step
        return self._open

    def _remember(self, message: dict[str, Any]) -> None:
        for call in message.get("tool_calls") or ():
            self._calls.add_call(call["id"], call["function"]["name"], "previous_response_id")
        if message["role"] == "tool":
            self._calls.add_result(message["tool_call_id"], "previous_response_id")


def _call(call_id: str, called: CalledTool, arguments: str, where: str | None = None) -> dict[str, Any]:
    """`item` is for those who ask for the input of a stored response; chat templates do not see it."""
    function = {"name": called.flat_name, "arguments": _read(arguments, where)}
    call = {"id": call_id, "type": "function", "function": function}
    return call if called.flat_name == called.name and not called.custom else {**call, "item": called.item(call_id)}


def _read(arguments: str, where: str | None) -> dict[str, Any] | str:
    """Text that is not a JSON object, such as a call that was cut off, stays text. So does a too large one, if the
    model wrote it; from a client it is refused."""
    arguments = arguments.strip()
    if arguments.count(",") + arguments.count("[") + arguments.count("{") > MOST_ARGUMENT_VALUES:
        if where is None:
            return arguments
        raise InvalidRequestError(f"{where} has more than {MOST_ARGUMENT_VALUES} values.", where)
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As chat templates take them, which call the developer `system`. The system messages at the beginning are merged:
    many templates allow only one."""
    plain = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
    systems = [] if instructions is None else [instructions]
    rest = 0
    while rest < len(plain) and plain[rest]["role"] == "system":
        systems.append(plain[rest]["content"])
        rest += 1
    return [*([{"role": "system", "content": "\n\n".join(systems)}] if systems else []), *plain[rest:]]

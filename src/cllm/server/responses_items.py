"""The items of OpenAI's Responses in the form that chat templates know, which is that of OpenAI's chats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cllm.errors import InvalidRequestError
from cllm.server.validation import shorten

if TYPE_CHECKING:
    from cllm.server.responses_schema import FunctionCall, FunctionOutput, Item, MessageItem, ReasoningItem
    from cllm.server.runs import Runs

_ORDER = ("reasoning_content", "content", "tool_calls")
"""In which an answer is written."""
MOST_ARGUMENT_VALUES = 65_536
"""Of the JSON in one call's arguments: more would hold up others while it is read."""


class Turns:
    """What an answer was made of, reasoning, text and calls, becomes one message again."""

    def __init__(self, before: Sequence[dict[str, Any]] = ()) -> None:
        """`before`: the messages of the responses that this one goes on from."""
        self.messages: list[dict[str, Any]] = [*before]
        self._names: dict[str, str] = {}
        """Of the tools that were called, by the calls' ids."""
        self._unanswered: set[str] = set()
        self._open: dict[str, Any] | None = None
        """The assistant's message that may still grow."""
        self._reached = 0
        """Which of `_ORDER` it has last got."""
        for message in before:
            self._remember(message)

    def add(self, given: str | Sequence[Item]) -> None:
        """A request's input."""
        if isinstance(given, str):
            self.messages.append({"role": "user", "content": given})
            return
        for number, item in enumerate(given):
            self._add(item, f"input[{number}]")

    def add_answer(self, runs: Runs) -> None:
        self._open = None
        for run in runs.all:
            if run.kind == "call":
                self._assistant("tool_calls")["tool_calls"].append(_call(run.call_id, run.name, run.text))
            elif run.kind == "text":
                self._assistant("content")["content"] = run.text
            else:
                self._assistant("reasoning_content")["reasoning_content"] = run.text

    def _add(self, item: Item, where: str) -> None:
        if item.type == "function_call":
            self._add_call(item, where)
        elif item.type == "function_call_output":
            self._add_output(item, where)
        elif item.type == "reasoning":
            self._add_reasoning(item)
        else:
            self._add_message(item)

    def _add_message(self, item: MessageItem) -> None:
        if item.role == "assistant":
            self._assistant("content")["content"] = item.plain_text
            return
        self._open = None
        self.messages.append({"role": "system" if item.role == "developer" else item.role, "content": item.plain_text})

    def _add_reasoning(self, item: ReasoningItem) -> None:
        if (text := item.plain_text) is not None:
            self._assistant("reasoning_content")["reasoning_content"] = text

    def _add_call(self, item: FunctionCall, where: str) -> None:
        if item.call_id in self._names:
            raise _refusal(f"{where}.call_id", f"is {shorten(repr(item.call_id))}, which another call has")
        call = _call(item.call_id, item.name, item.arguments, f"{where}.arguments")
        message = self._assistant("tool_calls")
        message["tool_calls"].append(call)
        self._names[item.call_id] = item.name
        self._unanswered.add(item.call_id)

    def _add_output(self, item: FunctionOutput, where: str) -> None:
        name = self._names.get(item.call_id)
        if name is None or item.call_id not in self._unanswered:
            problem = "is that of no function_call before it" if name is None else "has an output already"
            raise _refusal(f"{where}.call_id", f"{problem}: {shorten(repr(item.call_id))}")
        self._unanswered.remove(item.call_id)
        self._open = None
        self.messages.append({"role": "tool", "tool_call_id": item.call_id, "name": name, "content": item.plain_text})

    def _assistant(self, field: str) -> dict[str, Any]:
        """The message that takes `field`: the last one, unless it has got as far. It may have several calls."""
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
            self._names[call["id"]] = call["function"]["name"]
            self._unanswered.add(call["id"])
        if message["role"] == "tool":
            self._unanswered.discard(message["tool_call_id"])


def _refusal(param: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {reason}.", param)


def _call(call_id: str, name: str, arguments: str, where: str | None = None) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": _read(arguments, where)}}


def _read(arguments: str, where: str | None) -> dict[str, Any] | str:
    """What is no JSON object, such as a call that was cut off, goes to the template as it is. So does what holds too
    much, if it is the model's; clients are refused."""
    arguments = arguments.strip()
    if arguments.count(",") + arguments.count("[") + arguments.count("{") > MOST_ARGUMENT_VALUES:
        if where is None:
            return arguments
        raise _refusal(where, f"holds more than {MOST_ARGUMENT_VALUES} values")
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def with_instructions(instructions: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The system messages at the beginning become one: many templates take no second one."""
    systems = [] if instructions is None else [instructions]
    rest = 0
    while rest < len(messages) and messages[rest]["role"] == "system":
        systems.append(messages[rest]["content"])
        rest += 1
    return [*([{"role": "system", "content": "\n\n".join(systems)}] if systems else []), *messages[rest:]]

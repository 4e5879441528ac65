"""Turns Ollama's messages into the messages that chat templates take."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticCustomError

from cllm.server.schema.validation import refusal, shorten

if TYPE_CHECKING:
    from cllm.server.ollama.schema import OllamaCall, OllamaMessage


def conversation_of(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    calls = _OpenCalls()
    made: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        plain: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            plain["reasoning_content"] = message.thinking
        if message.tool_calls:
            plain["tool_calls"] = [
                calls.add(call, f"{where}.tool_calls[{place}].id") for place, call in enumerate(message.tool_calls)
            ]
        if message.role == "tool":
            plain |= calls.answer(message, where)
        made.append(plain)
    return made


class _OpenCalls:
    """Calls that have no result yet. Most clients send no ids, some only those of results: then a result answers the
    first call that it can answer, of its tool if it names one."""

    def __init__(self) -> None:
        self._tools: dict[str, str] = {}
        """The tool that each call is of."""
        self._in_order: deque[str] = deque()
        self._by_tool: defaultdict[str, deque[str]] = defaultdict(deque)
        self._without_id: set[str] = set()
        """Calls whose ids were made here."""

    def add(self, call: OllamaCall, param: str) -> dict[str, Any]:
        tool, call_id = call.function.name, call.id
        if not call_id:
            call_id = f"call_number_{len(self._without_id)}"
            self._without_id.add(call_id)
        if call_id in self._tools:
            raise refusal(param, f"is {shorten(repr(call_id))}, which another call already uses")
        self._tools[call_id] = tool
        self._in_order.append(call_id)
        self._by_tool[tool].append(call_id)
        return {"id": call_id, "type": "function", "function": {"name": tool, "arguments": call.function.arguments}}

    def answer(self, message: OllamaMessage, where: str) -> dict[str, Any]:
        named, tool = message.tool_call_id, message.tool_name
        call_id = named
        if not named or named not in self._tools:
            first = self._first(self._by_tool[tool] if tool else self._in_order)
            call_id = first if not named or first in self._without_id else None
        found = None if call_id is None else self._tools.get(call_id)
        if found is None or tool not in (None, "", found):
            raise _not_waited_for(message, where)
        assert call_id is not None
        del self._tools[call_id]
        return {"tool_call_id": call_id, "name": found}

    def _first(self, ids: deque[str]) -> str | None:
        while ids and ids[0] not in self._tools:
            ids.popleft()
        return ids[0] if ids else None


def _not_waited_for(result: OllamaMessage, where: str) -> PydanticCustomError:
    for name in ("tool_call_id", "tool_name"):
        if given := getattr(result, name):
            return refusal(f"{where}.{name}", f"is {shorten(repr(given))}, but no such call is waiting for a result")
    return refusal(where, "is a tool result, but no earlier call is waiting for one")

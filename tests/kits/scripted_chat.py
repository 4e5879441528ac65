"""A chat whose pieces a test writes down, behind the real routes: what an API makes of calls and reasoning."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import ModuleType
from typing import Any

import pytest

from cllm.dialect.deltas import ChatDelta, Delta, ReasoningDelta, ToolCallDelta, ToolCallStart
from cllm.server.inference.chat import ChatInput
from cllm.server.inference.streams import Head
from cllm.text.template_source import CHATML

CALLS: list[ChatDelta] = [
    ReasoningDelta(0, "Let me "),
    ReasoningDelta(0, "think."),
    Delta(0, "I'll "),
    Delta(0, "look."),
    ToolCallStart(0, 0, "call_1", "weather"),
    ToolCallDelta(0, 0, '{"city":'),
    ToolCallDelta(0, 0, ' "Paris"}'),
    ToolCallStart(0, 1, "call_2", "time"),
    ToolCallDelta(0, 1, "{}"),
    Delta(0, "", finish_reason="tool_calls"),
]

TEMPLATE = f"{{# <think> </think> <tool_call> #}}{CHATML}"
"""Of a model that reasons and calls tools, and says:"""
SPOKEN = (
    '<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
)


class ScriptedChat:
    prompt_tokens, cached_tokens, completion_tokens, marked_tokens, reasoning_tokens = 20, 8, 9, 12, 3
    computed_tokens = 20
    cache_details = None

    def __init__(self, model: Any, prefix: str, pieces: Sequence[ChatDelta], failure: Exception | None) -> None:
        self.head = Head(f"{prefix}-1", 1_700_000_000, "tiny")
        self.model = model
        self._pieces = pieces
        self._failure = failure

    async def __aenter__(self) -> ScriptedChat:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[list[ChatDelta]]:
        for piece in self._pieces:
            yield [piece]
        if self._failure is not None:
            raise self._failure


def script(
    monkeypatch: pytest.MonkeyPatch, routes: ModuleType, pieces: Sequence[ChatDelta], failure: Exception | None = None
) -> list[ChatInput]:
    """Answer all requests to `routes` with these pieces; the calls that they became are added to what is returned."""
    calls: list[ChatInput] = []

    async def open_scripted(state: Any, request: Any, call: ChatInput, prefix: str) -> ScriptedChat:
        calls.append(call)
        return ScriptedChat(await state.model(call.model, request), prefix, pieces, failure)

    monkeypatch.setattr(routes, "open_chat", open_scripted)
    return calls

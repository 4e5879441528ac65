"""A chat whose pieces a test writes down, behind the real routes: what an API makes of calls and reasoning."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import ModuleType
from typing import Any

import pytest

from cllm.dialect.pieces import CallArguments, CallBegin, ChatEnd, Piece, ReasoningPiece, TextPiece
from cllm.server.answers import Head
from cllm.server.chat import ChatCall
from cllm.text.chat import CHATML

CALLS: list[Piece] = [
    ReasoningPiece(0, "Let me "),
    ReasoningPiece(0, "think."),
    TextPiece(0, "I'll "),
    TextPiece(0, "look."),
    CallBegin(0, 0, "call_1", "weather"),
    CallArguments(0, 0, '{"city":'),
    CallArguments(0, 0, ' "Paris"}'),
    CallBegin(0, 1, "call_2", "time"),
    CallArguments(0, 1, "{}"),
    ChatEnd(0, "tool_calls"),
]

TEMPLATE = f"{{# <think> </think> <tool_call> #}}{CHATML}"
"""Of a model that reasons and calls tools, and says:"""
SPOKEN = (
    '<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
)


class ScriptedChat:
    prompt_tokens, cached_tokens, completion_tokens, marked_tokens, reasoning_tokens = 20, 8, 9, 12, 3
    computed_tokens = 20

    def __init__(self, model: Any, prefix: str, pieces: Sequence[Piece], failure: Exception | None) -> None:
        self.head = Head(f"{prefix}-1", 1_700_000_000, "tiny")
        self.model = model
        self._pieces = pieces
        self._failure = failure

    async def __aenter__(self) -> ScriptedChat:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        for piece in self._pieces:
            yield [piece]
        if self._failure is not None:
            raise self._failure


def script(
    monkeypatch: pytest.MonkeyPatch, routes: ModuleType, pieces: Sequence[Piece], failure: Exception | None = None
) -> list[ChatCall]:
    """Answer all requests to `routes` with these pieces; the calls that they became are added to what is returned."""
    calls: list[ChatCall] = []

    async def open_scripted(state: Any, request: Any, call: ChatCall, prefix: str) -> ScriptedChat:
        calls.append(call)
        return ScriptedChat(await state.model(call.model, request), prefix, pieces, failure)

    monkeypatch.setattr(routes, "open_chat", open_scripted)
    return calls

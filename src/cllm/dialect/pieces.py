"""What an answer is made of, as it comes: text, reasoning, tool calls, and its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cllm.engine.sampling import TokenLogprob

Logprobs = Sequence["TokenLogprob"] | None
"""Those of the tokens that have come since the last piece of the same answer, where they were asked for."""


@dataclass(slots=True)
class TextPiece:
    index: int
    """Which of the answers."""
    text: str
    logprobs: Logprobs = None


@dataclass(slots=True)
class ReasoningPiece:
    index: int
    text: str
    logprobs: Logprobs = None


@dataclass(slots=True)
class CallBegin:
    """A tool call whose name is certain."""

    index: int
    number: int
    """Which of the answer's calls, from 0."""
    id: str
    name: str
    logprobs: Logprobs = None


@dataclass(slots=True)
class CallArguments:
    """More of a call's arguments, which are the text of a JSON object."""

    index: int
    number: int
    text: str
    logprobs: Logprobs = None


@dataclass(slots=True)
class ChatEnd:
    index: int
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    stop_reason: str | int | None = None
    logprobs: Logprobs = None


Piece = TextPiece | ReasoningPiece | CallBegin | CallArguments | ChatEnd

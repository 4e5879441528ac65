"""One whole answer, put together from its pieces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cllm.dialect.pieces import CallArguments, CallBegin, Piece, ReasoningPiece, TextPiece

if TYPE_CHECKING:
    from cllm.engine.sampling import TokenLogprob


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """The text of a JSON object."""


@dataclass(slots=True)
class ChatAnswer:
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)

    def add(self, piece: Piece) -> None:
        self.logprobs += piece.logprobs or ()
        if isinstance(piece, TextPiece):
            self.texts.append(piece.text)
        elif isinstance(piece, ReasoningPiece):
            self.thoughts.append(piece.text)
        elif isinstance(piece, CallBegin):
            self.calls.append(ToolCall(piece.id, piece.name, ""))
        elif isinstance(piece, CallArguments):
            self.calls[piece.number].arguments += piece.text
        else:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason

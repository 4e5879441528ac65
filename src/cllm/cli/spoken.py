"""What a model says in a conversation, on its way to the terminal and into the conversation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cllm.dialect.answer import ChatAnswer
from cllm.dialect.pieces import Piece, ReasoningPiece, TextPiece
from cllm.dialect.reasoning import Marks


class Spoken:
    """Reasoning is shown between the model's own marks; calls are shown by who asks for their results."""

    def __init__(self, write: Callable[[str], object], marks: Marks | None) -> None:
        self._write = write
        self._marks = marks or Marks("", "")
        self._whole = ChatAnswer()

    def take(self, piece: Piece) -> None:
        if isinstance(piece, ReasoningPiece):
            self._write(piece.text if self._whole.thoughts else f"{self._marks.begin}\n{piece.text}")
        elif isinstance(piece, TextPiece):
            ends_reasoning = self._whole.thoughts and not self._whole.texts
            self._write(f"\n{self._marks.end}\n\n{piece.text}" if ends_reasoning else piece.text)
        self._whole.add(piece)

    def message(self) -> dict[str, Any]:
        """All of it, as the next prompt needs it. Calls count only if they are whole."""
        message: dict[str, Any] = {"role": "assistant", "content": self._whole.text}
        if self._whole.thoughts:
            message["reasoning_content"] = self._whole.reasoning
        if self._whole.finish_reason == "tool_calls":
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self._whole.calls
            ]
        return message

"""An answer as a sequence of runs: reasoning, text or a call of a tool, one after the other.

OpenAI's Responses call them output items, Anthropic's messages content blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from cllm.dialect.pieces import CallArguments, CallBegin, ChatEnd, Piece, ReasoningPiece, TextPiece

if TYPE_CHECKING:
    from cllm.engine.sampling import TokenLogprob
    from cllm.server.chat import Chat

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Run:
    number: int
    """Its place in the answer, from 0."""
    kind: Kind
    call_id: str = ""
    name: str = ""
    """Of the tool that is called."""
    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text, or a call's arguments."""
        return "".join(self.parts)


class Step(NamedTuple):
    """What a piece changes: a run ends, another begins, one grows."""

    ended: Run | None = None
    begun: Run | None = None
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()


class Runs:
    def __init__(self) -> None:
        self.all: list[Run] = []
        self.open: Run | None = None
        self.end: ChatEnd | None = None

    def add(self, piece: Piece) -> Step:
        if isinstance(piece, TextPiece):
            return self._grow("text", piece.text, piece.logprobs or ())
        if isinstance(piece, ReasoningPiece):
            return self._grow("reasoning", piece.text, ())
        if isinstance(piece, CallBegin):
            return self._begin("call", piece.id, piece.name)
        if isinstance(piece, CallArguments):
            assert self.open is not None and self.open.kind == "call"
            self.open.parts.append(piece.text)
            return Step(text=piece.text)
        self.end = piece
        return Step(ended=self._close())

    def begin_empty(self) -> Run:
        """The text of an answer that has none."""
        self._begin("text")
        run = self._close()
        assert run is not None
        return run

    def _grow(self, kind: Kind, text: str, logprobs: Sequence[TokenLogprob]) -> Step:
        step = Step()
        if self.open is None or self.open.kind != kind:
            if not text and not logprobs:
                return step
            step = self._begin(kind)
        assert self.open is not None
        self.open.parts.append(text)
        self.open.logprobs += logprobs
        return step._replace(text=text, logprobs=logprobs)

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Step:
        ended = self._close()
        self.open = Run(len(self.all), kind, call_id, name)
        self.all.append(self.open)
        return Step(ended, self.open)

    def _close(self) -> Run | None:
        ended, self.open = self.open, None
        return ended


async def collect(chat: Chat) -> Runs:
    """Submit, wait for the end of the only answer, and clean up."""
    runs = Runs()
    async with chat:
        async for batch in chat:
            for piece in batch:
                runs.add(piece)
    return runs

"""An answer as a sequence of blocks: reasoning, text or a tool call, one after the other.

Anthropic calls them content blocks, OpenAI's Responses output items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from cllm.dialect.deltas import ChatDelta, Delta, ReasoningDelta, ToolCallDelta, ToolCallStart

if TYPE_CHECKING:
    from cllm.engine.sampling import TokenLogprob

BlockKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class ContentBlock:
    number: int
    """Its place in the answer, from 0."""
    kind: BlockKind
    call_id: str = ""
    name: str = ""
    """The name of the tool that is called."""
    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text, or a call's arguments."""
        return "".join(self.parts)


class BlockChange(NamedTuple):
    """What a delta changes: a block ends, another begins, one grows."""

    ended: ContentBlock | None = None
    begun: ContentBlock | None = None
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()


class ContentBlocks:
    def __init__(self) -> None:
        self.all: list[ContentBlock] = []
        self.open: ContentBlock | None = None
        self.end: Delta | None = None
        """The delta with the finish_reason."""

    def add(self, delta: ChatDelta) -> BlockChange:
        if isinstance(delta, ReasoningDelta):
            return self._grow("reasoning", delta.text, ())
        if isinstance(delta, ToolCallStart):
            return self._begin("call", delta.id, delta.name)
        if isinstance(delta, ToolCallDelta):
            assert self.open is not None and self.open.kind == "call"
            self.open.parts.append(delta.text)
            return BlockChange(text=delta.text)
        if delta.finish_reason is None:
            return self._grow("text", delta.text, delta.logprobs or ())
        self.end = delta
        return BlockChange(ended=self._close())

    def begin_empty(self) -> ContentBlock:
        """Add the empty text block of an answer without any."""
        self._begin("text")
        block = self._close()
        assert block is not None
        return block

    def _grow(self, kind: BlockKind, text: str, logprobs: Sequence[TokenLogprob]) -> BlockChange:
        change = BlockChange()
        if self.open is None or self.open.kind != kind:
            if not text and not logprobs:
                return change
            change = self._begin(kind)
        assert self.open is not None
        self.open.parts.append(text)
        self.open.logprobs += logprobs
        return change._replace(text=text, logprobs=logprobs)

    def _begin(self, kind: BlockKind, call_id: str = "", name: str = "") -> BlockChange:
        ended = self._close()
        self.open = ContentBlock(len(self.all), kind, call_id, name)
        self.all.append(self.open)
        return BlockChange(ended, self.open)

    def _close(self) -> ContentBlock | None:
        ended, self.open = self.open, None
        return ended

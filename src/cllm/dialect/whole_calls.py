"""Answers that are nothing but calls in JSON, bare or in a fence, as models write them that do not know the markers of
their template well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from cllm.dialect.call_runs import MOST_HELD
from cllm.dialect.deltas import ChatDelta, Delta, ToolCallDelta, ToolCallStart

if TYPE_CHECKING:
    from cllm.dialect.reader import AnswerReader


class WholeCalls:
    """Holds back an answer for as long as it may be nothing but calls; only its end decides that.

    It lets go at the first character that shows otherwise: another key, the name of no tool, text behind a call.
    """

    def __init__(self, reader: AnswerReader) -> None:
        """`reader`: reads calls that no marker announces."""
        self._reader = reader
        self._held: list[str] = []
        self._size = 0
        self._deltas: list[ChatDelta] = []

    def push(self, text: str) -> str:
        """All that was held, if the answer is something else. Otherwise nothing."""
        self._held.append(text)
        self._size += len(text)
        new = self._reader.push(text)
        self._deltas += new
        fits = not self._reader.ended and not any(map(_is_text, new)) and self._size <= MOST_HELD
        return "" if fits else "".join(self._held)

    def flush(self) -> tuple[list[ChatDelta], str]:
        """At the answer's end: (deltas of calls, text), one of them empty."""
        rest = self._reader.finish()
        if self._reader.finish_reason("stop") != "tool_calls" or any(map(_is_text, rest)):
            return [], "".join(self._held)
        return [*_joined([*self._deltas, *rest])], ""


def _joined(deltas: list[ChatDelta]) -> Iterator[ChatDelta]:
    """The calls, each with its arguments in one piece."""
    for kind, same in groupby(deltas, type):
        if kind is not ToolCallDelta:
            yield from (each for each in same if isinstance(each, ToolCallStart))
            continue
        pieces = [each for each in same if isinstance(each, ToolCallDelta)]
        yield replace(pieces[0], text="".join(piece.text for piece in pieces))


def _is_text(delta: ChatDelta) -> bool:
    return isinstance(delta, Delta) and not delta.text.isspace()

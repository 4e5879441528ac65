"""An answer's text, as it comes, to pieces: reasoning first, then text and tool calls in the model's format.

What comes out does not depend on how the text was cut up. Text before a call loses the blanks at its end, and text
after one those at its beginning; where there is no call, all text is passed on as it is. A call that turns out not to
be one before its name was certain is plain text, with its markers; one that is cut off there is left out after another
call, and where nothing but calls may come. One whose arguments turn out not to be JSON, or are
cut off, ends where it ends: the answer's end is then `length` or `stop`, never `tool_calls`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Protocol

from cllm.dialect.calls import State
from cllm.dialect.pieces import CallArguments, CallBegin, Piece, ReasoningPiece, TextPiece
from cllm.dialect.reasoning import ReasoningReader


class Attempt(Protocol):
    """Reads what may be a tool call, or several."""

    @property
    def name(self) -> str | None: ...
    @property
    def arguments(self) -> list[str]: ...
    @property
    def took_last(self) -> bool: ...
    @property
    def complete(self) -> bool: ...
    def feed(self, char: str) -> State: ...


class CallSyntax(Protocol):
    """Where in text tool calls begin, and how they are read."""

    def begins(self, text: str, *, at_start: bool, after_call: bool) -> tuple[int, int, int]:
        """(first, last, held): the text from `first` to `last` begins a call; `held` characters at the end may become
        such a beginning. No call: `first` and `last` are -1."""

    def attempt(self, opening: str, names: AbstractSet[str]) -> Attempt: ...

    def closing(self, text: str) -> tuple[int, bool]:
        """How many characters at the beginning of what follows a call belong to it, and whether more may."""


class AnswerReader:
    """Feed it text with `push`, and end with `finish`."""

    def __init__(
        self,
        index: int,
        *,
        reasoning: ReasoningReader | None = None,
        syntax: CallSyntax | None = None,
        names: AbstractSet[str] = frozenset(),
        most_calls: int | None = None,
        calls_only: bool = False,
        new_id: Callable[[], str] = str,
    ) -> None:
        """`calls_only`: a mask allows nothing else, beside reasoning."""
        self.ended = False
        """Whether what may still come does not count."""
        self._index = index
        self._reasoning = reasoning
        self._syntax = syntax if names else None
        self._names = names
        self._most_calls = most_calls
        self._calls_only = calls_only
        self._new_id = new_id
        self._pieces: list[Piece] = []
        self._calls = 0
        self._unfinished = False
        """Whether the last call's arguments are not whole."""
        self._text = ""
        """What is not certain to be text yet."""
        self._blanks = ""
        self._anything = False
        """Whether there was any text but blanks."""
        self._after_call = False
        """Whether nothing but blanks has come since the last call."""
        self._closing = False
        """Whether its end may still come."""
        self._attempt: Attempt | None = None
        self._seen = ""
        """All of the attempt, for the case that it is none."""
        self._announced = False

    def push(self, text: str) -> list[Piece]:
        self._take(text)
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """The rest, when no more text comes."""
        if not self.ended:
            if self._reasoning is not None:
                for is_reasoning, text in self._reasoning.flush():
                    self._sort(is_reasoning, text)
            self._end_attempt()
            if not self._closing and not self._cut_off:
                self._say(self._text)
            self._emit(self._blanks)
            self.ended = True
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish_reason(self, reason: str) -> str:
        """What the answer ended with, given what the model ended with."""
        if self._unfinished:
            return "length" if reason == "length" else "stop"
        return "tool_calls" if self._calls and reason == "stop" else reason

    # -- reasoning and text ------------------------------------------------------------------------------------

    def _take(self, text: str) -> None:
        if self.ended:
            return
        if self._reasoning is None:
            self._read(text)
            return
        for is_reasoning, part in self._reasoning.push(text):
            self._sort(is_reasoning, part)

    def _sort(self, is_reasoning: bool, text: str) -> None:
        if not is_reasoning:
            self._read(text)
        elif text and self._reasoning is not None:
            kind = ReasoningPiece if self._reasoning.separate else TextPiece
            self._pieces.append(kind(self._index, text))

    def _read(self, text: str) -> None:
        if self._syntax is None:
            self._emit(text)
            return
        while text and not self.ended:
            text = self._read_attempt(text) if self._attempt is not None else self._read_text(self._syntax, text)

    def _read_text(self, syntax: CallSyntax, text: str) -> str:
        """Pass on what is certain to be text. What is returned is to be read as part of a call."""
        self._text += text
        if self._closing:
            skipped, more = syntax.closing(self._text)
            if more:
                return ""
            self._text, self._closing = self._text[skipped:], False
        at_start = not self._anything and not self._calls
        first, last, held = syntax.begins(self._text, at_start=at_start, after_call=self._after_call)
        known, self._text = self._text, ""
        if first < 0:
            certain = len(known) - held
            self._text = known[certain:]
            self._say(known[:certain])
            return ""
        self._say(known[:first])
        self._seen = known[first:last]
        self._attempt = syntax.attempt(self._seen, self._names)
        self._announced = False
        return known[last:]

    def _say(self, text: str) -> None:
        """Text for the client; blanks at its end wait, for a call may follow."""
        text = text.lstrip() if self._after_call else text
        body = text.rstrip()
        if not body:
            self._blanks += text
            return
        self._anything, self._after_call = True, False
        self._emit(self._blanks + body)
        self._blanks = text[len(body) :]

    def _emit(self, text: str) -> None:
        if text:
            self._pieces.append(TextPiece(self._index, text))

    # -- calls -------------------------------------------------------------------------------------------------

    def _read_attempt(self, text: str) -> str:
        attempt = self._attempt
        assert attempt is not None
        for position, char in enumerate(text):
            state = attempt.feed(char)
            if state is State.OPEN and attempt.name is None:
                self._seen += char
                continue
            if attempt.name is not None:
                self._announce(attempt)
            if state is State.OPEN:
                continue
            rest = text[position + attempt.took_last :]
            if state is State.FAILED:
                self._give_up(text[position : position + attempt.took_last])
                return rest
            self._pass_on(attempt)
            self._close_call(broken=state is State.BROKEN)
            return rest
        self._pass_on(attempt)
        return ""

    def _announce(self, attempt: Attempt) -> None:
        if self._announced:
            return
        assert attempt.name is not None
        self._announced = True
        self._blanks = ""
        self._pieces.append(CallBegin(self._index, self._calls, self._new_id(), attempt.name))
        self._calls += 1

    def _pass_on(self, attempt: Attempt) -> None:
        if self._announced and attempt.arguments:
            self._pieces.append(CallArguments(self._index, self._calls - 1, "".join(attempt.arguments)))
            attempt.arguments.clear()

    def _close_call(self, *, broken: bool) -> None:
        self._attempt = None
        self._after_call = self._closing = True
        self._unfinished = broken
        if broken or self._calls == self._most_calls:
            self.ended = True

    def _give_up(self, last: str) -> None:
        """It is none: plain text, all of it."""
        text, self._seen, self._attempt = self._seen + last, "", None
        self._say(text)

    def _end_attempt(self) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        if self._announced:
            self._pass_on(attempt)
            self._close_call(broken=not attempt.complete)
        elif not self._cut_off:
            self._give_up("")

    @property
    def _cut_off(self) -> bool:
        """Whether what may begin a call, where the answer ends, can have been nothing else."""
        return self._calls_only or self._after_call

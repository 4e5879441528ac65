"""Tool calls that end the reasoning, since some models call tools without closing it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cllm.dialect.calls import CallState, Tools
from cllm.dialect.reasoning import Marks, held_back

if TYPE_CHECKING:
    from cllm.dialect.reader import Attempt
    from cllm.dialect.syntax import JsonSyntax

MOST_HELD = 2**17
"""Characters of a run of calls. Nothing is streamed meanwhile, so what is longer becomes text."""

_STRAY = frozenset("}],;")
"""Brackets too many, and what separates calls between one pair of marks: no reason to lose a call."""


class CallRuns:
    """Holds back what may be a run of calls at the end of a text: nothing but calls and blanks. Anything else lets go
    of all that is held: an unknown name, broken JSON, text after a call.

    Every character is read at most twice, however the text is cut up.
    """

    def __init__(self, marks: Marks, syntax: JsonSyntax, tools: Tools) -> None:
        """`marks`: around each call."""
        self._marks = marks
        self._syntax = syntax
        self._tools = tools
        self._held: list[str] = []
        """The run so far, character by character; empty: there is none."""
        self._attempt: Attempt | None = None
        """Reads the call that has begun."""
        self._expected = marks.begin
        """The next mark, between calls."""
        self._part = ""
        """As much of it as has come."""

    def push(self, text: str) -> str:
        """What is certainly not part of a run at the end."""
        free: list[str] = []
        self._read(text, free)
        return "".join(free)

    def flush(self) -> tuple[str, str]:
        """What is held, at the text's end: (text, calls), one of them empty."""
        is_run = bool(self._held) and self._attempt is None and self._expected == self._marks.begin and not self._part
        held = "".join(self._held) or self._part
        self._forget()
        return ("", held) if is_run else (held, "")

    def _forget(self) -> None:
        self._held, self._attempt, self._expected, self._part = [], None, self._marks.begin, ""

    def _read(self, text: str, free: list[str]) -> None:
        at = 0
        while at < len(text):
            at = self._follow(text, at, free) if self._held else self._seek(text, at, free)

    # -- outside a run -----------------------------------------------------------------------------------------

    def _seek(self, text: str, at: int, free: list[str]) -> int:
        """Look for the beginning of a run. The return value is where to read on."""
        begin = self._marks.begin
        if self._part:
            self._sift(self._part + text[at], free)
            return at + 1
        found = text.find(begin, at)
        if found < 0:
            self._sift(text[at:], free)
            return len(text)
        free.append(text[at:found])
        self._begin_run()
        return found + len(begin)

    def _sift(self, text: str, free: list[str]) -> None:
        """Let go of all but what may begin a run."""
        if text == self._marks.begin:
            self._begin_run()
            return
        certain = len(text) - held_back(text, self._marks.begin)
        free.append(text[:certain])
        self._part = text[certain:]

    def _begin_run(self) -> None:
        self._held, self._part = [*self._marks.begin], ""
        self._attempt = self._syntax.attempt(self._marks.begin, self._tools)

    # -- in a run ----------------------------------------------------------------------------------------------

    def _follow(self, text: str, at: int, free: list[str]) -> int:
        for position in range(at, len(text)):
            self._held.append(text[position])
            if not self._fits(text[position]) or len(self._held) > MOST_HELD:
                self._fall_back(free)
                return position + 1
        return len(text)

    def _fall_back(self, free: list[str]) -> None:
        """It is no run. Only the last beginning in it is tried instead: to try each would take quadratic time."""
        held, begin = "".join(self._held), self._marks.begin
        self._forget()
        last = held.rfind(begin, len(begin))
        if last < 0:
            self._sift(held, free)
            return
        free.append(held[:last])
        self._read(held[last:], free)

    def _fits(self, char: str) -> bool:
        return self._fits_between(char) if self._attempt is None else self._fits_call(self._attempt, char)

    def _fits_call(self, attempt: Attempt, char: str) -> bool:
        state = attempt.feed(char)
        attempt.arguments.clear()
        if state is not CallState.DONE:
            return state is CallState.OPEN
        self._attempt, self._expected = None, self._marks.end
        return attempt.took_last or self._fits_between(char)

    def _fits_between(self, char: str) -> bool:
        part = self._part + char
        if self._expected.startswith(part):
            self._part = part
            if part == self._expected:
                self._pass_mark()
            return True
        if self._part:
            return False
        return char.isspace() or (self._expected == self._marks.end and self._fits_before_end(char))

    def _pass_mark(self) -> None:
        begin, self._part = self._marks.begin, ""
        if self._expected == begin:
            self._attempt = self._syntax.attempt(begin, self._tools)
        self._expected = begin

    def _fits_before_end(self, char: str) -> bool:
        first, last, _ = self._syntax.begins(char, at_start=False, after_call=True)
        if first < 0:
            return char in _STRAY
        self._attempt = self._syntax.attempt(char[first:last], self._tools)
        return self._fits_call(self._attempt, char[last:])

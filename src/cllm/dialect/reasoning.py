"""Separates the reasoning at the beginning of an answer from the answer itself."""

from __future__ import annotations

from typing import Literal, NamedTuple

Thinking = Literal["none", "opened", "closed"]
"""Whether the prompt has opened the reasoning, or closed it."""


class Marks(NamedTuple):
    begin: str
    end: str


FORMATS = {
    "think": Marks("<think>", "</think>"),
    "mistral": Marks("[THINK]", "[/THINK]"),
    "seed": Marks("<seed:think>", "</seed:think>"),
    "cohere": Marks("<|START_THINKING|>", "<|END_THINKING|>"),
}


_IN_CALLS = ("", "{", "<")
"""What a call begins with, or nothing yet."""


def detect_format(template: str) -> str | None:
    """The reasoning format of a chat template."""
    return next((name for name, marks in FORMATS.items() if marks.end in template), None)


class ReasoningReader:
    """Cuts text in two: what stands between the marks, if the answer begins with the first, and the rest. A mark
    anywhere else is text. Blanks around the marks are part of neither, unless the two are not to be told apart.

    Some models call a tool without ending their reasoning. A call that ends the answer is therefore never part of the
    reasoning, and what may become such a call is held back.
    """

    def __init__(
        self,
        marks: Marks,
        *,
        opened: bool,
        continues: bool = False,
        separate: bool = True,
        call: Marks | None = None,
    ) -> None:
        """`opened`: the prompt has the first mark; the model may repeat it. `continues`: it is part of the message that
        the answer continues. `separate`: leave out the marks. `call`: the marks around a tool call."""
        self.separate = separate
        self._marks = marks
        self._call = call
        self._opened = opened
        self._continues = continues
        self._state = "before"
        self._fresh = False
        """Whether no reasoning has come since its first mark."""
        self._held = ""

    @property
    def inside(self) -> bool:
        """Whether the last text belongs to the reasoning, its marks and the blanks around them included."""
        return self._state in ("in", "gap") or (self._opened and self._state == "before")

    def push(self, text: str) -> list[tuple[bool, str]]:
        """(is it reasoning?, text), as far as it is certain."""
        if self._state == "after":
            return [(False, text)]
        self._held += text
        parts: list[tuple[bool, str]] = []
        if self._state == "before":
            self._look_for_begin(parts)
        if self._state == "in":
            self._look_for_end(parts)
        if self._state == "gap":
            self._skip_gap(parts)
        return parts

    def flush(self) -> list[tuple[bool, str]]:
        parts: list[tuple[bool, str]] = []
        if self._state == "before" and self._opened and self._held:
            self._begin(parts, "")
        held, self._held = self._held, ""
        if self._state == "in" and not self._is_call(held):
            return [*parts, (True, held.rstrip() if self.separate else held)]
        state, self._state = self._state, "after"
        return parts if state == "gap" and self.separate else [*parts, (False, held)]

    def _look_for_begin(self, parts: list[tuple[bool, str]]) -> None:
        begin, known = self._marks.begin, self._held.lstrip()
        if known.startswith(begin):
            self._begin(parts, self._held[: len(self._held) - len(known)])
            self._held = known[len(begin) :]
        elif not begin.startswith(known):
            if self._opened:
                self._begin(parts, "")
                return
            self._state = "after"
            parts.append((False, self._held))
            self._held = ""

    def _begin(self, parts: list[tuple[bool, str]], blanks: str) -> None:
        self._state, self._fresh = "in", True
        if not self.separate and not self._continues:
            parts.append((True, blanks + self._marks.begin))

    def _look_for_end(self, parts: list[tuple[bool, str]]) -> None:
        end = self._marks.end
        at = self._held.find(end)
        if at >= 0:
            cut = at if self.separate else at + len(end)
            self._give(parts, self._held[:cut], last=True)
            self._held = self._held[at + len(end) :]
            self._state = "gap"
            return
        certain = min(len(self._held) - held_back(self._held, end), self._before_call())
        if self.separate:
            certain = len(self._held[:certain].rstrip())
        self._give(parts, self._held[:certain], last=False)
        self._held = self._held[certain:]

    def _before_call(self) -> int:
        """How much of what is held comes before anything that may be a tool call."""
        if self._call is None:
            return len(self._held)
        begin, at = self._call.begin, self._held.find(self._call.begin)
        while at >= 0 and self._held[at + len(begin) :].lstrip()[:1] not in _IN_CALLS:
            at = self._held.find(begin, at + 1)
        return at if at >= 0 else len(self._held) - held_back(self._held, begin)

    def _is_call(self, held: str) -> bool:
        if self._call is None:
            return False
        text = held.strip()
        return text.startswith(self._call.begin) and text.endswith(self._call.end)

    def _give(self, parts: list[tuple[bool, str]], text: str, *, last: bool) -> None:
        if self.separate:
            text = text.lstrip() if self._fresh else text
            text = text.rstrip() if last else text
        if text:
            self._fresh = False
            parts.append((True, text))

    def _skip_gap(self, parts: list[tuple[bool, str]]) -> None:
        known = self._held.lstrip() if self.separate else self._held
        if known:
            self._state, self._held = "after", ""
            parts.append((False, known))


def held_back(text: str, mark: str) -> int:
    """How many characters at the end of the text may begin the mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0

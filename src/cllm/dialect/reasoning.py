"""Separates the reasoning at the beginning of an answer from the answer itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from cllm.dialect.call_runs import CallRuns

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


def detect_format(template: str) -> str | None:
    """The reasoning format of a chat template."""
    return next((name for name, marks in FORMATS.items() if marks.end in template), None)


class ReasoningReader:
    """Cuts text in two: what stands between the marks, if the answer begins with the first, and the rest. A mark
    anywhere else is text. Blanks around the marks are part of neither, unless the two are not to be told apart.

    Some models call a tool without ending their reasoning. Calls that end the answer are therefore never part of the
    reasoning, and what may become such calls is held back.
    """

    def __init__(
        self,
        marks: Marks,
        *,
        opened: bool,
        continues: bool = False,
        separate: bool = True,
        calls: CallRuns | None = None,
    ) -> None:
        """`opened`: the prompt has the first mark; the model may repeat it. `continues`: it is part of the message that
        the answer continues. `separate`: leave out the marks. `calls`: finds calls that end the reasoning."""
        self.separate = separate
        self._marks = marks
        self._calls = calls
        self._opened = opened
        self._continues = continues
        self._state = "before"
        self._fresh = False
        """Whether no reasoning has come since its first mark."""
        self._part = ""
        """What may be the beginning of the next mark."""
        self._blanks: list[str] = []
        """Before the first mark, or at the end of the reasoning so far."""

    @property
    def inside(self) -> bool:
        """Whether the last text belongs to the reasoning, its marks and the blanks around them included."""
        return self._state in ("in", "gap") or (self._opened and self._state == "before")

    def push(self, text: str) -> list[tuple[bool, str]]:
        """(is it reasoning?, text), as far as it is certain."""
        parts: list[tuple[bool, str]] = []
        if self._state == "before":
            text = self._look_for_begin(parts, text)
        if self._state == "in":
            text = self._look_for_end(parts, text)
        if self._state == "gap":
            text = self._skip_gap(text)
        if text:
            parts.append((False, text))
        return parts

    def flush(self) -> list[tuple[bool, str]]:
        parts: list[tuple[bool, str]] = []
        rest = self._take_beginning() if self._state == "before" else self._take_part()
        if self._state == "before" and self._opened and rest:
            self._begin(parts, "")
        if self._state == "in":
            text = self._before_calls(rest)
            held, rest = self._held_calls()
            self._give(parts, text + held)
        if self._state != "in" or rest:
            self._state = "after"
        return [*parts, (False, rest)] if rest else parts

    # Each of these takes the text that follows what it has kept, and returns what is left for the next state.

    def _look_for_begin(self, parts: list[tuple[bool, str]], text: str) -> str:
        begin, known = self._marks.begin, self._part + text
        if not self._part:
            known = text.lstrip()
            self._blanks.append(text[: len(text) - len(known)])
        self._part = known
        if known.startswith(begin):
            self._part = ""
            self._begin(parts, self._take_blanks())
            return known[len(begin) :]
        if begin.startswith(known):
            return ""
        if self._opened:
            self._begin(parts, "")
        else:
            self._state = "after"
        return self._take_beginning()

    def _look_for_end(self, parts: list[tuple[bool, str]], text: str) -> str:
        end, known = self._marks.end, self._take_part() + text
        at = known.find(end)
        if at < 0:
            certain = len(known) - held_back(known, end)
            self._part = known[certain:]
            self._give(parts, self._before_calls(known[:certain]))
            return ""
        cut = at if self.separate else at + len(end)
        self._give(parts, "".join(self._held_calls()) + known[:cut])
        self._state = "gap"
        return known[at + len(end) :]

    def _skip_gap(self, text: str) -> str:
        known = text.lstrip() if self.separate else text
        if known:
            self._state = "after"
        return known

    def _begin(self, parts: list[tuple[bool, str]], blanks: str) -> None:
        self._state, self._fresh = "in", True
        if not self.separate and not self._continues:
            parts.append((True, blanks + self._marks.begin))

    def _give(self, parts: list[tuple[bool, str]], text: str) -> None:
        """Reasoning; trailing blanks wait, since the mark may follow."""
        if self.separate:
            text = text.lstrip() if self._fresh else text
            body = text.rstrip()
            blanks = text[len(body) :]
            text = self._take_blanks() + body if body else ""
            self._blanks.append(blanks)
        if text:
            self._fresh = False
            parts.append((True, text))

    def _before_calls(self, text: str) -> str:
        """What is certainly reasoning, even if calls end the answer."""
        return text if self._calls is None else self._calls.push(text)

    def _held_calls(self) -> tuple[str, str]:
        """What was held back: (reasoning, calls that end the answer)."""
        return ("", "") if self._calls is None else self._calls.flush()

    def _take_beginning(self) -> str:
        return self._take_blanks() + self._take_part()

    def _take_blanks(self) -> str:
        blanks = "".join(self._blanks)
        self._blanks.clear()
        return blanks

    def _take_part(self) -> str:
        part, self._part = self._part, ""
        return part


def held_back(text: str, mark: str) -> int:
    """How many characters at the end of the text may begin the mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0

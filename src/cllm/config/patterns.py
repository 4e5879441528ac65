"""Regular expressions of the configuration, of a plain kind: how long one takes grows with the line, and not faster.

Python's own try one way to match after the other, and some have more ways than anybody can wait for. These follow all
ways at once, character by character, so that whoever writes the lines cannot hold anybody up:

    pattern ──► places in it, each for one character ──► which of them may come next, after each character of a line
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_PLACES = 256
"""Characters that a pattern is made of, each as often as it is counted: a{3}b has four."""
MOST_NESTED = 16
MOST_KNOWN = 10_000
"""Steps from one character to the next that are remembered."""

_COUNT = re.compile(r"\{(?:(\d+)|(\d*),(\d*))\}")
_CLASS_ESCAPES = "dDwWsS"
_CONTROLS = "tnrfv"

Test = Callable[[str], object]


class PatternError(ValueError):
    """Says what is wrong with a pattern."""


# -- reading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Char:
    test: Test


@dataclass(frozen=True, slots=True)
class _Group:
    """One of these, each of which is a row of items."""

    ways: Sequence[Sequence[_Item]]


@dataclass(frozen=True, slots=True)
class _Repeat:
    item: _Item
    least: int
    most: int | None


_Item = _Char | _Group | _Repeat


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0

    def read(self) -> _Group:
        self._take("^")  # matches begin where lines do anyway
        group = self._group(re.IGNORECASE if self._take("(?i)") else re.RegexFlag(0))
        if self._at < len(self._text):
            raise PatternError("is none (a ) that closes nothing)")
        return group

    def _take(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _group(self, flags: re.RegexFlag) -> _Group:
        ways: list[list[_Item]] = [[]]
        while self._at < len(self._text) and self._text[self._at] != ")":
            if self._take("|"):
                ways.append([])
            else:
                ways[-1].append(self._repeated(self._item(flags)))
        if self._depth and self._at >= len(self._text):
            raise PatternError("is none (missing ) of a group)")
        if not all(ways):
            raise PatternError("also matches nothing" if len(ways) == 1 and not self._depth else "has an empty part")
        return _Group(ways)

    def _item(self, flags: re.RegexFlag) -> _Item:
        start = self._at
        if self._take("("):
            return self._in_parentheses(flags)
        char = self._text[start]
        if char in "^$":
            raise PatternError(f"has {char}, which is not for these patterns")
        if char in "*+?":
            raise PatternError(f"is none ({char} that repeats nothing)")
        self._at += 1
        if char == "[":
            self._skip_class()
        elif char == "\\":
            self._skip_escape()
        source = self._text[start : self._at]
        is_literal = len(source) == 1 and source != "."
        try:
            return _Char(re.compile(re.escape(source) if is_literal else source, flags).match)
        except re.error as error:
            raise PatternError(f"is none ({error})") from None

    def _in_parentheses(self, flags: re.RegexFlag) -> _Group:
        if self._take("?") and not self._take(":"):
            if not self._take("i:"):
                raise PatternError(f"has (?{self._text[self._at : self._at + 1]}, which is not for these patterns")
            flags = re.IGNORECASE
        self._depth += 1
        if self._depth > MOST_NESTED:
            raise PatternError(f"has groups in groups, more than {MOST_NESTED} deep")
        group = self._group(flags)
        self._at += 1
        self._depth -= 1
        return group

    def _skip_class(self) -> None:
        self._take("^")
        self._take("]")  # at the beginning it is one of the characters
        while not self._take("]"):
            if self._at >= len(self._text):
                raise PatternError("is none (missing ] of a class)")
            self._at += 2 if self._text[self._at] == "\\" else 1

    def _skip_escape(self) -> None:
        escaped = self._text[self._at : self._at + 1]
        if not escaped:
            raise PatternError("is none (a backslash at its end)")
        if escaped.isalnum() and escaped not in _CLASS_ESCAPES + _CONTROLS:
            raise PatternError(f"has \\{escaped}, which is not for these patterns")
        self._at += 1

    def _repeated(self, item: _Item) -> _Item:
        if self._take("*"):
            found = _Repeat(item, 0, None)
        elif self._take("+"):
            found = _Repeat(item, 1, None)
        elif self._take("?"):
            found = _Repeat(item, 0, 1)
        elif count := _COUNT.match(self._text, self._at):
            self._at = count.end()
            found = _counted(item, count)
        else:
            return item
        if self._text[self._at : self._at + 1] in ("*", "+", "?") or _COUNT.match(self._text, self._at):
            raise PatternError(f"has {self._text[self._at]} behind a repetition, which is not for these patterns")
        return found


def _counted(item: _Item, count: re.Match[str]) -> _Repeat:
    least, most = (count[1], count[1]) if count[1] else (count[2] or "0", count[3])
    if len(least + most) > 8 or most == "0" or (most and int(most) < int(least)):
        raise PatternError(f"has {count[0]}, which is no number of repetitions")
    return _Repeat(item, int(least), int(most) if most else None)


# -- following -----------------------------------------------------------------------------------------------------


class _Span(NamedTuple):
    """A part of a pattern: the places that it may begin and end with, and whether it may be left out."""

    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()
    optional: bool = True


class _Node:
    """What may come next; whether the line has matched so far; and what is known of the next character."""

    __slots__ = ("after", "matched", "places")

    def __init__(self, places: frozenset[int], *, matched: bool) -> None:
        self.places = places
        self.matched = matched
        self.after: dict[str, _Node] = {}


class Pattern:
    """Raises `PatternError`. May be used by several threads."""

    def __init__(self, pattern: str) -> None:
        self._tests: list[Test] = []
        self._follow: list[set[int]] = []
        self._whole = self._group(_Reader(pattern).read())
        if self._whole.optional:
            raise PatternError("also matches nothing")
        self._forget()

    def match(self, text: str, position: int, end: int) -> int | None:
        """Where the longest match that begins at `position` ends; None: there is none."""
        node, found = self._start, None
        while position < end and node.places:
            char = text[position]
            node = node.after.get(char) or self._step(node, char)
            position += 1
            if node.matched:
                found = position
        return found

    def _step(self, node: _Node, char: str) -> _Node:
        passed = frozenset(place for place in node.places if self._tests[place](char))
        after = self._nodes.get(passed)
        if after is None:
            follow = frozenset[int]().union(*(self._follow[place] for place in passed))
            after = self._nodes[passed] = _Node(follow, matched=not passed.isdisjoint(self._whole.last))
        node.after[char] = after
        self._known += 1
        if self._known > MOST_KNOWN:
            self._forget()
        return after

    def _forget(self) -> None:
        self._start = _Node(self._whole.first, matched=False)
        self._nodes: dict[frozenset[int], _Node] = {}
        self._known = 0

    # -- building ----------------------------------------------------------------------------------------------

    def _span(self, item: _Item) -> _Span:
        if isinstance(item, _Group):
            return self._group(item)
        if isinstance(item, _Repeat):
            return self._repeat(item)
        if len(self._tests) == MOST_PLACES:
            raise PatternError(f"has more than {MOST_PLACES} characters, counted as often as they are repeated")
        self._tests.append(item.test)
        self._follow.append(set())
        place = frozenset({len(self._tests) - 1})
        return _Span(place, place, optional=False)

    def _group(self, group: _Group) -> _Span:
        spans = [self._row(way) for way in group.ways]
        return _Span(
            frozenset[int]().union(*(span.first for span in spans)),
            frozenset[int]().union(*(span.last for span in spans)),
            any(span.optional for span in spans),
        )

    def _row(self, items: Sequence[_Item]) -> _Span:
        row = _Span()
        for item in items:
            row = self._then(row, self._span(item))
        return row

    def _repeat(self, repeat: _Repeat) -> _Span:
        row, span = _Span(), _Span()
        for _ in range(repeat.least):
            span = self._span(repeat.item)
            row = self._then(row, span)
        if repeat.most is None:
            if not repeat.least:
                span = self._span(repeat.item)
                row = span._replace(optional=True)
            self._join(span, span)
        for _ in range((repeat.most or 0) - repeat.least):
            row = self._then(row, self._span(repeat.item)._replace(optional=True))
        return row

    def _then(self, one: _Span, other: _Span) -> _Span:
        self._join(one, other)
        return _Span(
            one.first | other.first if one.optional else one.first,
            one.last | other.last if other.optional else other.last,
            one.optional and other.optional,
        )

    def _join(self, one: _Span, other: _Span) -> None:
        for place in one.last:
            self._follow[place] |= other.first


def what_is_wrong(pattern: str) -> str | None:
    """Why a pattern cannot be taken; None: it can."""
    try:
        Pattern(pattern)
    except PatternError as error:
        return str(error)
    return None

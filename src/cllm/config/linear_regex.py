"""Simple regular expressions that match in linear time, for patterns in the configuration.

Python's `re` backtracks, and some patterns take exponential time on lines that a client can choose. These are run as an
automaton (Glushkov's construction, made deterministic lazily):

    pattern ──► positions in it, one per character ──► the set of positions that may come next, after each character
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_POSITIONS = 256
"""Maximum number of positions in a pattern, counting repetitions: a{3}b has four."""
MAX_NESTED = 16
MAX_TRANSITIONS = 10_000
"""Maximum number of cached transitions."""

_COUNT = re.compile(r"\{(?:(\d+)|(\d*),(\d*))\}")
_CLASS_ESCAPES = "dDwWsS"
_CONTROLS = "tnrfv"

Test = Callable[[str], object]


class PatternError(ValueError):
    """An invalid pattern; the message completes "PATTERN ..."."""


# -- reading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Char:
    test: Test


@dataclass(frozen=True, slots=True)
class _Group:
    """Alternatives, each a sequence of items."""

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
        self._take("^")  # patterns match at the start of a line anyway
        group = self._group(re.IGNORECASE if self._take("(?i)") else re.RegexFlag(0))
        if self._at < len(self._text):
            raise PatternError("is invalid (unmatched parenthesis)")
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
            raise PatternError("is invalid (missing ) of a group)")
        if not all(ways):
            raise PatternError(
                "matches the empty string" if len(ways) == 1 and not self._depth else "has an empty part"
            )
        return _Group(ways)

    def _item(self, flags: re.RegexFlag) -> _Item:
        start = self._at
        if self._take("("):
            return self._in_parentheses(flags)
        char = self._text[start]
        if char in "^$":
            raise PatternError(f"uses {char}, which is not supported here")
        if char in "*+?":
            raise PatternError(f"is invalid (nothing to repeat before {char})")
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
            raise PatternError(f"is invalid ({error})") from None

    def _in_parentheses(self, flags: re.RegexFlag) -> _Group:
        if self._take("?") and not self._take(":"):
            if not self._take("i:"):
                raise PatternError(f"uses (?{self._text[self._at : self._at + 1]}, which is not supported here")
            flags = re.IGNORECASE
        self._depth += 1
        if self._depth > MAX_NESTED:
            raise PatternError(f"has groups nested more than {MAX_NESTED} deep")
        group = self._group(flags)
        self._at += 1
        self._depth -= 1
        return group

    def _skip_class(self) -> None:
        self._take("^")
        self._take("]")  # as the first character it is a literal
        while not self._take("]"):
            if self._at >= len(self._text):
                raise PatternError("is invalid (missing ] of a class)")
            self._at += 2 if self._text[self._at] == "\\" else 1

    def _skip_escape(self) -> None:
        escaped = self._text[self._at : self._at + 1]
        if not escaped:
            raise PatternError("is invalid (it ends with a backslash)")
        if escaped.isalnum() and escaped not in _CLASS_ESCAPES + _CONTROLS:
            raise PatternError(f"uses \\{escaped}, which is not supported here")
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
            raise PatternError(f"uses {self._text[self._at]} after a repetition, which is not supported here")
        return found


def _counted(item: _Item, count: re.Match[str]) -> _Repeat:
    least, most = (count[1], count[1]) if count[1] else (count[2] or "0", count[3])
    if len(least + most) > 8 or most == "0" or (most and int(most) < int(least)):
        raise PatternError(f"has an invalid repetition {count[0]}")
    return _Repeat(item, int(least), int(most) if most else None)


# -- following -----------------------------------------------------------------------------------------------------


class _Span(NamedTuple):
    """A part of a pattern: the positions it may begin and end with, and whether it may be empty."""

    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()
    optional: bool = True


class _Node:
    """A state: the positions that may come next, whether the text so far matches, and known transitions."""

    __slots__ = ("after", "matched", "places")

    def __init__(self, places: frozenset[int], *, matched: bool) -> None:
        self.places = places
        self.matched = matched
        self.after: dict[str, _Node] = {}


class Pattern:
    """Raises `PatternError`. Thread-safe."""

    def __init__(self, pattern: str) -> None:
        self._tests: list[Test] = []
        self._follow: list[set[int]] = []
        self._whole = self._group(_Reader(pattern).read())
        if self._whole.optional:
            raise PatternError("matches the empty string")
        self._forget()

    def match(self, text: str, position: int, end: int) -> int | None:
        """The end of the longest match that begins at `position`; None if there is no match."""
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
        if self._known > MAX_TRANSITIONS:
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
        if len(self._tests) == MAX_POSITIONS:
            raise PatternError(f"has more than {MAX_POSITIONS} characters, counting repetitions")
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


def pattern_error(pattern: str) -> str | None:
    """Why a pattern is invalid; None if it is valid."""
    try:
        Pattern(pattern)
    except PatternError as error:
        return str(error)
    return None

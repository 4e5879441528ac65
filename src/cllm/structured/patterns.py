"""Patterns of JSON schemas, written so that llguidance means by them what the standard means.

It knows no look-around. Look-ahead at the beginning of a pattern can be said as patterns that must all match.
"""

from __future__ import annotations

import re
from typing import Any

MOST_AHEAD = 8
"""Each is a pattern more that must match."""
_PART = re.compile(r"(\\.)|(\[\^?)|(\])", re.DOTALL)
_BLANKS = r"\t\n\x0b\x0c\r \xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_BEGINNING = re.compile(r"\^((?:\(\?[=!](?:[^()\\]|\\.)*\)(?![*+?{]))+)")
_ONE = re.compile(r"\(\?([=!])((?:[^()\\]|\\.)*)\)")
_CHARACTER = r"(\\[^\w\s]|[^\\^$.|?*+()\[\]{}])"
_NOT_FIRST = re.compile(_CHARACTER)
_NOT_TWICE = re.compile(rf"\.\*{_CHARACTER}\1")
_BRACKETS = re.compile(r"\\.|\[(?:[^\]\\]|\\.)*(?:\]|\\?\Z)|[()|]", re.DOTALL)
"""One that is not closed goes to the end: each is read once."""


def keep_to_the_standard(schema: Any) -> None:
    if not isinstance(schema, dict):
        return
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = _as_meant(pattern)
    if isinstance(named := schema.get("patternProperties"), dict):
        schema["patternProperties"] = {_as_meant(name): each for name, each in named.items()}


def _as_meant(pattern: str) -> str:
    """`\\s` has no next line, U+0085. What must not be one of some characters is not NUL, either: where llguidance may
    write that, it writes escaped quotes and backslashes, too, even if they are among those characters."""
    inside = False

    def written(found: re.Match[str]) -> str:
        nonlocal inside
        escape, opening, closing = found.groups()
        if escape == r"\s":
            return _BLANKS if inside else f"[{_BLANKS}]"
        if opening and not inside:
            inside = True
            if opening == "[^" and pattern[found.end() : found.end() + 1] != "]":
                return r"[^\x00"
        elif closing:
            inside = False
        return found[0]

    return _PART.sub(written, pattern)


def without_lookahead(pattern: str) -> list[str] | None:
    """Patterns that all match only if the given one does; None: it does not begin so, or it cannot be said."""
    beginning = _BEGINNING.match(pattern)
    if beginning is None or _has_branches(pattern):
        return None
    looked = _ONE.findall(beginning[1])
    said = [_as_pattern(*each) for each in looked[: MOST_AHEAD + 1]]
    if len(looked) > MOST_AHEAD or None in said:
        return None
    return [f"^{pattern[beginning.end() :]}", *filter(None, said)]


def _as_pattern(kind: str, ahead: str) -> str | None:
    if kind == "=":
        return f"^(?:{ahead})"
    if first := _NOT_FIRST.fullmatch(ahead):
        return f"^(?:[^{first[1]}]|$)"
    if twice := _NOT_TWICE.fullmatch(ahead):
        return f"^[^{twice[1]}]*(?:{twice[1]}[^{twice[1]}]+)*{twice[1]}?$"
    return None


def _has_branches(pattern: str) -> bool:
    """`a|b`, not within brackets: what is said first is then not said of all of it."""
    depth = 0
    for found in _BRACKETS.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if found[0] == "|" and depth == 0:
            return True
    return False

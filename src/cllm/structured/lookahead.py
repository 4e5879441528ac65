"""Look-ahead at the beginning of a pattern, as patterns that must all match: llguidance knows no look-around."""

from __future__ import annotations

import re

MOST_AHEAD = 8
"""Each is a pattern more that must match."""
_BEGINNING = re.compile(r"\^((?:\(\?[=!](?:[^()\\]|\\.)*\)(?![*+?{]))+)")
_ONE = re.compile(r"\(\?([=!])((?:[^()\\]|\\.)*)\)")
_CHARACTER = r"(\\[^\w\s]|[^\\^$.|?*+()\[\]{}])"
_NOT_FIRST = re.compile(_CHARACTER)
_NOT_TWICE = re.compile(rf"\.\*{_CHARACTER}\1")
_BRACKETS = re.compile(r"\\.|\[(?:[^\]\\]|\\.)*(?:\]|\\?\Z)|[()|]", re.DOTALL)
"""One that is not closed goes to the end: each is read once."""


def without_lookahead(pattern: str) -> list[str] | None:
    """Patterns that all match only if the given one does; None: it does not begin so, or it cannot be said."""
    beginning = _BEGINNING.match(pattern)
    if beginning is None or _has_branches(pattern):
        return None
    found = [f"^{pattern[beginning.end() :]}"]
    looked = _ONE.findall(beginning[1])
    if len(looked) > MOST_AHEAD:
        return None
    for kind, ahead in looked:
        if kind == "=":
            found.append(f"^(?:{ahead})")
        elif first := _NOT_FIRST.fullmatch(ahead):
            found.append(f"^(?:[^{first[1]}]|$)")
        elif twice := _NOT_TWICE.fullmatch(ahead):
            found.append(f"^[^{twice[1]}]*(?:{twice[1]}[^{twice[1]}]+)*{twice[1]}?$")
        else:
            return None
    return found


def _has_branches(pattern: str) -> bool:
    """`a|b`, not within brackets: what is said first is then not said of all of it."""
    depth = 0
    for found in _BRACKETS.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if found[0] == "|" and depth == 0:
            return True
    return False

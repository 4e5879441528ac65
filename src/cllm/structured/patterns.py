"""Patterns of JSON schemas, written so that llguidance means by them what the standard means."""

from __future__ import annotations

import re
from typing import Any

_PART = re.compile(r"(\\.)|(\[\^?)|(\])", re.DOTALL)
_BLANKS = r"\t\n\x0b\x0c\r \xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"


def keep_to_the_standard(schema: Any) -> None:
    if not isinstance(schema, dict):
        return
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = as_meant(pattern)
    if isinstance(named := schema.get("patternProperties"), dict):
        schema["patternProperties"] = {as_meant(name): each for name, each in named.items()}


def as_meant(pattern: str) -> str:
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

"""Keeps user text from becoming special tokens, wherever it is in nested data.

A text that could become part of a special token is passed to the template with a mark before that spot: a private-use
character that occurs nowhere else. Wherever the mark comes out again, literally or escaped as in JSON or Python, the
character after it is kept out of special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

from cllm.errors import InvalidRequestError

MAX_NESTED = 64
"""Maximum nesting of lists and objects in tools and arguments."""
_SLICE = 1 << 16
"""Characters scanned at a time, so that other threads can run in between."""
_NAMES = frozenset({"properties", "$defs", "definitions", "patternProperties"})
"""Objects whose keys are user-chosen names; templates never look for them."""
_FREE = "arguments"
"""The key of a call's arguments, in which templates look for nothing."""
_LOOKED_FOR = frozenset({
    "type", "function", "name", "description", "parameters", "properties", "required", "items", "enum", "default",
    "anyOf", "allOf", "oneOf", "$ref", "$defs", "definitions", "title", "format", "arguments", "id", "strict", "return",
    "additionalProperties", "nullable", "const", "tool_calls", "role", "content", "text",
})  # fmt: skip
"""Keys that templates look for: never marked."""
_TYPES = frozenset({"object", "string", "integer", "number", "boolean", "array", "null", "function"})
"""Values of `type` that templates compare: never marked."""


class SpecialTokenGuard:
    """Finds where text could become part of a special token, alone or together with the text around it."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = sorted(names)
        self._longest = max(map(len, names), default=0)
        self._beginnings = {name[:length] for name in names for length in range(1, len(name))}
        self._endings = {name[-length:] for name in names for length in range(1, len(name))}

    def find(self, text: str) -> list[int]:
        """Positions such that every such special token contains at least one of them."""
        spots: set[int] = set()
        for name in self._names:
            at = text.find(name)
            while at >= 0:
                spots.add(at)
                at = text.find(name, at + 1)
        core = text.strip()  # templates trim
        if core:
            first = len(text) - len(text.lstrip())
            lengths = range(1, min(self._longest, len(core) + 1))
            within = len(core) <= self._longest and any(core in name for name in self._names)
            if within or any(core[:length] in self._endings for length in lengths):
                spots.add(first)
            if any(core[-length:] in self._beginnings for length in lengths):
                spots.add(first + len(core) - 1)
        return sorted(spots)


@lru_cache(maxsize=4)
def guard_for(names: frozenset[str]) -> SpecialTokenGuard:
    return SpecialTokenGuard(names)


def insert_marks(text: str, spots: list[int], mark: str) -> str:
    bounds = [0, *spots, len(text)]
    return mark.join(text[start:stop] for start, stop in pairwise(bounds))


def remove_marks(text: str, mark: str) -> tuple[str, list[int]]:
    """The text without marks, and the positions of the characters that followed one."""
    for escaped in _escapes(mark):
        text = text.replace(escaped, mark)
    parts = text.split(mark)
    literal, length = [], 0
    for part in parts[:-1]:
        length += len(part)
        literal.append(length)
    return "".join(parts), literal


def map_strings(value: Any, change: Callable[[str], str], depth: int = 0, keys: str = "") -> Any:
    """The value with every string in it that a user wrote changed. `keys`: the key of the value."""
    if depth > MAX_NESTED:
        raise InvalidRequestError(f"tools and arguments must not be nested more than {MAX_NESTED} levels deep", "tools")
    if isinstance(value, str):
        return value if keys == "type" and value in _TYPES else change(value)
    if isinstance(value, Mapping):
        return {
            key if _is_looked_for(key, keys) else change(key): map_strings(inner, change, depth + 1, _below(key, keys))
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [map_strings(inner, change, depth + 1, keys if keys == _FREE else "") for inner in value]
    return value


def _is_looked_for(key: str, under: str) -> bool:
    return under not in _NAMES and under != _FREE and key in _LOOKED_FOR


def _below(key: str, under: str) -> str:
    """The `keys` of a nested value: everything in a call's arguments is user text, and a property may have any name."""
    if under == _FREE:
        return _FREE
    return "" if under in _NAMES else key


def unused_character(texts: Iterable[str], param: str) -> str:
    """A private-use character that is in none of the texts, literally or escaped."""
    used: set[str] = set()
    escapes = False
    for text in texts:
        for start in range(0, len(text), _SLICE):
            used.update(text[start : start + _SLICE])
        escapes = escapes or "\\u" in text or "\\U" in text
    held = "".join(texts) if escapes else ""
    for code in (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE)):
        if chr(code) not in used and not (escapes and any(each in held for each in _escapes(chr(code)))):
            return chr(code)
    raise InvalidRequestError("the messages use every private-use character of Unicode; remove one", param)


def _escapes(mark: str) -> tuple[str, ...]:
    """The mark escaped as in Python and in JSON, which differ beyond U+FFFF."""
    return ascii(mark)[1:-1], json.dumps(mark)[1:-1]

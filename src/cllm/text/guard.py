"""Keeps what users write out of special tokens, wherever in nested data it stands.

A text that could become part of a special token is given to the template with a mark, a private-use character found
nowhere else, before that spot. Wherever the mark comes out again, as it is or escaped as JSON and Python write it, the
character after it is kept out of special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

from cllm.errors import InvalidRequestError

MOST_NESTED = 64
"""Levels of lists and objects in tools and arguments."""
_SLICE = 1 << 16
"""Characters that are looked at before other threads get their turn."""
_NAMES = frozenset({"properties", "$defs", "definitions", "patternProperties"})
"""Keys of objects whose own keys are names that somebody chose; templates look for none of them."""
_FREE = "arguments"
"""The key of a call's arguments, in which nothing is looked for."""
_LOOKED_FOR = frozenset({
    "type", "function", "name", "description", "parameters", "properties", "required", "items", "enum", "default",
    "anyOf", "allOf", "oneOf", "$ref", "$defs", "definitions", "title", "format", "arguments", "id", "strict", "return",
    "additionalProperties", "nullable", "const", "tool_calls", "role", "content", "text",
})  # fmt: skip
"""Keys that templates look for: those stay as they are."""
_TYPES = frozenset({"object", "string", "integer", "number", "boolean", "array", "null", "function"})
"""Values of `type`, which templates compare."""


class SpecialTextGuard:
    """Finds where text could become part of a special token, by itself or together with what stands around it."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = sorted(names)
        self._longest = max(map(len, names), default=0)
        self._beginnings = {name[:length] for name in names for length in range(1, len(name))}
        self._endings = {name[-length:] for name in names for length in range(1, len(name))}

    def find(self, text: str) -> list[int]:
        """Characters of which at least one is in every such special token."""
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
def guard_for(names: frozenset[str]) -> SpecialTextGuard:
    return SpecialTextGuard(names)


def insert(text: str, spots: list[int], mark: str) -> str:
    bounds = [0, *spots, len(text)]
    return mark.join(text[start:stop] for start, stop in pairwise(bounds))


def take_out(text: str, mark: str) -> tuple[str, list[int]]:
    """The text without marks, and the positions of the characters that followed one."""
    for escaped in _escapes(mark):
        text = text.replace(escaped, mark)
    parts = text.split(mark)
    literal, length = [], 0
    for part in parts[:-1]:
        length += len(part)
        literal.append(length)
    return "".join(parts), literal


def texts_in(value: Any, depth: int = 0, keys: str = "") -> Iterator[str]:
    """All strings that somebody wrote. `keys` is the key under which the value stands."""
    if depth > MOST_NESTED:
        raise InvalidRequestError(f"tools and arguments may be nested {MOST_NESTED} levels deep", "tools")
    if isinstance(value, str):
        if keys != "type" or value not in _TYPES:
            yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if not _is_looked_for(key, keys):
                yield key
            yield from texts_in(inner, depth + 1, _below(key, keys))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_in(inner, depth + 1, keys if keys == _FREE else "")


def replaced(value: Any, by: Mapping[str, str], keys: str = "") -> Any:
    """The same with each of the strings that `texts_in` finds replaced."""
    if isinstance(value, str):
        return value if keys == "type" and value in _TYPES else by.get(value, value)
    if isinstance(value, Mapping):
        return {
            key if _is_looked_for(key, keys) else by.get(key, key): replaced(inner, by, _below(key, keys))
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [replaced(inner, by, keys if keys == _FREE else "") for inner in value]
    return value


def _is_looked_for(key: str, under: str) -> bool:
    return under not in _NAMES and under != _FREE and key in _LOOKED_FOR


def _below(key: str, under: str) -> str:
    """What the value of a key stands under: all in a call's arguments is free, and a property may have any name."""
    if under == _FREE:
        return _FREE
    return "" if under in _NAMES else key


def unused_character(texts: Iterable[str], param: str) -> str:
    """One that is in none of the texts, neither as it is nor escaped."""
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
    raise InvalidRequestError("the messages use every private-use character there is; leave one out", param)


def _escapes(mark: str) -> tuple[str, ...]:
    """As Python writes it, and as JSON does: beyond the first 65,536 characters those differ."""
    return ascii(mark)[1:-1], json.dumps(mark)[1:-1]

"""How many patterns the same text must match: what llguidance does for them doubles with each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cllm.structured.references import References

MOST_PATTERNS = 10
MOST_STEPS = 8
"""From where schemas are joined to where their patterns are; what is deeper counts as if it were one place."""
MOST_COUNTED = 200_000

_Way = tuple[str, ...]
"""The steps to a value: a property `/name`, an item `#0`, any property `/*`, or any item `#*`."""
_Counts = dict[_Way, int]
"""For each way to a value, the patterns that may hold for it together."""
_ANY_PROPERTY, _ANY_ITEM, _NAMES = "/*", "#*", "name"
_ANYWHERE = {
    "additionalProperties": _ANY_PROPERTY,
    "unevaluatedProperties": _ANY_PROPERTY,
    "propertyNames": _NAMES,
    "items": _ANY_ITEM,
    "additionalItems": _ANY_ITEM,
    "unevaluatedItems": _ANY_ITEM,
}
_JOINING = frozenset({"anyOf", "oneOf", "$ref", "dependencies", "dependentSchemas"})
_TOGETHER = frozenset({*_JOINING, *_ANYWHERE, "pattern", "format", "properties", "prefixItems"})
_ALWAYS_JOINING = frozenset({"allOf", "patternProperties"})
_LOOK_AHEAD = re.compile(r"\(\?[=!]")


class Conjunctions:
    """Of the schemas in one document."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._known: dict[int, _Counts] = {}
        self._left = MOST_COUNTED

    def check(self, schema: Mapping[str, Any]) -> None:
        """One of the schemas in it. Raises `ValueError`."""
        joins = len(_TOGETHER.intersection(schema)) > 1 and not _JOINING.isdisjoint(schema)
        if not joins and _ALWAYS_JOINING.isdisjoint(schema):
            return
        most = self._most(self._of(schema))
        if self._left < 0:
            raise ValueError("joins too many schemas to tell how many patterns the same text must match")
        if most > MOST_PATTERNS:
            raise ValueError(f"has more than {MOST_PATTERNS} patterns and formats that the same text must match")

    def _most(self, counts: _Counts) -> int:
        """Patterns for one value: those for its own way, and for all ways that may lead to it, too."""
        open_ways = [way for way in counts if _ANY_PROPERTY in way or _ANY_ITEM in way]
        self._left -= len(counts) * len(open_ways)
        if self._left < 0:
            return 0
        return max((sum(counts[each] for each in (way, *_others(way, open_ways))) for way in counts), default=0)

    def _of(self, schema: Any) -> _Counts:
        if not isinstance(schema, Mapping) or self._left < 0:
            return {}
        if id(schema) in self._known:
            return self._known[id(schema)]
        self._known[id(schema)] = {}  # where it refers to itself, it adds nothing
        said: _Counts = {}
        if own := _patterns_of(schema):
            said[()] = own
        for each in self._joined(schema):
            _merge(said, each, _sum)
        for step, each in _inner(schema):
            _merge(said, _behind(step, self._of(each)), _sum)
        self._left -= 1 + len(said)
        self._known[id(schema)] = said
        return said

    def _joined(self, schema: Mapping[str, Any]) -> Iterator[_Counts]:
        """Of schemas that hold for the same value."""
        for key in ("anyOf", "oneOf"):
            yield self._any_of(schema.get(key))
        for each in together if isinstance(together := schema.get("allOf"), list) else ():
            yield self._of(each)
        for key in ("dependencies", "dependentSchemas"):
            for each in dependent.values() if isinstance(dependent := schema.get(key), Mapping) else ():
                yield self._of(each)
        if "$ref" in schema:
            yield self._of(self._references.target(schema["$ref"]))

    def _any_of(self, options: Any) -> _Counts:
        said: _Counts = {}
        for each in options if isinstance(options, list) else ():
            _merge(said, self._of(each), max)
        return said


def _patterns_of(schema: Mapping[str, Any]) -> int:
    """Look-ahead becomes a pattern of its own."""
    pattern = schema.get("pattern")
    ahead = len(_LOOK_AHEAD.findall(pattern)) if isinstance(pattern, str) else 0
    return sum(key in schema for key in ("pattern", "format")) + ahead


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Schemas of parts of the value, and the step to them."""
    if isinstance(known := schema.get("properties"), Mapping):
        yield from ((f"/{name}", each) for name, each in known.items())
    if isinstance(named := schema.get("patternProperties"), Mapping):
        yield from ((_ANY_PROPERTY, each) for each in named.values())
    for key in ("prefixItems", "items"):
        if isinstance(listed := schema.get(key), list):
            yield from ((f"#{index}", each) for index, each in enumerate(listed))
    yield from ((step, schema[key]) for key, step in _ANYWHERE.items() if isinstance(schema.get(key), Mapping))


def _others(way: _Way, open_ways: list[_Way]) -> Iterator[_Way]:
    for other in open_ways:
        if len(other) == len(way) and other != way and all(map(_may_be_same, way, other)):
            yield other


def _may_be_same(step: str, other: str) -> bool:
    return step == other or (step[0] == other[0] and (step in _OPEN or other in _OPEN))


_OPEN = (_ANY_PROPERTY, _ANY_ITEM)


def _sum(one: int, other: int) -> int:
    return one + other


def _merge(said: _Counts, more: _Counts, how: Callable[[int, int], int]) -> None:
    for way, count in more.items():
        said[way] = how(said.get(way, 0), count)


def _behind(step: str, counts: _Counts) -> _Counts:
    found: _Counts = {}
    for way, count in counts.items():
        _merge(found, {(step, *way)[:MOST_STEPS]: count}, _sum)
    return found

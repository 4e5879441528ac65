"""How many patterns the same text must match: what llguidance does for them doubles with each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from cllm.structured.nodes import References, by_name, listed

MOST_PATTERNS = 10
MOST_STEPS = 8
"""From where schemas are joined to where their patterns are; what is deeper counts as if it were one place."""
MOST_COUNTED = 200_000

_Way = tuple[str, ...]
"""The steps to a value: a property `/name`, an item `#0`, any property `/*`, or any item `#*`."""
_Counts = Counter[_Way]
"""For each way to a value, the patterns that may hold for it together."""
_OPEN = _ANY_PROPERTY, _ANY_ITEM = "/*", "#*"
_ANYWHERE = {
    **dict.fromkeys(("additionalProperties", "unevaluatedProperties"), _ANY_PROPERTY),
    "propertyNames": "name",
    **dict.fromkeys(("items", "additionalItems", "unevaluatedItems"), _ANY_ITEM),
}
_JOINING = frozenset({"anyOf", "oneOf", "$ref", "dependencies", "dependentSchemas"})
_TOGETHER = frozenset({*_JOINING, *_ANYWHERE, "pattern", "format", "properties", "prefixItems"})
_ALWAYS_JOINING = frozenset({"allOf", "patternProperties"})
_LOOK_AHEAD = re.compile(r"\(\?[=!]")


class Conjunctions:
    """The schemas in one document that hold for the same values."""

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
        return max((counts[way] + sum(counts[each] for each in _others(way, open_ways)) for way in counts), default=0)

    def _of(self, schema: Any) -> _Counts:
        if not isinstance(schema, dict) or self._left < 0:
            return Counter()
        if id(schema) in self._known:
            return self._known[id(schema)]
        self._known[id(schema)] = Counter()  # where it refers to itself, it adds nothing
        own = _patterns_of(schema)
        said: _Counts = Counter({(): own} if own else {})
        for each in self._joined(schema):
            said.update(each)
        for step, part in _parts(schema):
            for way, count in self._of(part).items():
                said[(step, *way)[:MOST_STEPS]] += count
        self._left -= 1 + len(said)
        self._known[id(schema)] = said
        return said

    def _joined(self, schema: Mapping[str, Any]) -> Iterator[_Counts]:
        """The counts of schemas that hold for the same value."""
        for key in ("anyOf", "oneOf"):
            most: _Counts = Counter()
            for each in listed(schema, key):
                for way, count in self._of(each).items():
                    most[way] = max(most[way], count)
            yield most
        yield from map(self._of, listed(schema, "allOf"))
        for key in ("dependencies", "dependentSchemas"):
            yield from map(self._of, by_name(schema, key).values())
        if "$ref" in schema:
            yield self._of(self._references.target(schema["$ref"]))


def _patterns_of(schema: Mapping[str, Any]) -> int:
    """Look-ahead becomes a pattern of its own."""
    pattern = schema.get("pattern")
    ahead = len(_LOOK_AHEAD.findall(pattern)) if isinstance(pattern, str) else 0
    return sum(key in schema for key in ("pattern", "format")) + ahead


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Schemas of parts of the value, and the step to them."""
    yield from ((f"/{name}", each) for name, each in by_name(schema, "properties").items())
    yield from ((_ANY_PROPERTY, each) for each in by_name(schema, "patternProperties").values())
    for key in ("prefixItems", "items"):
        yield from ((f"#{index}", each) for index, each in enumerate(listed(schema, key)))
    yield from ((step, schema[key]) for key, step in _ANYWHERE.items() if isinstance(schema.get(key), dict))


def _others(way: _Way, open_ways: list[_Way]) -> Iterator[_Way]:
    for other in open_ways:
        if len(other) == len(way) and other != way and all(map(_may_be_same, way, other)):
            yield other


def _may_be_same(step: str, other: str) -> bool:
    return step == other or (step[0] == other[0] and (step in _OPEN or other in _OPEN))

"""How many patterns the same text must match: what llguidance does for them doubles with each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cllm.structured.references import References

MOST_PATTERNS = 10
MOST_STEPS = 2
"""Of properties and items, from where schemas are joined to where their patterns are."""
MOST_COUNTED = 100_000

_Counts = dict[tuple[str, ...], int]
"""For each way to a value, the patterns that may hold for it together."""
_JOINING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
_TOGETHER = frozenset({*_JOINING, "pattern", "format", "properties", "additionalProperties", "items"})


class Conjunctions:
    """Of the schemas in one document."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._known: dict[int, _Counts] = {}
        self._left = MOST_COUNTED

    def check(self, schema: Mapping[str, Any]) -> None:
        """One of the schemas in it. Raises `ValueError`."""
        joins = "allOf" in schema or (len(_TOGETHER.intersection(schema)) > 1 and not _JOINING.isdisjoint(schema))
        if joins and max(self._of(schema).values(), default=0) > MOST_PATTERNS:
            raise ValueError(f"has more than {MOST_PATTERNS} patterns and formats that the same text must match")

    def _of(self, schema: Any) -> _Counts:
        if not isinstance(schema, Mapping) or self._left < 0:
            return {}
        if id(schema) in self._known:
            return self._known[id(schema)]
        self._known[id(schema)] = {}  # where it refers to itself, it adds nothing
        said: _Counts = {}
        if own := sum(key in schema for key in ("pattern", "format")):
            said[()] = own
        for key in ("anyOf", "oneOf"):
            _merge(said, self._any_of(schema.get(key)), _sum)
        for each in together if isinstance(together := schema.get("allOf"), list) else ():
            _merge(said, self._of(each), _sum)
        if "$ref" in schema:
            _merge(said, self._of(self._references.target(schema["$ref"])), _sum)
        if isinstance(properties := schema.get("properties"), Mapping):
            for name, each in properties.items():
                _merge(said, _behind(f"/{name}", self._of(each)), _sum)
        for key in ("additionalProperties", "items"):
            _merge(said, _behind(key, self._of(schema.get(key))), _sum)
        self._left -= 1 + len(said)
        self._known[id(schema)] = said
        return said

    def _any_of(self, options: Any) -> _Counts:
        said: _Counts = {}
        for each in options if isinstance(options, list) else ():
            _merge(said, self._of(each), max)
        return said


def _sum(one: int, other: int) -> int:
    return one + other


def _merge(said: _Counts, more: _Counts, how: Callable[[int, int], int]) -> None:
    for way, count in more.items():
        said[way] = how(said.get(way, 0), count)


def _behind(step: str, counts: _Counts) -> _Counts:
    return {(step, *way): count for way, count in counts.items() if len(way) < MOST_STEPS}

"""Whether the schemas of a `oneOf` exclude each other, so that it is an `anyOf`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from cllm.structured.nodes import References, by_name, listed

_TYPES = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
_OBJECT, _ARRAY = frozenset({"object"}), frozenset({"array"})
_BOUNDS = (
    (frozenset({"string"}), "minLength", "maxLength"),
    (_ARRAY, "minItems", "maxItems"),
    (frozenset({"integer", "fraction"}), "minimum", "maximum"),
)
_NAMES = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
MOST_WORK = 400_000
"""Values, names and pairs looked at, for all of a schema: a moment. If that is not enough, nothing is plain."""
A_COMPARISON = 10
MOST_PARTS = 32
MOST_DEPTH = 6


class Exclusion:
    """Compares the schemas in one document."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._work = MOST_WORK
        self._known: dict[int, _Facts | None] = {}

    def of(self, options: Sequence[Any], around: Mapping[str, Any]) -> list[Any] | None:
        """For each option, a schema that must hold too so that no other option does. None: it is not plain which.
        `around`: what is said beside the options."""
        if A_COMPARISON * math.comb(len(options), 2) > self._work:
            return None
        try:
            return self._apart([self._collected([option, around]) for option in options])
        except _TooMuchError:
            return None

    def _apart(self, facts: Sequence[_Facts | None]) -> list[Any] | None:
        apart = [_Apart() for _ in facts]
        for index, one in enumerate(facts):
            for other, another in enumerate(facts[index + 1 :], index + 1):
                if one is None or another is None or self._disjoint(one, another, MOST_DEPTH):
                    continue
                if not self._keep(apart[index], one, another) or not self._keep(apart[other], another, one):
                    return None
        return [each.schema() for each in apart]

    def _keep(self, apart: _Apart, one: _Facts, other: _Facts) -> bool:
        """Add to `apart` what values of `one` must be so that they are none of the other; False: it is not known."""
        self._spend(len(one.names) + len(other.required))
        common = one.types & other.types
        if common == _ARRAY and any(
            self._differ(mine, theirs, MOST_DEPTH) for mine in one.items for theirs in other.items
        ):
            apart.filled = True
            return True
        if common not in (_OBJECT, _TYPES):  # if it may be anything, objects are meant
            return False
        name = next((each for each in one.names if self._differ_in((each,), one, other, MOST_DEPTH)), None)
        missing = other.required - one.required
        if name is not None:
            apart.present[name] = None
        elif missing:
            apart.absent[min(missing)] = False
        return name is not None or bool(missing)

    def _facts(self, schema: Any) -> _Facts | None:
        """None: nothing fits it."""
        if id(schema) not in self._known:
            self._known[id(schema)] = self._collected([schema])
        return self._known[id(schema)]

    def _collected(self, waiting: list[Any]) -> _Facts | None:
        found: list[Mapping[str, Any]] = []
        for _ in range(MOST_PARTS):
            if not waiting:
                break
            each = waiting.pop()
            if each is False:
                return None
            if not isinstance(each, dict) or any(each is one for one in found):
                continue
            found.append(each)
            self._spend(_size(each))
            waiting += listed(each, "allOf")[:MOST_PARTS]
            if "$ref" in each:
                waiting.append(self._references.target(each["$ref"]))
        return _Facts(found)

    def _differ(self, one: Any, other: Any, depth: int) -> bool:
        mine, theirs = self._facts(one), self._facts(other)
        return mine is None or theirs is None or self._disjoint(mine, theirs, depth - 1)

    def _disjoint(self, one: _Facts, other: _Facts, depth: int) -> bool:
        self._spend(A_COMPARISON)
        if depth < 0:
            return False
        common = one.types & other.types
        if not common:
            return True
        if one.values is not None and other.values is not None:
            self._spend(min(len(one.values), len(other.values)))
            if one.values.isdisjoint(other.values):
                return True
        self._spend(len(one.required) + len(other.required))
        if common == _OBJECT and self._differ_in(sorted(one.required | other.required), one, other, depth):
            return True
        if any(common <= types and _beyond(one, other, low, high) for types, low, high in _BOUNDS):
            return True
        return self._all_differ(one, other, depth) or self._all_differ(other, one, depth)

    def _differ_in(self, names: Iterable[str], one: _Facts, other: _Facts, depth: int) -> bool:
        """Whether one of these properties cannot be in both."""
        return any(
            self._differ(mine, theirs, depth)
            for name in names
            for mine in one.of_property(name)
            for theirs in other.of_property(name)
        )

    def _all_differ(self, one: _Facts, other: _Facts, depth: int) -> bool:
        """Whether all options of an `anyOf` in one are disjoint from the other."""
        return any(
            all((facts := self._facts(option)) is None or self._disjoint(facts, other, depth - 1) for option in options)
            for options in one.options
        )

    def _spend(self, work: int) -> None:
        self._work -= work
        if self._work < 0:
            raise _TooMuchError


class _TooMuchError(Exception):
    """More work than is reasonable."""


class _Apart:
    """What is demanded of values of one option."""

    def __init__(self) -> None:
        self.present: dict[str, None] = {}
        self.absent: dict[str, bool] = {}
        self.filled = False

    def schema(self) -> Any:
        """True: nothing. An object is no array, so it need not be said of both."""
        if self.present or self.absent:
            return {"type": "object", "required": list(self.present), "properties": self.absent}
        return {"minItems": 1} if self.filled else True


class _Facts:
    """What is known of the values of a schema: of each of its parts, all of which hold for them."""

    def __init__(self, parts: Sequence[Mapping[str, Any]]) -> None:
        self.parts = parts

    @cached_property
    def types(self) -> frozenset[str]:
        common = _TYPES
        for each in self.parts:
            if isinstance(given := each.get("type"), (str, list)):
                common &= {kind for name in ([given] if isinstance(given, str) else given) for kind in _kinds(name)}
            if (values := _literals(each)) is not None:
                common &= {_type_of(value) for value in values}
        return common

    @cached_property
    def values(self) -> set[str] | None:
        """All that there are, if they are listed, written in one way."""
        listings = [values for each in self.parts if (values := _literals(each)) is not None]
        return set.intersection(*({_written(each) for each in values} for values in listings)) if listings else None

    @cached_property
    def required(self) -> frozenset[str]:
        return frozenset(name for each in self.parts for name in listed(each, "required") if isinstance(name, str))

    @cached_property
    def names(self) -> list[str]:
        """Properties that have a schema and may be there, in their order."""
        known = (name for each in self.parts for name in by_name(each, "properties"))
        return [name for name in known if False not in self.of_property(name)]

    @cached_property
    def items(self) -> list[Any]:
        """Schemas of all items."""
        given = (each["items"] for each in self.parts if "items" in each and "prefixItems" not in each)
        return [each for each in given if isinstance(each, (Mapping, bool))]

    @cached_property
    def options(self) -> list[list[Any]]:
        given = (each.get(keyword) for each in self.parts for keyword in ("anyOf", "oneOf"))
        return [options for options in given if isinstance(options, list)]

    def of_property(self, name: str) -> list[Any]:
        """What holds for this property, if it is there."""
        found: list[Any] = []
        for each in self.parts:
            if name in (known := by_name(each, "properties")):
                found.append(known[name])
            elif "patternProperties" not in each and "additionalProperties" in each:
                found.append(each["additionalProperties"])
        return found

    def bound(self, name: str, choose: Callable[..., float], without: float) -> float:
        given = (each.get(name) for each in self.parts)
        numbers = [each for each in given if isinstance(each, (int, float)) and not isinstance(each, bool)]
        return choose(numbers, default=without)


def _beyond(one: _Facts, other: _Facts, low: str, high: str) -> bool:
    """Whether the most of one is less than the least of the other."""
    return any(
        mine.bound(high, min, math.inf) < theirs.bound(low, max, -math.inf)
        for mine, theirs in ((one, other), (other, one))
    )


def _kinds(name: Any) -> tuple[str, ...]:
    return ("integer", "fraction") if name == "number" else (name,) if isinstance(name, str) else ()


def _size(schema: Mapping[str, Any]) -> int:
    """What there is to look at in one part of a schema."""
    named = (schema.get(keyword) for keyword in ("type", "required", "properties"))
    listings = sum(len(each) for each in named if isinstance(each, (list, dict)))
    return 1 + listings + _count(schema.get("const")) + _count(schema.get("enum"))


def _count(value: Any) -> int:
    """Counts the values in a value; text counts by its length, as it is copied."""
    count, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        count += 1 + (len(each) >> 6 if isinstance(each, str) else 0)
        if isinstance(each, (list, dict)):
            waiting += each if isinstance(each, list) else each.values()
    return count


def _literals(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    given = schema.get("enum")
    return given if isinstance(given, list) else None


def _type_of(value: Any) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return "integer" if whole else _NAMES.get(type(value), "fraction")


def _written(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, dict) else value

"""A JSON schema in the words that llguidance knows.

Some keywords that it does not know can be said in others; some say nothing where they stand. What is written instead
allows the same values, or fewer, so an answer always fits the schema that was sent. What is left is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from cllm.structured.closing import closable_objects
from cllm.structured.conjunctions import Conjunctions
from cllm.structured.effort import MOST_REMAINDERS, Effort
from cllm.structured.exclusion import Exclusion
from cllm.structured.formats import FOLLOWED, PATTERNS, SAME, UUID
from cllm.structured.nodes import LITERAL, NAMED, References, listed, opens_a_document, schemas_in
from cllm.structured.numbers import keep_numbers_exact
from cllm.structured.patterns import keep_to_the_standard, without_lookahead
from cllm.structured.places import pointer_to

Schema = Any
"""An object, `true` or `false`; what clients send may be anything."""

NOT_APART = "oneOf is not supported where its schemas do not plainly exclude each other; use anyOf"
MOST_DEPENDENT = 4
"""Each doubles the forms of an object."""
MOST_REPEATED = 1 << 17
"""Bytes of schemas that are written once for each of several names."""
MOST_OPTIONAL = 16
"""Properties of an object of which one at least must be there: each makes a form of it."""

_ONLY_NAMES = frozenset({"type", "title", "description", "$comment"})
_PLAIN = _ONLY_NAMES | {"default", "examples", "minLength", "maxLength", "minItems", "maxItems"}
"""Keywords that llguidance takes as they are."""
_UNSUPPORTED_PATTERN = re.compile(r"\(\?(?:=|!|<=|<!|>|P=|\()|\\[bBkGZ1-9]|[*+?}]\+")
_NARROWED = frozenset({
    "properties", "oneOf", "format", "propertyNames", "minProperties", "dependencies", "dependentRequired",
    "dependentSchemas", "unevaluatedProperties", "unevaluatedItems", "$ref",
})  # fmt: skip
"""Keywords in whose place fewer values may be allowed."""
_IN_PLACE = frozenset({
    "allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef",
})  # fmt: skip


def prepared(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Raises `RecursionError` if it is nested too deeply, `ValueError` if it is too much."""
    return _Preparation(schema).whole()


def lenient(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of which as much is enforced as can be, and the rest ignored."""
    given = schema.get("x-guidance")
    return {**schema, "x-guidance": {"lenient": True, **(given if isinstance(given, dict) else {})}}


class _LocatedError(ValueError):
    """Says where the schema is."""


class _Preparation:
    def __init__(self, root: Mapping[str, Any]) -> None:
        options = root.get("x-guidance")
        self._root = root
        self._lenient = isinstance(options, dict) and options.get("lenient") is True
        self._references = References(root)
        self._exclusion = Exclusion(self._references)
        self._conjunctions = Conjunctions(self._references)
        self._effort = Effort()
        self._closable = closable_objects(root, self._references)

    def whole(self) -> dict[str, Any]:
        found: dict[str, Any] = self._prepared(self._root, own=True)
        self._effort.check()
        return found

    def _prepared(self, schema: Schema, *, own: bool) -> Schema:
        """`own`: references in it are to this document."""
        if not isinstance(schema, dict) or schema.keys() <= _PLAIN:
            return schema
        try:
            return self._rewritten(schema, own=own and (schema is self._root or not opens_a_document(schema)))
        except _LocatedError:
            raise
        except ValueError as error:
            raise _LocatedError(f"{error} (at {pointer_to(self._root, schema)})") from None

    def _rewritten(self, given: Mapping[str, Any], *, own: bool) -> dict[str, Any]:
        schema = _without_what_cannot_be_enforced(given) if self._lenient else given
        self._effort.count(schema)
        self._conjunctions.check(schema)
        node = {key: self._value(key, value, own=own) for key, value in schema.items()}
        keep_numbers_exact(node, lenient=self._lenient)
        if id(given) in self._closable:
            node["additionalProperties"] = False
        _close(node, "unevaluatedProperties", "additionalProperties")
        _close(node, "unevaluatedItems", "additionalItems" if isinstance(node.get("items"), list) else "items")
        more = [*_looked_ahead(node), *_formatted(node), *_dependent(node), *_at_least_one(node)]
        if node.get("uniqueItems") is False or _at_most_one(node):
            node.pop("uniqueItems", None)
        if "propertyNames" in node:  # says of all properties what they are, so the rest must be known
            self._name_properties(node, own=own)
        if own and (found := self._exclusive(schema, node)) is not None:
            if "anyOf" in node:
                del node["oneOf"]
                more.append({"anyOf": found})
            else:
                node["oneOf"] = found
                node = {"anyOf" if key == "oneOf" else key: value for key, value in node.items()}
        elif not self._lenient and _may_be_narrowed(listed(schema, "oneOf")):
            # What is written for an option allows fewer values. Then more would be values of just one.
            raise ValueError(NOT_APART)
        for each in (node, *more):
            keep_to_the_standard(each)
        if more and isinstance(node.get("allOf", []), list):
            node["allOf"] = [*listed(node, "allOf"), *more]
        return node

    def _exclusive(self, schema: Mapping[str, Any], node: Mapping[str, Any]) -> list[Schema] | None:
        """The options of a `oneOf`, so that no two hold for the same value."""
        options = schema.get("oneOf")
        if not isinstance(options, list):
            return None
        more = self._exclusion.of(options, {key: value for key, value in schema.items() if key != "oneOf"})
        if more is None:
            return None
        pairs = zip(node["oneOf"], more, strict=True)
        return [option if demand is True else {"allOf": [option, demand]} for option, demand in pairs]

    def _value(self, key: str, value: Any, *, own: bool) -> Any:
        if key in LITERAL:
            return value
        if isinstance(value, dict):
            if key in NAMED:
                return {name: self._prepared(each, own=own) for name, each in value.items()}
            return self._prepared(value, own=own)
        if isinstance(value, list):
            return [self._prepared(each, own=own) for each in value]
        return value

    def _name_properties(self, node: dict[str, Any], *, own: bool) -> None:
        """`propertyNames`, as properties or patterns of properties. Stays where it cannot be said so."""
        names = node["propertyNames"]
        if own and isinstance(names, dict) and set(names) <= {"$ref", *_ONLY_NAMES} and "$ref" in names:
            names = self._references.target(names["$ref"])
        if names is True or (isinstance(names, dict) and set(names) <= _ONLY_NAMES and _may_be_text(names)):
            del node["propertyNames"]
            return
        known = node.get("properties", {})
        others = node.get("additionalProperties", True)
        if not isinstance(names, dict) or "patternProperties" in node or not isinstance(known, dict):
            return
        choices = [names["const"]] if "const" in names else names.get("enum")
        if isinstance(choices, list) and set(names) <= {"const", "enum", *_ONLY_NAMES}:
            texts = dict.fromkeys(each for each in choices if isinstance(each, str))
            if len(json.dumps(others)) * len(texts) > MOST_REPEATED:
                return
            node["properties"] = {
                **{name: each if name in texts else False for name, each in known.items()},
                **{name: others for name in texts if name not in known},
            }
            node["additionalProperties"] = False
            del node["propertyNames"]
        elif not known and (pattern := _pattern_of(names)) is not None:
            node["patternProperties"] = {pattern: others}
            node["additionalProperties"] = False
            del node["propertyNames"]


def _may_be_narrowed(options: list[Any]) -> bool:
    return any(not node.keys().isdisjoint(_NARROWED) for each in options for node in schemas_in(each))


def _without_what_cannot_be_enforced(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same schema if all of it can be."""
    pattern, step, named = (schema.get(key) for key in ("pattern", "multipleOf", "patternProperties"))
    left = dict(schema)
    if isinstance(pattern, str) and any(map(_UNSUPPORTED_PATTERN.search, without_lookahead(pattern) or [pattern])):
        del left["pattern"]
    if isinstance(step, (int, float)) and not isinstance(step, bool) and step > MOST_REMAINDERS:
        del left["multipleOf"]
    if isinstance(named, dict) and any(map(_UNSUPPORTED_PATTERN.search, named)):
        left["patternProperties"] = {key: each for key, each in named.items() if not _UNSUPPORTED_PATTERN.search(key)}
        left.pop("additionalProperties", None)  # of those, it is not known which they are
    return schema if len(left) == len(schema) and left.get("patternProperties") is named else left


def _formatted(node: dict[str, Any]) -> list[Schema]:
    """Formats that llguidance does not know, or not well, are taken out; of the standard's, patterns are demanded."""
    name = node.get("format")
    if not isinstance(name, str) or name in FOLLOWED:
        return []
    del node["format"]
    if name in SAME:
        node["format"] = SAME[name]
    if name not in PATTERNS or "pattern" not in node:
        node.update({"pattern": PATTERNS[name]} if name in PATTERNS else {})
        return []
    return [{"pattern": PATTERNS[name]}]


def _looked_ahead(node: dict[str, Any]) -> list[Schema]:
    pattern = node.get("pattern")
    patterns = without_lookahead(pattern) if isinstance(pattern, str) else None
    if patterns is None:
        return []
    node["pattern"], *more = patterns
    return [{"pattern": each} for each in more]


def _at_most_one(node: Mapping[str, Any]) -> bool:
    most = node.get("maxItems")
    return isinstance(most, int) and most <= 1


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type", "string")
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def _pattern_of(names: Mapping[str, Any]) -> str | None:
    """The pattern for names that are described by a pattern, a format or a length."""
    described = set(names) - _ONLY_NAMES
    if described == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    if described == {"format"} and isinstance(names["format"], str):
        return {"uuid": UUID, **PATTERNS}.get(names["format"])
    if described and described <= {"minLength", "maxLength"} and all(type(names[each]) is int for each in described):
        least, most = names.get("minLength", 0), names.get("maxLength", "")
        return f"^(?s:.){{{least},{most}}}$"
    return None


def _close(node: dict[str, Any], keyword: str, plain: str) -> None:
    """`unevaluated...` is `additional...` where nothing else can have looked at the rest."""
    if keyword not in node or not _IN_PLACE.isdisjoint(node) or (keyword == "unevaluatedItems" and "contains" in node):
        return
    rest = node.pop(keyword)
    node.setdefault(plain, rest)


def _dependent(node: dict[str, Any]) -> list[Schema]:
    """What must hold if a property is there: it is not there, or it does."""
    found: list[Schema] = []
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        given = node.get(keyword)
        if not isinstance(given, dict) or len(given) > MOST_DEPENDENT:
            continue
        kind = {"type": "object"} if node.get("type") == "object" else {}
        for name, needed in given.items():
            demand = {"required": needed} if isinstance(needed, list) else needed
            if demand is True or demand == {"required": []}:
                continue
            there = {**kind, "required": [name]}
            absent = {**kind, "properties": {name: False}}
            found.append({"anyOf": [{"allOf": [demand, there]}, absent]})
        del node[keyword]
    return found


def _at_least_one(node: dict[str, Any]) -> list[Schema]:
    """`minProperties: 1` where none of the properties is required: one of them is there."""
    known, required = node.get("properties"), node.get("required", [])
    if node.get("minProperties") != 1 or "maxProperties" in node or not isinstance(known, dict):
        return []
    if required:
        del node["minProperties"]
        return []
    if not 0 < len(known) <= MOST_OPTIONAL or node.get("type") != "object" or node.get("additionalProperties") is False:
        return []  # llguidance knows what to do
    del node["minProperties"]
    return [{"anyOf": [{"type": "object", "required": [name]} for name in known]}]

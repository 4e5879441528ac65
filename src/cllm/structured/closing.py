"""Objects that name their properties get no others, as in llama-server and xgrammar.

The standard lets them have any. But few who write a schema mean that, and a small model that may invent properties does
not stop. `additionalProperties: true` says that it is meant. Where several schemas apply to one object, it stays open:
each would forbid the properties of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cllm.structured.keywords import LITERAL, NAMED

_ELSEWHERE = frozenset({"$ref", "anyOf", "oneOf", "allOf"})
"""What a value is, is said there."""
_SHARES = frozenset({
    "if", "dependentSchemas", "dependentRequired", "dependencies", "unevaluatedProperties", "not", "$dynamicRef",
    "$recursiveRef",
})  # fmt: skip
_OF_TEXT = frozenset({"pattern"})
_ABOUT_OTHERS = frozenset({"additionalProperties", "patternProperties", "propertyNames"})


def close_objects(schema: dict[str, Any]) -> None:
    nodes = [*schemas_in(schema)]
    if any(map(_shares_its_value, nodes)):
        return
    for node in nodes:
        if _names_all(node):
            node["additionalProperties"] = False


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all in it."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for key, value in node.items():
            if key in LITERAL:
                continue
            if isinstance(value, list):
                waiting += value
            elif isinstance(value, Mapping):
                waiting += value.values() if key in NAMED else [value]


def _shares_its_value(node: Mapping[str, Any]) -> bool:
    """Whether more than one schema may say something about properties of the same object."""
    keys, given = node.keys(), node.get("allOf")
    together = given if isinstance(given, list) else []
    parts = [part for part in together if not isinstance(part, dict) or part.keys() - _OF_TEXT]
    if keys & _SHARES or len(parts) > 1:
        return True
    elsewhere = keys & _ELSEWHERE if parts else keys & _ELSEWHERE - {"allOf"}
    return bool(elsewhere) and len(elsewhere | keys & {"properties", "required"}) > 1


def _names_all(node: Mapping[str, Any]) -> bool:
    known, required = node.get("properties"), node.get("required", [])
    least = node.get("minProperties", 0)
    return (
        isinstance(known, dict)
        and not node.keys() & _ABOUT_OTHERS
        and isinstance(required, list)
        and all(isinstance(name, str) and name in known for name in required)
        and isinstance(least, int)
        and least <= len(known)
    )

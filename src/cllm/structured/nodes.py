"""What is where in a JSON schema: the schemas in it, and what references lead to. Clients may have written anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

LITERAL = frozenset({"const", "enum", "default", "examples", "example", "x-guidance"})
"""Keywords whose values are no schemas, whatever they look like."""
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
"""Keywords whose values are schemas by name."""
_LONGEST_INDEX = 18


def by_name(node: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    """The members of a keyword's value; none if it is no object."""
    return value if isinstance(value := node.get(keyword), dict) else {}


def listed(node: Mapping[str, Any], keyword: str) -> list[Any]:
    return value if isinstance(value := node.get(keyword), list) else []


def inner(node: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The schemas in a schema, each with the steps to it."""
    for key, value in node.items():
        if key in LITERAL:
            continue
        if isinstance(value, list):
            yield from (((key, str(index)), each) for index, each in enumerate(value))
        elif isinstance(value, dict) and key in NAMED:
            yield from (((key, name), each) for name, each in value.items())
        elif isinstance(value, dict):
            yield (key,), value


def schemas_in(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and all in it."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += [each for _, each in inner(node)]


def step_into(value: Any, step: str) -> Any:
    """What a step of a pointer leads to; None: nothing."""
    if isinstance(value, dict):
        return value.get(step.replace("~1", "/").replace("~0", "~"))
    if isinstance(value, list) and step.isdecimal() and len(step) <= _LONGEST_INDEX and int(step) < len(value):
        return value[int(step)]
    return None


def opens_a_document(schema: Mapping[str, Any]) -> bool:
    """Whether references in it are no longer to the document around it."""
    return isinstance(schema.get("$id"), str) or isinstance(schema.get("id"), str)


class References:
    """References within one document."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root

    def target(self, reference: Any) -> Any:
        """What is at `#/...`; None: nothing is, or it is not plain that it is meant."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        start, *steps = unquote(reference[1:]).split("/")
        found: Any = None if start else self._root
        for step in steps:
            found = step_into(found, step)
            if isinstance(found, dict) and opens_a_document(found):
                return None
        return found

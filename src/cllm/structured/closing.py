"""Objects that name their properties get no others, as in llama-server and xgrammar.

The standard lets them have any. But few who write a schema mean that, and a small model that may invent properties does
not stop. `additionalProperties: true` says that it is meant. Where several schemas apply to one object, it stays open,
and so do the objects in it: each would forbid the properties of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cllm.structured.keywords import LITERAL, NAMED
from cllm.structured.references import References, opens_a_document

_OF_OBJECTS = frozenset({
    "properties", "required", "patternProperties", "additionalProperties", "propertyNames", "minProperties",
    "maxProperties",
})  # fmt: skip
_SHARES = frozenset({
    "if", "dependentSchemas", "dependentRequired", "dependencies", "unevaluatedProperties", "not", "$dynamicRef",
    "$recursiveRef",
})  # fmt: skip
_ABOUT_OTHERS = frozenset({"additionalProperties", "patternProperties", "propertyNames"})


def closable_objects(root: Mapping[str, Any], references: References) -> set[int]:
    """The ids of the schemas in a document that may forbid properties that they do not name."""
    closing = _Closing(references)
    nodes = [*schemas_in(root)]
    closing.keep_open(part for node in nodes for part in closing.shared_parts(node, is_root=node is root))
    return {id(node) for node in nodes if id(node) not in closing.open and _names_all(node)}


def schemas_in(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and all in it."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping):
            yield node
            waiting += _children(node)


def _children(node: Mapping[str, Any]) -> Iterator[Any]:
    for key, value in node.items():
        if key in LITERAL:
            continue
        if isinstance(value, list):
            yield from value
        elif isinstance(value, Mapping):
            yield from value.values() if key in NAMED else [value]


class _Closing:
    def __init__(self, references: References) -> None:
        self.open: set[int] = set()
        self._references = references
        self._speaks: dict[int, bool] = {}

    def shared_parts(self, node: Mapping[str, Any], *, is_root: bool) -> Iterable[Any]:
        """Schemas in it, or itself, that apply to an object together with others."""
        if not node.keys().isdisjoint(_SHARES) or (not is_root and opens_a_document(node)):
            return [node]
        about = [any(map(self._speaks_of_objects, options)) for options in self._applied(node)]
        if sum(about) + _speaks_itself(node) > 1:
            return [node]
        return self._of_same_property(node)

    def _of_same_property(self, node: Mapping[str, Any]) -> list[Any]:
        """Schemas of properties whose names may be the same."""
        named, known = node.get("patternProperties"), node.get("properties")
        if not isinstance(named, Mapping):
            return []
        parts = [*named.values(), *(known.values() if isinstance(known, Mapping) else ())]
        return parts if sum(map(self._speaks_of_objects, parts)) > 1 else []

    def keep_open(self, schemas: Iterable[Any]) -> None:
        """These, and all that they lead to."""
        waiting = list(schemas)
        while waiting:
            node = waiting.pop()
            if isinstance(node, Mapping) and id(node) not in self.open:
                self.open.add(id(node))
                waiting += _children(node)
                if "$ref" in node:
                    waiting.append(self._references.target(node["$ref"]))

    def _applied(self, node: Mapping[str, Any]) -> Iterator[list[Any]]:
        """What else holds for a value of the schema: of each list, one or more."""
        for key in ("anyOf", "oneOf"):
            if isinstance(options := node.get(key), list):
                yield options
        yield from ([each] for each in together) if isinstance(together := node.get("allOf"), list) else ()
        if "$ref" in node:
            yield [self._references.target(node["$ref"])]

    def _speaks_of_objects(self, schema: Any) -> bool:
        """Whether it says anything about properties, or refers to what is not known."""
        if not isinstance(schema, Mapping):
            return schema is None
        known = self._speaks.get(id(schema))
        if known is None:
            self._speaks[id(schema)] = False  # where it refers to itself, it adds nothing
            known = _speaks_itself(schema) or any(
                self._speaks_of_objects(each) for options in self._applied(schema) for each in options
            )
            self._speaks[id(schema)] = known
        return known


def _speaks_itself(node: Mapping[str, Any]) -> bool:
    if not node.keys().isdisjoint(_OF_OBJECTS | _SHARES) or isinstance(node.get("const"), Mapping):
        return True
    values = node.get("enum")
    return isinstance(values, list) and any(isinstance(each, Mapping) for each in values)


def _names_all(node: Mapping[str, Any]) -> bool:
    known, required = node.get("properties"), node.get("required", [])
    least = node.get("minProperties", 0)
    return (
        isinstance(known, Mapping)
        and node.keys().isdisjoint(_ABOUT_OTHERS)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in known for name in required)
        and isinstance(least, int)
        and least <= len(known)
    )

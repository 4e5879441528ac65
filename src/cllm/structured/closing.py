"""Objects that name their properties get no others, as in llama-server and xgrammar.

The standard lets them have any. But few who write a schema mean that, and a small model that may invent properties does
not stop. `additionalProperties: true` says that it is meant. Where several schemas apply to one object, it stays open,
and so do the objects in it: each would forbid the properties of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cllm.structured.nodes import References, by_name, inner, listed, opens_a_document, schemas_in

_SHARES = frozenset({
    "if", "dependentSchemas", "dependentRequired", "dependencies", "unevaluatedProperties", "not", "$dynamicRef",
    "$recursiveRef",
})  # fmt: skip
_JOINS = _SHARES | {"anyOf", "oneOf", "allOf", "$ref", "patternProperties", "$id", "id"}
_ABOUT_OTHERS = frozenset({"additionalProperties", "patternProperties", "propertyNames"})
_OF_OBJECTS = _SHARES | _ABOUT_OTHERS | {"properties", "required", "minProperties", "maxProperties"}


def closable_objects(root: Mapping[str, Any], references: References) -> set[int]:
    """The ids of the schemas in a document that may forbid properties that they do not name."""
    closing = _Closing(references)
    nodes = [*schemas_in(root)]
    closing.keep_open(part for node in nodes for part in closing.shared_parts(node, is_root=node is root))
    return {id(node) for node in nodes if id(node) not in closing.open and _names_all(node)}


class _Closing:
    def __init__(self, references: References) -> None:
        self.open: set[int] = set()
        self._references = references
        self._speaks: dict[int, bool] = {}

    def shared_parts(self, node: Mapping[str, Any], *, is_root: bool) -> Iterable[Any]:
        """Schemas in it, or itself, that apply to an object together with others."""
        if node.keys().isdisjoint(_JOINS):
            return []
        if not node.keys().isdisjoint(_SHARES) or (not is_root and opens_a_document(node)):
            return [node]
        about = [any(map(self._speaks_of_objects, options)) for options in self._applied(node)]
        if sum(about) + _speaks_itself(node) > 1:
            return [node]
        # Names of properties may be the same.
        named = by_name(node, "patternProperties")
        parts = [*named.values(), *by_name(node, "properties").values()] if named else []
        return parts if sum(map(self._speaks_of_objects, parts)) > 1 else []

    def keep_open(self, schemas: Iterable[Any]) -> None:
        """These, and all that they lead to."""
        waiting = list(schemas)
        while waiting:
            node = waiting.pop()
            if isinstance(node, dict) and id(node) not in self.open:
                self.open.add(id(node))
                waiting += [each for _, each in inner(node)]
                if "$ref" in node:
                    waiting.append(self._references.target(node["$ref"]))

    def _applied(self, node: Mapping[str, Any]) -> Iterator[list[Any]]:
        """What else holds for a value of the schema: of each list, one or more."""
        yield from (listed(node, key) for key in ("anyOf", "oneOf"))
        yield from ([each] for each in listed(node, "allOf"))
        if "$ref" in node:
            yield [self._references.target(node["$ref"])]

    def _speaks_of_objects(self, schema: Any) -> bool:
        """Whether it says anything about properties, or refers to what is not known."""
        if not isinstance(schema, dict):
            return schema is None
        if id(schema) not in self._speaks:
            self._speaks[id(schema)] = False  # where it refers to itself, it adds nothing
            self._speaks[id(schema)] = _speaks_itself(schema) or any(
                self._speaks_of_objects(each) for options in self._applied(schema) for each in options
            )
        return self._speaks[id(schema)]


def _speaks_itself(node: Mapping[str, Any]) -> bool:
    values = [node.get("const"), *listed(node, "enum")]
    return not node.keys().isdisjoint(_OF_OBJECTS) or any(isinstance(each, dict) for each in values)


def _names_all(node: Mapping[str, Any]) -> bool:
    known, required, least = node.get("properties"), node.get("required", []), node.get("minProperties", 0)
    return (
        isinstance(known, dict)
        and node.keys().isdisjoint(_ABOUT_OTHERS)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in known for name in required)
        and isinstance(least, int)
        and least <= len(known)
    )

"""Where in a JSON schema an error is: llguidance does not say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cllm.structured.keywords import LITERAL, NAMED
from cllm.structured.references import References, index_of

PATIENCE_S = 0.5
"""Then, what was found out so far is the answer."""
_KEPT = ("$schema", "$id", "id", "$defs", "definitions", "x-guidance")


def place_of(schema: Mapping[str, Any], given: Any, check: Callable[[Mapping[str, Any]], str]) -> str:
    """A pointer to the smallest part of `schema` that has the same error as the whole, as far as it is in `given` too.
    `check` returns the error of a schema."""
    until = time.monotonic() + PATIENCE_S
    error = check(schema)
    kept = {key: schema[key] for key in _KEPT if key in schema}
    path, node, seen = "", schema, {""}
    while found := next(
        (
            (where, part)
            for where, part in _parts(node, path, schema)
            if where not in seen and time.monotonic() < until and check({**kept, "allOf": [part]}) == error
        ),
        None,
    ):
        path, node = found
        seen.add(path)
    return _within(given, path) or "/"


def pointer_to(root: Any, part: Any) -> str:
    """Where in a document this very part is."""
    waiting: list[tuple[str, Any]] = [("", root)]
    while waiting:
        path, value = waiting.pop()
        if value is part:
            return path or "/"
        if isinstance(value, Mapping):
            waiting += [(f"{path}/{_step(key)}", each) for key, each in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{path}/{index}", each) for index, each in enumerate(value)]
    return "/"


def _parts(node: Mapping[str, Any], path: str, root: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas in a schema, and the one that it refers to."""
    for key, value in node.items():
        at = f"{path}/{_step(key)}"
        if key in LITERAL or key in ("$defs", "definitions"):
            continue
        if isinstance(value, Mapping):
            inner = value.items() if key in NAMED else ()
            yield from ((f"{at}/{_step(name)}", each) for name, each in inner if isinstance(each, Mapping))
            if key not in NAMED:
                yield at, value
        elif isinstance(value, list):
            yield from ((f"{at}/{index}", each) for index, each in enumerate(value) if isinstance(each, Mapping))
    if isinstance(reference := node.get("$ref"), str):
        target = References(root).target(reference)
        if isinstance(target, Mapping):
            yield reference[1:], target


def _step(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _within(given: Any, path: str) -> str:
    """The beginning of the path that leads somewhere."""
    found = ""
    for step in path.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(given, Mapping) and name in given:
            given = given[name]
        elif isinstance(given, list) and (index := index_of(name)) < len(given):
            given = given[index]
        else:
            break
        found = f"{found}/{step}"
    return found

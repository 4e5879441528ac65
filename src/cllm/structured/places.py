"""Where in a JSON schema an error is: llguidance does not say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cllm.structured.nodes import References, inner, step_into

PATIENCE_S = 0.5
"""Then, what was found out so far is the answer."""
_DEFINITIONS = ("$defs", "definitions")
_KEPT = ("$schema", "$id", "id", *_DEFINITIONS, "x-guidance")


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
    shown = ""
    for step in path.split("/")[1:]:
        given = step_into(given, step)
        if given is None:
            break
        shown = f"{shown}/{step}"
    return shown or "/"


def pointer_to(root: Any, part: Any) -> str:
    """Where in a document this very schema is."""
    waiting: list[tuple[str, Any]] = [("", root)]
    while waiting:
        path, value = waiting.pop()
        if value is part:
            return path or "/"
        if isinstance(value, dict):
            waiting += [(_behind(path, steps), each) for steps, each in inner(value)]
    return "/"


def _parts(node: Mapping[str, Any], path: str, root: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas in a schema, and the one that it refers to."""
    for steps, each in inner(node):
        if steps[0] not in _DEFINITIONS and isinstance(each, dict):
            yield _behind(path, steps), each
    if isinstance(reference := node.get("$ref"), str):
        target = References(root).target(reference)
        if isinstance(target, dict):
            yield reference[1:], target


def _behind(path: str, steps: tuple[str, ...]) -> str:
    return "/".join([path, *(step.replace("~", "~0").replace("/", "~1") for step in steps)])

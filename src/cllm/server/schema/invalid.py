"""Describes what is wrong with a request: a sentence for each parameter."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cllm.server.schema.validation import MOST_PROBLEMS, OWN_KINDS, shorten, show

_SHOULD = re.compile("^(Input|String) should")


def describe_invalid(errors: Sequence[Mapping[str, Any]]) -> tuple[str | None, str]:
    """(first parameter, message), with a sentence for each error."""
    sentences: dict[str | None, str] = {}
    for group in _by_parameter(errors):
        for error in [each for each in group if each["type"] in OWN_KINDS] or [max(group, key=_clarity)]:
            param, sentence = _describe(error)
            sentences.setdefault(param, sentence)
    shown = list(sentences.values())[:MOST_PROBLEMS]
    if len(sentences) > len(shown):
        shown.append("There are more errors.")
    return next(iter(sentences)), " ".join(shown)


def _by_parameter(errors: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Group errors by parameter, in their order: a value that fits no branch of a union has an error per branch, all of
    them at the value itself or inside it."""
    paths = [tuple(_path_of(error)) for error in errors]
    found = set(paths)
    groups: dict[tuple[str | int, ...], list[Mapping[str, Any]]] = {}
    for error, path in zip(errors, paths, strict=True):
        outermost = next((path[:end] for end in range(1, len(path)) if path[:end] in found), path)
        groups.setdefault(outermost, []).append(error)
    return list(groups.values())


def _describe(error: Mapping[str, Any]) -> tuple[str | None, str]:
    path = _path_of(error)
    if not path and error["type"] == "string_unicode":
        return None, f"The body has the key {show(error['input'])}, which is not valid text."
    if not path:
        return None, "The body must be a JSON object, sent with content-type: application/json."
    param = shorten("".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:])
    return param, f"{param} {_reason(error)}."


def _clarity(error: Mapping[str, Any]) -> tuple[bool, int]:
    """Ranks the errors of a union's branches: our own are the clearest, then the one furthest into the value."""
    return error["type"] in OWN_KINDS, len(error["loc"])


def _path_of(error: Mapping[str, Any]) -> list[str | int]:
    """Where the error is, without pydantic's marks of union branches (`str`, `list[int]`, ...)."""
    path = [part for part in error["loc"] if isinstance(part, int) or _is_field_name(part)]
    if error["type"] == "refused":
        path.append(error["ctx"]["param"])
    return path


def _is_field_name(part: str | int) -> bool:
    return isinstance(part, str) and part.isidentifier() and part not in ("str", "int", "float", "bool")


def _reason(error: Mapping[str, Any]) -> str:
    kind = error["type"]
    if kind in OWN_KINDS:
        return str(error["msg"])
    if kind == "missing":
        return "is missing"
    if kind == "too_short":
        return "is empty"
    if kind in ("too_long", "string_too_long"):
        given = error.get("input")
        unit = "characters" if isinstance(given, str) else "items"
        return f"has more than {error['ctx']['max_length']} {unit}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"must be an object, not {show(error.get('input'))}"
    return f"{_SHOULD.sub('must', str(error['msg']))}, not {show(error.get('input'))}"

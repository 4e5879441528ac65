"""What the APIs with tools have in common: names, ids, and kinds of objects that are refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field

from cllm.server.validation import Text, refusal, shorten, wrong

CallId = Annotated[Text, Field(min_length=1, max_length=256)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
JsonObject = dict[str, Any]


def known_kinds(kinds: Sequence[str], advice: str = "", default: str | None = None) -> BeforeValidator:
    """Marks an object whose `type` is one of these. Of any other the error says its name and `advice`. `default` is the
    kind of an object without a type, or with null."""

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise wrong("must be an object")
        kind = default if value.get("type") is None else value["type"]
        if kind not in kinds:
            given = "missing" if kind is None else shorten(repr(kind))
            raise refusal("type", f"is {given}; it must be {_listed(kinds)}{advice}")
        return value

    return BeforeValidator(check)


def by_kind(default: str | None = None) -> Discriminator:
    """Marks a union of objects, each with the tag "KIND object", by their `type`; no identifier is the tag, and so no
    part of a parameter's path."""

    def tag(value: Any) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return f"{default if kind is None else kind} object"

    return Discriminator(tag)


def check_names(names: Iterable[str], param: str, where: str = "name") -> None:
    """No two tools have one name."""
    seen: set[str] = set()
    for number, name in enumerate(names):
        if name in seen:
            raise refusal(f"{param}[{number}].{where}", f"is {shorten(repr(name))}, which another tool has")
        seen.add(name)


def check_schema(schema: JsonObject | None, param: str) -> None:
    kind = (schema or {}).get("type", "object")
    if kind != "object":
        raise refusal(param, f"must be the schema of an object, not of {shorten(repr(kind))}")


def _listed(kinds: Sequence[str]) -> str:
    return f"{', '.join(map(repr, kinds[:-1]))} or {kinds[-1]!r}" if len(kinds) > 1 else repr(kinds[0])

"""Tools that a model may call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cllm.errors import InvalidRequestError
from cllm.structured.schemas import lenient

TOOL_NAME = r"^[a-zA-Z0-9_.-]{1,128}$"
_FIELDS = ("name", "description", "parameters", "strict")
_MOST_LEVELS = 128
"""As deep as the server reads a body."""
_NOTHING = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object; None: it takes none."""
    strict: bool = False
    """Whether the arguments are guaranteed to fit the schema, with all that it says."""

    @property
    def enforced(self) -> dict[str, Any] | None:
        """The schema of calls that are made by a mask."""
        return self.parameters if self.strict or self.parameters is None else lenient(self.parameters)

    def for_template(self) -> dict[str, Any]:
        described = {"name": self.name, "description": self.description, "parameters": self.parameters or _NOTHING}
        return {"type": "function", "function": {key: value for key, value in described.items() if value is not None}}

    def as_json(self) -> dict[str, Any]:
        """In OpenAI's form."""
        tool = self.for_template()
        return {**tool, "function": {**tool["function"], "strict": True}} if self.strict else tool


def read_tools(found: object) -> list[Tool]:
    """A list of tools in OpenAI's form, checked."""
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        raise InvalidRequestError("tools must be a list", "tools")
    tools = [_read_tool(tool, f"tools[{number}]") for number, tool in enumerate(found)]
    names: set[str] = set()
    for tool in tools:
        if tool.name in names:
            raise InvalidRequestError(f"two tools have the name {tool.name}", "tools")
        names.add(tool.name)
    return tools


def _read_tool(found: object, where: str) -> Tool:
    function = found.get("function") if isinstance(found, Mapping) and found.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f'{where} must be an object with "type": "function" and function', where)
    if unknown := [key for key in function if key not in _FIELDS]:
        raise InvalidRequestError(f"{where}.function.{unknown[0]} is not known; it has {', '.join(_FIELDS)}", where)
    name, description, parameters, strict = (function.get(field) for field in _FIELDS)
    if not isinstance(name, str) or re.fullmatch(TOOL_NAME, name) is None:
        raise InvalidRequestError(f"{where}.function.name must be 1 to 128 letters, digits, _, - or .", where)
    if description is not None and not isinstance(description, str):
        raise InvalidRequestError(f"{where}.function.description must be text", where)
    if parameters is not None and (not isinstance(parameters, dict) or parameters.get("type", "object") != "object"):
        raise InvalidRequestError(f"{where}.function.parameters must be the JSON schema of an object", where)
    if _is_deeper(parameters, _MOST_LEVELS):
        raise InvalidRequestError(f"{where}.function.parameters is nested more than {_MOST_LEVELS} levels deep", where)
    if strict not in (None, False, True):
        raise InvalidRequestError(f"{where}.function.strict must be true or false", where)
    return Tool(name, description, parameters or None, bool(strict))


def _is_deeper(value: object, levels: int) -> bool:
    inner = [value]
    for _ in range(levels):
        inner = [each for outer in inner for each in _within(outer)]
    return any(_within(each) for each in inner)


def _within(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []

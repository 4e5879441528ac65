"""Tools of OpenAI's Responses, all of which become functions, and their calls as clients expect them.

A namespace is its functions: the model calls `NAMESPACE__NAME`, and the client gets both parts again. A custom tool,
whose input is plain text, is a function with one argument. What only OpenAI has is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import ConfigDict, Field, Tag, model_validator

from cllm.dialect.tools import Tool
from cllm.server.schema.tools import MOST_TOOLS, JsonObject, ToolName, by_kind, check_schema, known_kinds
from cllm.server.schema.validation import Hint, RequestModel, Text, Unsupported, refusal, shorten

INPUT = "input"
"""The argument of a custom tool's function."""
_PLAIN_INPUT = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
_Hosted = Literal[
    "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "file_search",
    "image_generation", "code_interpreter", "computer", "computer_use", "computer_use_preview", "mcp", "local_shell",
    "shell", "apply_patch", "tool_search",
]  # fmt: skip
HOSTED: tuple[str, ...] = get_args(_Hosted)


@dataclass(frozen=True, slots=True)
class CalledTool:
    """How a client knows the tool that the model calls by one name."""

    name: str
    namespace: str | None = None
    custom: bool = False

    @property
    def flat_name(self) -> str:
        """The one by which the model calls it."""
        if self.namespace is None:
            return self.name
        return f"{self.namespace}{self.name}" if self.namespace.endswith("__") else f"{self.namespace}__{self.name}"

    def item(self, call_id: str) -> dict[str, Any]:
        """A call of it, without what it is called with."""
        kind = "custom_tool_call" if self.custom else "function_call"
        namespace = {} if self.namespace is None else {"namespace": self.namespace}
        return {"type": kind, "call_id": call_id, "name": self.name, **namespace}


def input_of(arguments: str) -> str:
    """A custom tool's input: what the model has written as its argument, or all of it if that is something else."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = found.get(INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


class FunctionOfResponse(RequestModel):
    unsupported: ClassVar[Unsupported] = {"allowed_callers": (["direct"],), "async": (False,)}

    type: Literal["function"]
    name: ToolName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = Field(None, description="Calls are guaranteed to fit the schema.")
    output_schema: Hint = None
    defer_loading: Annotated[bool | None, Field(description="A hint: every tool is shown to the model.")] = None

    def tool(self) -> Tool:
        return Tool(self.name, self.description, self.parameters or None, bool(self.strict))

    @model_validator(mode="after")
    def _takes_an_object(self) -> FunctionOfResponse:
        check_schema(self.parameters, "parameters")
        return self


class InputFormat(RequestModel):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Text | None = None


class CustomTool(RequestModel):
    """A tool whose input is plain text."""

    type: Literal["custom"]
    name: ToolName
    description: Text | None = None
    format: InputFormat | None = Field(None, description="A grammar is told to the model, not enforced.")
    defer_loading: Annotated[bool | None, Field(description="A hint: every tool is shown to the model.")] = None

    def tool(self) -> Tool:
        told = [self.description] if self.description else []
        if self.format is not None and self.format.definition:
            syntax = "regular expression" if self.format.syntax == "regex" else f"{self.format.syntax or ''} grammar"
            told.append(f"The input must follow this {syntax.strip()}:\n{self.format.definition}")
        return Tool(self.name, "\n\n".join(told) or None, _PLAIN_INPUT)


SingleTool = Annotated[
    Annotated[FunctionOfResponse, Tag("function object")] | Annotated[CustomTool, Tag("custom object")],
    by_kind(),
    known_kinds(("function", "custom"), "; a namespace has no other kinds of tools"),
]


class Namespace(RequestModel):
    """Functions of one origin: the model calls them `NAMESPACE__NAME`."""

    type: Literal["namespace"]
    name: ToolName
    description: Text | None = None
    tools: Annotated[list[SingleTool], Field(fail_fast=True, max_length=MOST_TOOLS)]


class HostedTool(RequestModel):
    """A tool that only OpenAI has. It is left out, and the header `x-tools-left-out` of the answer names it."""

    model_config = ConfigDict(extra="allow")

    type: _Hosted

    @classmethod
    def _sort_keys(cls, data: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        return {"type": data["type"]}, []  # its settings are not looked at


ToolOfResponse = Annotated[
    Annotated[FunctionOfResponse, Tag("function object")]
    | Annotated[CustomTool, Tag("custom object")]
    | Annotated[Namespace, Tag("namespace object")]
    | Annotated[HostedTool, Tag("hosted object")],
    by_kind(alike=dict.fromkeys(HOSTED, "hosted")),
    known_kinds(("function", "custom", "namespace", *HOSTED)),
]


class ToolNames:
    """The tools of a request, by the names that the model calls them by. Raises an error that names the parameter if
    two have the same."""

    def __init__(self, given: Sequence[FunctionOfResponse | CustomTool | Namespace | HostedTool]) -> None:
        self.left_out = [tool.type for tool in given if isinstance(tool, HostedTool)]
        self.called: dict[str, CalledTool] = {}
        self.tools: dict[str, Tool] = {}
        for where, namespace, tool in _single(given):
            called = CalledTool(tool.name, namespace, isinstance(tool, CustomTool))
            name = called.flat_name
            if name in self.tools:
                raise refusal(f"{where}.name", f"is {shorten(repr(name))}, which another tool already uses")
            if len(self.tools) == MOST_TOOLS:
                raise refusal("tools", f"has more than {MOST_TOOLS} tools, those of namespaces included")
            self.called[name] = called
            self.tools[name] = replace(tool.tool(), name=name)

    def find(self, name: str) -> str | None:
        """The model's name of a tool that a client names, with or without its namespace."""
        if name in self.tools:
            return name
        found = [flat for flat, called in self.called.items() if called.name == name]
        return found[0] if len(found) == 1 else None


def _single(
    given: Iterable[FunctionOfResponse | CustomTool | Namespace | HostedTool],
) -> Iterator[tuple[str, str | None, FunctionOfResponse | CustomTool]]:
    for number, tool in enumerate(given):
        if isinstance(tool, Namespace):
            for inner, each in enumerate(tool.tools):
                yield f"tools[{number}].tools[{inner}]", tool.name, each
        elif not isinstance(tool, HostedTool):
            yield f"tools[{number}]", None, tool

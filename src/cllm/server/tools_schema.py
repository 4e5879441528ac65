"""Tools and their calls as OpenAI's clients send them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from cllm.dialect.tools import Tool
from cllm.server.chat import NamedTool, ToolChoice
from cllm.server.tool_fields import ToolName, by_kind, check_names, check_schema, known_kinds
from cllm.server.validation import RequestModel, Text, refusal

MOST_TOOLS = 512
_Id = Annotated[Text, Field(max_length=256)]


class FunctionTool(RequestModel):
    name: ToolName
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(None, description="The JSON schema of an object. Default: no arguments.")
    strict: bool | None = Field(None, description="Guarantee that the arguments fit the schema.")

    @model_validator(mode="after")
    def _takes_an_object(self) -> FunctionTool:
        check_schema(self.parameters, "parameters")
        return self


class ToolDefinition(RequestModel):
    type: Literal["function"]
    function: FunctionTool

    def tool(self) -> Tool:
        function = self.function
        return Tool(function.name, function.description, function.parameters or None, bool(function.strict))


class _ChosenFunction(RequestModel):
    name: ToolName


class ChosenTool(RequestModel):
    type: Literal["function"]
    function: _ChosenFunction


class _AllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(fail_fast=True, min_length=1, max_length=MOST_TOOLS)]


class AllowedTools(RequestModel):
    """The model is told of these alone."""

    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


Tools = Annotated[list[ToolDefinition], Field(fail_fast=True, max_length=MOST_TOOLS)]
ChoiceObject = Annotated[
    Annotated[ChosenTool, Tag("function object")] | Annotated[AllowedTools, Tag("allowed_tools object")],
    by_kind(),
    known_kinds(("function", "allowed_tools")),
]
Choice = Literal["auto", "none", "required"] | ChoiceObject


class CalledFunction(RequestModel):
    name: Annotated[Text, Field(max_length=256)]
    arguments: Text | dict[str, Any] = Field("", description="The text of a JSON object.")


class CalledTool(RequestModel):
    """A call in a message of the assistant."""

    id: _Id
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="As in a stream; says nothing here.")

    def plain(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}


Calls = Annotated[list[CalledTool], Field(fail_fast=True)]


def check_tools(tools: list[ToolDefinition] | None, choice: Choice | None) -> None:
    """What is wrong with them together."""
    names = [tool.function.name for tool in tools or ()]
    check_names(names, "tools", "function.name")
    if choice is not None and choice not in ("none", "auto") and not names:
        raise refusal("tool_choice", "is only allowed together with tools")
    for chosen in _chosen(choice):
        if chosen.function.name not in names:
            raise refusal("tool_choice", f"names {chosen.function.name!r}, which is not among the tools")


def allowed_of(tools: list[ToolDefinition] | None, choice: Choice | None) -> list[Tool]:
    """The tools that the model is told of."""
    names = {chosen.function.name for chosen in _chosen(choice)} if isinstance(choice, AllowedTools) else None
    return [tool.tool() for tool in tools or () if names is None or tool.function.name in names]


def choice_of(choice: Choice | None) -> ToolChoice:
    if isinstance(choice, AllowedTools):
        return choice.allowed_tools.mode
    return NamedTool(choice.function.name) if isinstance(choice, ChosenTool) else choice or "auto"


def _chosen(choice: Choice | None) -> list[ChosenTool]:
    if isinstance(choice, AllowedTools):
        return choice.allowed_tools.tools
    return [choice] if isinstance(choice, ChosenTool) else []

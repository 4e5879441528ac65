"""Tools, their names and kinds, which all chat APIs share, and the forms in which OpenAI's chats send them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from cllm.dialect.tools import TOOL_NAME, Tool
from cllm.errors import InvalidRequestError
from cllm.server.schema.validation import MustBe, RequestModel, Text, refusal, shorten, show, wrong

MOST_TOOLS = 512
CallId = Annotated[Text, Field(min_length=1, max_length=256)]
JsonObject = dict[str, Any]


def _is_name(name: str) -> str:
    if re.fullmatch(TOOL_NAME, name) is None:
        raise wrong(f"must be 1 to 128 letters, digits, _, - or ., not {shorten(repr(name))}")
    return name


ToolName = Annotated[str, AfterValidator(_is_name), Field(json_schema_extra={"pattern": TOOL_NAME})]


def known_kinds(
    kinds: Sequence[str], advice: str = "", default: str | None = None, expected: str = "an object"
) -> BeforeValidator:
    """Marks an object whose `type` is one of these; the error for any other names it and adds `advice`. `default`: the
    kind of an object without a type. `expected`: what the value may be, for the error if it is no object."""

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise wrong(f"must be {expected}, not {show(value)}")
        kind = default if value.get("type") is None else value["type"]
        if kind not in kinds:
            given = "missing" if kind is None else shorten(repr(kind))
            raise refusal("type", f"is {given}; it must be {_listed(kinds)}{advice}")
        return value

    return BeforeValidator(check)


def by_kind(default: str | None = None, alike: Mapping[str, str] = {}) -> Discriminator:
    """Marks a union of objects by their `type`, each with the tag "KIND object": not an identifier, so that it does not
    appear in a parameter's path. `alike`: types that share the tag of a kind."""

    def tag(value: Any) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        kind = default if kind is None else kind
        return f"{alike.get(kind, kind) if isinstance(kind, str) else kind} object"

    return Discriminator(tag)


def check_names(names: Iterable[str], param: str, where: str = "name") -> None:
    """Tool names must be unique."""
    seen: set[str] = set()
    for number, name in enumerate(names):
        if name in seen:
            raise refusal(f"{param}[{number}].{where}", f"is {shorten(repr(name))}, which another tool already uses")
        seen.add(name)


def check_schema(schema: JsonObject | None, param: str) -> None:
    kind = (schema or {}).get("type", "object")
    if kind != "object":
        raise refusal(param, f"must be the schema of an object, not of {shorten(repr(kind))}")


def _listed(kinds: Sequence[str]) -> str:
    return f"{', '.join(map(repr, kinds[:-1]))} or {kinds[-1]!r}" if len(kinds) > 1 else repr(kinds[0])


class ToolCallIds:
    """Checks the tool calls of a conversation, whatever the API: ids are unique, and every result answers a call before
    it, once."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._unanswered: set[str] = set()
        self._taken: set[str] = set()

    def start_message(self) -> None:
        """Ids of earlier messages may be used again, as OpenAI's clients do."""
        self._taken.clear()

    def add_call(self, call_id: str, name: str, param: str) -> None:
        if call_id in self._taken:
            raise InvalidRequestError(f"{param} is {shorten(repr(call_id))}, which another call already uses.", param)
        self._taken.add(call_id)
        self._names[call_id] = name
        self._unanswered.add(call_id)

    def add_result(self, call_id: str, param: str) -> str:
        """The name of the tool that was called."""
        if call_id not in self._unanswered:
            problem = "has a result already" if call_id in self._names else "is that of no call before it"
            raise InvalidRequestError(f"{param} {problem}: {shorten(repr(call_id))}.", param)
        self._unanswered.remove(call_id)
        return self._names[call_id]

    @property
    def all_answered(self) -> bool:
        return not self._unanswered


@dataclass(frozen=True, slots=True)
class NamedTool:
    name: str


ToolChoice = Literal["auto", "none", "required"] | NamedTool
"""What every API's tool_choice becomes."""


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
    """Only these tools are shown to the model."""

    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


CHOICES = "'auto', 'none', 'required' or an object"
Tools = Annotated[
    list[Annotated[ToolDefinition, known_kinds(("function",), "; this server supports no other kind of tool")]],
    Field(fail_fast=True, max_length=MOST_TOOLS),
]
ChoiceObject = Annotated[
    Annotated[ChosenTool, Tag("function object")] | Annotated[AllowedTools, Tag("allowed_tools object")],
    by_kind(),
    known_kinds(("function", "allowed_tools"), expected=CHOICES),
]
Choice = Literal["auto", "none", "required"] | ChoiceObject


class CalledFunction(RequestModel):
    name: Annotated[Text, Field(max_length=256)]
    arguments: Annotated[Text | dict[str, Any], MustBe("the text of a JSON object")] = Field(
        "", description="The text of a JSON object."
    )


class CalledTool(RequestModel):
    """A call in an assistant message."""

    id: Annotated[Text, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="As in a stream; without effect here.")

    def plain(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}


Calls = Annotated[list[CalledTool], Field(fail_fast=True)]


def check_tools(tools: list[ToolDefinition] | None, choice: Choice | None) -> None:
    """Check tools and tool_choice together."""
    names = [tool.function.name for tool in tools or ()]
    check_names(names, "tools", "function.name")
    if choice is not None and choice not in ("none", "auto") and not names:
        raise refusal("tool_choice", "is only allowed together with tools")
    for chosen in _chosen(choice):
        if chosen.function.name not in names:
            raise refusal("tool_choice", f"names {chosen.function.name!r}, which is not among the tools")


def allowed_of(tools: list[ToolDefinition] | None, choice: Choice | None) -> list[Tool]:
    """The tools that are shown to the model."""
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

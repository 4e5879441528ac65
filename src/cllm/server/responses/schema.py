"""Requests of OpenAI's Responses. Parameters that are not supported are listed, and refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import NotRequired, TypedDict

from cllm.dialect.tools import Tool
from cllm.engine.params import MAX_LOGPROBS
from cllm.server.http.response import as_json
from cllm.server.responses.tools import HOSTED, INPUT, CalledTool, ToolNames, ToolOfResponse
from cllm.server.schema.sampling import RETURN_PROGRESS, SamplingFields
from cllm.server.schema.structure import lenient_unless_strict
from cllm.server.schema.tools import CHOICES, MOST_TOOLS, CallId, JsonObject, ToolName, by_kind, known_kinds
from cllm.server.schema.validation import (
    END_USER,
    WHOLE,
    AtMost,
    ModelName,
    MustBe,
    RequestModel,
    Text,
    Unsupported,
    UserName,
    Words,
    raised_by,
    refusal,
    shorten,
)
from cllm.structured.structure import Structure

_NO_CONTENT = "; this server supports no images, files or other kinds of content"
_NO_ITEM = "; this server supports no references to items and has no tools of its own"
_ITEMS = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
)
_NO_HOSTED_TOOL = "; this server has no tools of its own: send a function"

Status = Literal["in_progress", "completed", "incomplete"]


class ItemText(RequestModel):
    hints = frozenset({"annotations", "logprobs", "parsed", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text", "text"]
    text: Text


class ItemRefusal(RequestModel):
    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[
    Annotated[ItemText, Tag("input_text object")]
    | Annotated[ItemText, Tag("output_text object")]
    | Annotated[ItemText, Tag("text object")]
    | Annotated[ItemRefusal, Tag("refusal object")],
    by_kind(),
    known_kinds(("input_text", "output_text", "text", "refusal"), _NO_CONTENT),
]
Parts = Annotated[list[Part], Field(fail_fast=True)]
TextOrParts = Annotated[Text | Parts, MustBe("a string or a list of content parts")]


class MessageItem(RequestModel):
    hints = frozenset({"id", "phase", "status"})

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"] = Field(
        description="`developer` is another word for `system`."
    )
    content: TextOrParts

    @property
    def plain_text(self) -> str:
        return _joined(self.content)


class FunctionCall(RequestModel):
    hints = frozenset({"async", "caller", "id", "parsed_arguments", "status"})

    type: Literal["function_call"]
    call_id: CallId
    name: CallId
    arguments: Text
    namespace: CallId | None = None

    @property
    def called(self) -> CalledTool:
        return CalledTool(self.name, self.namespace)


class CustomCall(RequestModel):
    hints = frozenset({"caller", "id", "status"})

    type: Literal["custom_tool_call"]
    call_id: CallId
    name: CallId
    input: Text
    namespace: CallId | None = None

    @property
    def called(self) -> CalledTool:
        return CalledTool(self.name, self.namespace, custom=True)

    @property
    def arguments(self) -> str:
        return as_json({INPUT: self.input})


class FunctionOutput(RequestModel):
    hints = frozenset({"caller", "id", "name", "namespace", "status"})

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: CallId
    output: TextOrParts

    @property
    def plain_text(self) -> str:
        return _joined(self.output)


class ReasoningText(RequestModel):
    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ReasoningItem(RequestModel):
    """Its text, or else its summary, goes to the chat template; encrypted content is left out."""

    hints = frozenset({"encrypted_content", "id", "status"})

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None

    @property
    def plain_text(self) -> str | None:
        parts = self.content or self.summary
        return "\n".join(part.text for part in parts) if parts else None


Item = Annotated[
    Annotated[MessageItem, Tag("message object")]
    | Annotated[FunctionCall, Tag("function_call object")]
    | Annotated[CustomCall, Tag("custom_tool_call object")]
    | Annotated[FunctionOutput, Tag("function_call_output object")]
    | Annotated[ReasoningItem, Tag("reasoning object")],
    by_kind("message", {"custom_tool_call_output": "function_call_output"}),
    known_kinds(_ITEMS, _NO_ITEM, "message"),
]


Items = Annotated[list[Item], Field(fail_fast=True, min_length=1), AtMost("max_messages", "items")]


def _joined(content: str | list[ItemText | ItemRefusal]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class ResponseToolChoice(RequestModel):
    type: Literal["function", "custom"]
    name: ToolName = Field(description="With or without its namespace.")


class AllowedTools(RequestModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseToolChoice], Field(fail_fast=True, min_length=1, max_length=MOST_TOOLS)]


ChoiceObject = Annotated[
    Annotated[ResponseToolChoice, Tag("function object")] | Annotated[AllowedTools, Tag("allowed_tools object")],
    by_kind(alike={"custom": "function"}),
    known_kinds(("function", "custom", "allowed_tools"), _NO_HOSTED_TOOL, expected=CHOICES),
]


class PlainFormat(RequestModel):
    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    type: Literal["json_object"]


class SchemaFormat(TypedDict):  # a pydantic model cannot have a field `schema`
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    type: Literal["json_schema"]
    name: Annotated[Text, Field(max_length=128)]
    description: NotRequired[Text | None]
    schema: JsonObject
    strict: NotRequired[
        Annotated[bool | None, Field(description="false: what of the schema cannot be enforced is ignored.")]
    ]


Format = Annotated[
    Annotated[PlainFormat, Tag("text object")]
    | Annotated[JsonObjectFormat, Tag("json_object object")]
    | Annotated[SchemaFormat, Tag("json_schema object")],
    by_kind(),
    known_kinds(("text", "json_object", "json_schema")),
]


class TextFields(RequestModel):
    format: Format | None = None
    verbosity: Annotated[Text | None, Field(description="A hint: accepted, without effect.")] = None

    def structure(self) -> Structure | None:
        if isinstance(self.format, dict):
            return Structure("json_schema", as_json(lenient_unless_strict(self.format)), "text.format.schema")
        return Structure("json", "", "text.format") if isinstance(self.format, JsonObjectFormat) else None


class ReasoningFields(RequestModel):
    hints = frozenset({"context", "generate_summary", "summary"})
    unsupported: ClassVar[Unsupported] = {"mode": ("standard",)}

    effort: Annotated[Text, Field(max_length=32)] | None = Field(
        None, description="Given to the chat template as reasoning_effort."
    )


class ResponseStreamOptions(RequestModel):
    hints = frozenset({"include_obfuscation"})


class PromptCacheOptions(RequestModel):
    hints = frozenset({"comparison_response_id", "mode", "ttl"})
    unsupported: ClassVar[Unsupported] = {"prewarm": (False,)}  # with true, nothing is generated


Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
_LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(SamplingFields):
    model_config = ConfigDict(
        json_schema_extra={"example": {"input": "What is the capital of France?", "max_output_tokens": 64}}
    )
    hints = frozenset({
        "access_programs", "client_metadata", "image", "max_tool_calls", "prompt_cache_key", "prompt_cache_retention",
        "service_tier",
    })  # fmt: skip
    unsupported: ClassVar[Unsupported] = {
        **dict.fromkeys((
            "conversation", "moderation", "personality", "prompt", "max_tokens", "max_completion_tokens",
        ), ()),
        "background": (False,), "context_management": ([],), "truncation": ("disabled",),
    }  # fmt: skip
    instead: ClassVar[Mapping[str, str]] = dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens")

    model: ModelName | None = Field(None, description="A name from GET /v1/models. Default: the one served.")
    input: Annotated[Words | Items, MustBe("a string or a list of items, at least one")] = Field(
        description="A text, or items: messages, function calls and their outputs, reasoning."
    )
    instructions: Text | None = Field(None, description="The system message; not kept with the response.")
    previous_response_id: Annotated[Text, Field(max_length=256)] | None = Field(
        None, description="Continue from this response, which must still be stored."
    )
    store: bool | None = Field(None, description="Keep the response for a while (section responses). Default true.")
    tools: Annotated[list[ToolOfResponse], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = Field(
        None, description="Functions, custom tools and namespaces of them; tools that only OpenAI has are left out."
    )
    tool_choice: Literal["auto", "none", "required"] | ChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    text: TextFields | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = Field(
        None, description="Maximum number of tokens to generate. Default: as many as fit the context."
    )
    include: Annotated[list[Includable], Field(fail_fast=True, max_length=64)] | None = Field(
        None, description=f"`{_LOGPROBS}` is honoured; the others have no effect."
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        None, description="Log probabilities of this many of the likeliest tokens."
    )
    reasoning: ReasoningFields | None = None
    metadata: (
        Annotated[
            dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = Field(None, description="Returned with the response.")
    stream: bool | None = Field(None, description="Stream the answer as server-sent events.")
    stream_options: ResponseStreamOptions | None = None
    return_progress: bool | None = RETURN_PROGRESS
    user: UserName | None = Field(None, description=END_USER)
    safety_identifier: UserName | None = Field(None, description="The new name of user.")
    prompt_cache_options: PromptCacheOptions | None = None

    def contradictions(self) -> Iterator[PydanticCustomError]:
        yield from super().contradictions()
        yield from raised_by(self._check_tools)
        _ = self.echo  # here, because bodies are validated where that does not block others
        if self.input == "":
            yield refusal("input", "is empty")

    def _check_tools(self) -> None:
        if self.tool_choice == "required" and not self.tool_names.tools:
            raise refusal("tool_choice", "is only allowed together with tools")
        for tool in self._chosen:
            if self.tool_names.find(tool.name) is None:
                raise refusal("tool_choice", f"names {shorten(repr(tool.name))}, which is not among the tools")
        _ = self.chat_tools

    @property
    def _chosen(self) -> list[ResponseToolChoice]:
        if isinstance(self.tool_choice, AllowedTools):
            return self.tool_choice.tools
        return [self.tool_choice] if isinstance(self.tool_choice, ResponseToolChoice) else []

    @cached_property
    def tool_names(self) -> ToolNames:
        return ToolNames(self.tools or ())

    @cached_property
    def chat_tools(self) -> list[Tool]:
        tools = self.tool_names.tools
        if not isinstance(self.tool_choice, AllowedTools):
            return [*tools.values()]
        allowed = {self.tool_names.find(tool.name) for tool in self._chosen}
        return [tool for name, tool in tools.items() if name in allowed]

    @cached_property
    def echo(self) -> str:
        """The members of a JSON object that the response repeats of its request."""
        given = self.model_dump(mode="json", by_alias=True, include={"tools", "tool_choice", "text", "reasoning"})
        echoed = {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": self.reasoning and self.reasoning.effort, "summary": None},
            "service_tier": "default",
            "temperature": self.temperature,
            "text": given["text"] or {"format": {"type": "text"}},
            "tool_choice": given["tool_choice"] or "auto",
            "tools": [tool for tool in given["tools"] or [] if tool["type"] not in HOSTED],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }
        return as_json(echoed)[1:-1]

    def _of_this_api(self) -> Structure | None:
        return None if self.text is None else self.text.structure()

    @property
    def end_user(self) -> str | None:
        return self.user or self.safety_identifier

    @property
    def logprobs(self) -> int | None:
        """How many alternatives; None: no log probabilities."""
        return (self.top_logprobs or 0) if self.top_logprobs or _LOGPROBS in (self.include or ()) else None

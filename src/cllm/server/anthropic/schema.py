"""Requests of Anthropic's API. Parameters that are not supported are listed, and refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field, Tag, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from cllm.dialect.tools import Tool
from cllm.server.anthropic.messages import Conversation
from cllm.server.http.response import as_json
from cllm.server.schema.messages import CacheControl
from cllm.server.schema.sampling import SamplingFields, StopStrings
from cllm.server.schema.tools import (
    MOST_TOOLS,
    CallId,
    JsonObject,
    ToolName,
    by_kind,
    check_names,
    check_schema,
    known_kinds,
)
from cllm.server.schema.validation import (
    END_USER,
    WHOLE,
    AtMost,
    Int32,
    ModelName,
    MustBe,
    RequestModel,
    Text,
    Unsupported,
    raised_by,
    refusal,
    shorten,
    wrong,
)
from cllm.structured.structure import Structure

_MARK = "Keep everything up to here in the KV cache for a while."
_TEXT_OR_BLOCKS = MustBe("a string or a list of content blocks")
_NO_TEXT = "; this server supports no images, documents or other kinds of content"
_NO_SERVER_TOOL = "; this server has no tools of its own: send a tool with a name, a description and an input_schema"


class TextBlock(RequestModel):
    hints = frozenset({"citations"})

    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = Field(None, description=_MARK)


TextOnly = Annotated[TextBlock, known_kinds(("text",), _NO_TEXT)]
TextBlocks = Annotated[list[TextOnly], Field(fail_fast=True)]
TextOrBlocks = Annotated[Text | TextBlocks, _TEXT_OR_BLOCKS]


class ToolUseBlock(RequestModel):
    hints = frozenset({"caller", "toolset_name"})

    type: Literal["tool_use"]
    id: CallId
    name: CallId
    input: JsonObject
    cache_control: CacheControl | None = Field(None, description=_MARK)


class ToolResultBlock(RequestModel):
    hints = frozenset({"toolset_name"})

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: TextOrBlocks | None = None
    is_error: bool | None = Field(None, description="Tells the model that this is an error.")
    cache_control: CacheControl | None = Field(None, description=_MARK)


class ThinkingBlock(RequestModel):
    """Given to the chat template as reasoning, whichever model it came from."""

    hints = frozenset({"signature"})

    type: Literal["thinking"]
    thinking: Text


class RedactedThinkingBlock(RequestModel):
    """Accepted and left out: it is encrypted."""

    type: Literal["redacted_thinking"]
    data: Text


Block = Annotated[
    Annotated[TextBlock, Tag("text object")]
    | Annotated[ToolUseBlock, Tag("tool_use object")]
    | Annotated[ToolResultBlock, Tag("tool_result object")]
    | Annotated[ThinkingBlock, Tag("thinking object")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking object")],
    by_kind(),
    known_kinds(("text", "tool_use", "tool_result", "thinking", "redacted_thinking"), _NO_TEXT),
]


class Message(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Text | Annotated[list[Block], Field(fail_fast=True)], _TEXT_OR_BLOCKS] = Field(
        description="Text, or blocks of type `text`, `tool_use`, `tool_result`, `thinking` or `redacted_thinking`."
    )


class CustomTool(RequestModel):
    hints = frozenset({"eager_input_streaming"})
    unsupported: ClassVar[Unsupported] = {"defer_loading": (False,), "allowed_callers": (["direct"],)}

    type: Literal["custom"] | None = None
    name: ToolName
    description: Text | None = None
    input_schema: JsonObject
    input_examples: Annotated[list[JsonObject], Field(fail_fast=True)] | None = Field(
        None, description="Shown to the model with the description."
    )
    strict: bool | None = Field(None, description="Calls are guaranteed to fit the schema.")
    cache_control: CacheControl | None = Field(None, description=_MARK)

    def plain(self) -> Tool:
        description = self.description
        if self.input_examples:
            examples = map(as_json, self.input_examples)
            description = "\n".join([description or "", "Examples of input:", *examples]).strip()
        return Tool(self.name, description, self.input_schema or None, bool(self.strict))

    @model_validator(mode="after")
    def _takes_an_object(self) -> CustomTool:
        check_schema(self.input_schema, "input_schema")
        return self


class ToolChoiceFields(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = Field(None, description="With `tool`: which.")
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_a_tool(self) -> ToolChoiceFields:
        if (self.type == "tool") != (self.name is not None):
            reason = "is missing" if self.name is None else "is only allowed together with type = 'tool'"
            raise refusal("name", reason)
        return self


class Thinking(RequestModel):
    hints = frozenset({"block_binding"})

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Int32 | None = Field(None, description="A hint: max_tokens is the limit of both.")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="`omitted`: thinking blocks come without their text."
    )


class JsonFormat(TypedDict):  # a pydantic model cannot have a field `schema`
    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    type: Literal["json_schema"]
    schema: JsonObject


class OutputConfig(RequestModel):
    hints = frozenset({"task_budget"})

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Given to the chat template as reasoning_effort."
    )
    format: JsonFormat | None = Field(None, description="The answer is guaranteed to fit this schema.")


class Metadata(RequestModel):
    user_id: Annotated[Text, Field(max_length=1024)] | None = Field(None, description=END_USER)


def _clears_thinking(kind: str) -> str:
    if not kind.startswith("clear_thinking_"):
        raise wrong(f"is {shorten(repr(kind))}; this server does not edit conversations")
    return kind


class ContextEdit(RequestModel):
    hints = frozenset({"keep"})

    type: Annotated[str, AfterValidator(_clears_thinking), Field(json_schema_extra={"pattern": "^clear_thinking_"})] = (
        Field(description="A hint: which earlier thinking the model sees is up to its chat template.")
    )


class ContextManagement(RequestModel):
    edits: Annotated[list[ContextEdit], Field(fail_fast=True)] | None = None


class MessagesInput(SamplingFields):
    """The fields that make the prompt, for answering and for counting tokens."""

    hints = frozenset({"speed", "user_profile_id", "workspace_id"})

    model: ModelName | None = Field(None, description="A name from GET /v1/models. Default: the one served.")
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1), AtMost("max_messages", "messages")]
    system: TextOrBlocks | None = None
    tools: (
        Annotated[
            list[Annotated[CustomTool, known_kinds(("custom",), _NO_SERVER_TOOL, "custom")]],
            Field(fail_fast=True, max_length=MOST_TOOLS),
        ]
        | None
    ) = None
    tool_choice: ToolChoiceFields | None = None
    thinking: Thinking | None = Field(None, description="Given to the chat template as enable_thinking.")
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(None, description="The old name of output_config.format.")
    context_management: ContextManagement | None = None

    def contradictions(self) -> Iterator[PydanticCustomError]:
        yield from super().contradictions()
        names = [tool.name for tool in self.tools or ()]
        yield from raised_by(lambda: check_names(names, "tools"))
        choice = self.tool_choice
        if choice is not None and choice.name is not None and choice.name not in names:
            yield refusal("tool_choice.name", f"is {shorten(repr(choice.name))}, which is not among the tools")
        if choice is not None and choice.type == "any" and not names:
            yield refusal("tool_choice", "is only allowed together with tools")
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            yield refusal("output_format", "is the old name of output_config.format; send one of them")
        # Here, because bodies are validated where that does not block others.
        yield from raised_by(lambda: (self.conversation, self.chat_tools))

    @cached_property
    def conversation(self) -> Conversation:
        return Conversation.of(self)

    @cached_property
    def chat_tools(self) -> list[Tool]:
        return [tool.plain() for tool in self.tools or ()]

    def _of_this_api(self) -> Structure | None:
        if self.output_format is not None:
            return Structure("json_schema", as_json(self.output_format["schema"]), "output_format.schema")
        if self.output_config is not None and self.output_config.format is not None:
            return Structure("json_schema", as_json(self.output_config.format["schema"]), "output_config.format.schema")
        return None


class CountRequest(MessagesInput):
    model_config = ConfigDict(json_schema_extra={"example": {"messages": [{"role": "user", "content": "Hello"}]}})
    hints = MessagesInput.hints | {"compaction"}
    unsupported: ClassVar[Unsupported] = {"container": (), "mcp_servers": ([],), "thread": ()}


class MessagesRequest(MessagesInput):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {"max_tokens": 64, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        }
    )
    hints = MessagesInput.hints | {"diagnostics", "fallback_credit_token", "inference_geo", "service_tier"}
    unsupported: ClassVar[Unsupported] = {"compaction": (), "container": (), "mcp_servers": ([],), "thread": ()}

    max_tokens: Annotated[int, Field(ge=0, lt=2**31), WHOLE] = Field(
        description="Maximum number of tokens to generate. 0: only cache the prompt."
    )
    stream: bool | None = Field(None, description="Stream the answer as server-sent events.")
    stop_sequences: StopStrings | None = Field(None, description="Stop before any of these strings.")
    metadata: Metadata | None = None
    fallbacks: Annotated[Any, Field(description="A hint: they are for refusals of a policy, and there is none.")] = None

    def contradictions(self) -> Iterator[PydanticCustomError]:
        yield from super().contradictions()
        if self.stop_sequences is not None and self.stop is not None:
            yield refusal("stop", "is another name of stop_sequences; send one of them")
        self.stop = self.stop or self.stop_sequences

"""Messages of OpenAI's chats, and `cache_control`, which asks to keep what comes before it cached."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from cllm.server.schema.tools import Calls, ToolCallIds
from cllm.server.schema.validation import AtMost, MustBe, RequestModel, Text, Unsupported, refusal, shorten, wrong

MOST_MARKS = 4
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_TTL = (
    r"^(([1-9][0-9]{0,3}|[1-7][0-9]{4}|8[0-5][0-9]{3}|86[0-3][0-9]{2}|86400)s"
    r"|([1-9][0-9]{0,2}|1[0-3][0-9]{2}|14[0-3][0-9]|1440)m|([1-9]|1[0-9]|2[0-4])h)$"
)
"""24 hours at most, in each unit."""


def _is_time(text: str) -> str:
    if re.fullmatch(_TTL, text) is None:
        raise wrong(f"must be a duration such as 30s, 5m or 1h, at most 24h, not {shorten(repr(text))}")
    return text


class CacheControl(RequestModel):
    """A hint: keep the marked prefix cached for that time, within the server's limit."""

    type: Literal["ephemeral"]
    ttl: Annotated[str, AfterValidator(_is_time), Field(json_schema_extra={"pattern": _TTL})] | None = Field(
        None, description="How long after the end of the answer: 30s, 5m or 1h, for example; at most 24h. Default 5m."
    )

    @property
    def seconds(self) -> float:
        ttl = self.ttl or "5m"
        return float(int(ttl[:-1]) * _SECONDS[ttl[-1]])


Mark = tuple[list[dict[str, Any]], CacheControl]
"""The messages up to a mark; the last one may be partial."""


class TextPart(RequestModel):
    hints = frozenset({"prompt_cache_breakpoint"})

    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = Field(
        None, description="Keep everything up to here in the KV cache for a while."
    )

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        """Before unknown keys are reported: an image is refused as an image."""
        if isinstance(data, dict) and isinstance(kind := data.get("type", "text"), str) and kind != "text":
            reason = f"must be 'text', not {kind[:40]!r}; this server supports no other parts"
            raise refusal("type", reason, whole=True)
        return data


TextParts = Annotated[list[TextPart], Field(fail_fast=True)]


class ChatMessage(RequestModel):
    hints = frozenset({"provider_specific_fields", "type"})  # litellm's, lm-eval's
    unsupported: ClassVar[Unsupported] = {"function_call": (), "refusal": (), "audio": (), "annotations": ([],)}

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="`developer` is another word for `system`."
    )
    content: Annotated[Text | TextParts, MustBe("a string or a list of text parts")] | None = Field(
        None,
        description="Text, or parts of type `text`, joined by newlines. May be null in messages with tool_calls only.",
    )
    name: Annotated[Text, Field(max_length=256)] | None = Field(
        None, description="The speaker, for chat templates that use it; in tool results: the tool."
    )
    tool_calls: Calls | None = Field(None, description="Tool calls of the assistant.")
    tool_call_id: Annotated[Text, Field(max_length=256)] | None = Field(
        None, description="The call that a message of the role `tool` answers."
    )
    reasoning_content: Text | None = Field(None, description="The assistant's reasoning, for templates that keep it.")
    reasoning: Text | None = Field(None, description="Another name of reasoning_content.")
    cache_control: CacheControl | None = Field(
        None, description="Keep everything up to here in the KV cache for a while."
    )

    @model_validator(mode="after")
    def _fits_its_role(self) -> ChatMessage:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise refusal("content", "is missing")
        for field in ("tool_calls", "reasoning_content", "reasoning"):
            if getattr(self, field) and self.role != "assistant":
                raise refusal(field, "is only allowed in assistant messages")
        if self.role == "tool" and self.tool_call_id is None:
            raise refusal("tool_call_id", "is missing: it names the call that this message answers")
        if self.role != "tool" and self.tool_call_id is not None:
            raise refusal("tool_call_id", "is only allowed in messages of the role 'tool'")
        return self

    def plain(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        role = "system" if self.role == "developer" else self.role
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        plain: dict[str, Any] = {"role": role, "content": text}
        if self.tool_calls:
            plain["tool_calls"] = [call.plain() for call in self.tool_calls]
        if reasoning := self.reasoning_content or self.reasoning:
            plain["reasoning_content"] = reasoning
        if self.name is not None:
            plain["name"] = self.name
        if role == "tool":
            plain["tool_call_id"] = self.tool_call_id
        return plain


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1), AtMost("max_messages", "messages")]


def effort_arguments(effort: str | None) -> dict[str, Any]:
    """What chat templates are told of `reasoning_effort`."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort == "none" else {})}


def check_calls(messages: Sequence[ChatMessage]) -> None:
    ids = ToolCallIds()
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.tool_call_id is not None:
            ids.add_result(message.tool_call_id, f"{where}.tool_call_id")
        ids.start_message()
        for position, call in enumerate(message.tool_calls or ()):
            ids.add_call(call.id, call.function.name, f"{where}.tool_calls[{position}].id")


def count_marks(messages: Sequence[ChatMessage]) -> int:
    """On messages and on their parts."""
    count = 0
    for message in messages:
        count += message.cache_control is not None
        if isinstance(message.content, list):
            count += sum(part.cache_control is not None for part in message.content)
    return count


def marks_in(messages: Sequence[ChatMessage]) -> list[Mark]:
    """The marks on messages and on their parts, in their order."""
    marks: list[Mark] = []
    plain: list[dict[str, Any]] = []
    for message in messages:
        whole = message.plain()
        for number, part in enumerate(message.content if isinstance(message.content, list) else (), 1):
            if part.cache_control is not None:
                assert isinstance(message.content, list)
                beginning = message.model_copy(update={"content": message.content[:number]})
                marks.append(([*plain, beginning.plain()], part.cache_control))
        plain.append(whole)
        if message.cache_control is not None:
            marks.append(([*plain], message.cache_control))
    return marks

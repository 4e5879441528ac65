"""Messages as OpenAI's clients send them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from cllm.server.cache_control import CacheControl
from cllm.server.tools_schema import Calls
from cllm.server.validation import RequestModel, Text, Unsupported, refusal


class TextPart(RequestModel):
    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = Field(None, description="Keep the K/V of all up to here for a while.")

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        """Before the keys are looked at: those of a picture would be called unknown."""
        if isinstance(data, dict) and isinstance(kind := data.get("type", "text"), str) and kind != "text":
            raise refusal("type", f"must be 'text', not {kind[:40]!r}; this server takes no other parts")
        return data


class ChatMessage(RequestModel):
    hints: ClassVar[frozenset[str]] = frozenset({"provider_specific_fields", "type"})  # litellm's, lm-eval's
    unsupported: ClassVar[Unsupported] = {
        "function_call": (),
        "refusal": (),
        "audio": (),
        "annotations": ([],),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="`developer` is another word for `system`."
    )
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = Field(
        None,
        description="Text, or parts of type `text`, joined by newlines. May be null in messages with tool_calls only.",
    )
    name: Annotated[Text, Field(max_length=256)] | None = Field(
        None, description="Who speaks, for chat templates that write it; of results: the tool."
    )
    tool_calls: Calls | None = Field(None, description="What the assistant called.")
    tool_call_id: Annotated[Text, Field(max_length=256)] | None = Field(
        None, description="Which call a message of the role `tool` is the result of."
    )
    reasoning_content: Text | None = Field(None, description="The assistant's reasoning, for templates that keep it.")
    reasoning: Text | None = Field(None, description="Another name of reasoning_content.")
    cache_control: CacheControl | None = Field(None, description="Keep the K/V of all up to here for a while.")

    @model_validator(mode="after")
    def _fits_its_role(self) -> ChatMessage:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise refusal("content", "is missing")
        for field in ("tool_calls", "reasoning_content", "reasoning"):
            if getattr(self, field) and self.role != "assistant":
                raise refusal(field, "is only allowed in messages of the assistant")
        if self.role == "tool" and self.tool_call_id is None:
            raise refusal("tool_call_id", "is missing: which call is this the result of?")
        if self.role != "tool" and self.tool_call_id is not None:
            raise refusal("tool_call_id", "is only allowed in messages of the role 'tool'")
        return self

    def plain(self) -> dict[str, Any]:
        """The message in the form that chat templates know."""
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


def check_calls(messages: Sequence[ChatMessage]) -> None:
    """No two calls of a message have one id, and none has two results."""
    answered: set[str] = set()
    for number, message in enumerate(messages):
        if message.role != "tool":
            answered.clear()
        elif message.tool_call_id is not None:
            if message.tool_call_id in answered:
                raise refusal(
                    f"messages[{number}].tool_call_id", f"is {message.tool_call_id!r}, which has a result already"
                )
            answered.add(message.tool_call_id)
        ids: set[str] = set()
        for position, call in enumerate(message.tool_calls or ()):
            if call.id in ids:
                raise refusal(
                    f"messages[{number}].tool_calls[{position}].id", f"is {call.id!r}, which another call has"
                )
            ids.add(call.id)

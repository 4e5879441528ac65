"""How tools are shown to one model, and how its answers are read: chosen from its chat template."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from cllm.dialect import formats, reasoning
from cllm.dialect.grammar import AnswerForm, AnswerGrammar
from cllm.dialect.reader import AnswerReader
from cllm.dialect.reasoning import Marks, ReasoningReader, Thinking
from cllm.dialect.tools import Tool
from cllm.text.chat_template import ChatTemplate, PromptOptions
from cllm.text.messages import Message, read_messages
from cllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from cllm.config.schema import ChatConfig

_ALPHABET = string.ascii_letters + string.digits
_MISTRAL_ID = 9
"""Length of the ids that Mistral's templates require."""
_TAIL = 16
"""Tokens at the end of a prompt that may open the reasoning."""


class Dialect:
    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        *,
        tool_format: str = "auto",
        reasoning_format: str = "auto",
        reasoning_mode: str = "auto",
    ) -> None:
        spoken = formats.detect_format(template.source)
        self.format = formats.FORMATS[tool_format] if tool_format != "auto" else spoken or formats.JSON
        self._template = template
        self._tokenizer = tokenizer
        self._native = spoken is self.format and "tools" in template.variables
        """Whether the template itself shows tools to the model, in this format."""
        found = reasoning.detect_format(template.source) if reasoning_format == "auto" else reasoning_format
        self.marks: Marks | None = reasoning.FORMATS[found] if found else None
        if reasoning_mode == "on" and self.marks is None:
            self.marks = reasoning.FORMATS["think"]
        self.separates = reasoning_mode != "off"
        """Whether reasoning is separated if a request does not say."""

    # -- prompts -----------------------------------------------------------------------------------------------

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], options: PromptOptions
    ) -> tuple[Sequence[Mapping[str, Any]], PromptOptions]:
        """Messages and options as the template takes them."""
        if not options.tools and not any(_is_of_tools(message) for message in messages):
            return messages, options
        read = _with_names(read_messages(messages))
        if self._native:
            return self._for_template(read), options
        flat = _flatten(read, self.format)
        return self._describe(flat, options.tools) if options.tools else flat, replace(options, tools=())

    def _for_template(self, messages: list[Message]) -> list[Message]:
        if self.format is not formats.MISTRAL:
            return messages
        prepared = []
        for message in messages:
            if "tool_call_id" in message:
                message = {**message, "tool_call_id": _nine(message["tool_call_id"])}
            if "tool_calls" in message:
                calls = [{**call, "id": _nine(call.get("id", ""))} for call in message["tool_calls"]]
                message = {**message, "tool_calls": calls}
            prepared.append(message)
        return prepared

    def _describe(self, messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Put the tools into the system message, for templates without tools."""
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        form = self.format.write([{"name": "the tool's name", "arguments": {"an argument's name": "its value"}}])
        description = f"You can call these tools:\n{listed}\n\nTo call a tool, answer with nothing but:\n{form}"
        first = messages[0]
        if first["role"] in ("system", "developer"):
            return [{**first, "content": f"{first['content']}\n\n{description}"}, *messages[1:]]
        if self._template.takes_system:
            return [{"role": "system", "content": description}, *messages]
        return [{**first, "content": f"{description}\n\n{first['content']}"}, *messages[1:]]

    # -- answers -----------------------------------------------------------------------------------------------

    def shown(self, *, tools: bool, reasoning: bool) -> Mapping[int, bytes]:
        """Special tokens that are text in answers: the markers of calls and of reasoning."""
        names = [*(self.format.markers if tools else ()), *(self.marks or () if reasoning else ())]
        special = self._tokenizer.special_tokens
        return {special[name]: name.encode() for name in names if name in special}

    def thinking_after(self, prompt: Sequence[int], continued: str | None) -> Thinking:
        """Whether the prompt, or the message that the answer continues, has opened or closed the reasoning."""
        if self.marks is None:
            return "none"
        begin, end = self.marks
        if continued is not None:
            last, ended = continued.rfind(begin), continued.rfind(end)
            return "opened" if last > ended else "closed" if ended >= 0 or continued.strip() else "none"
        tail = self._tokenizer.decode(prompt[-_TAIL:], skip_special=False).rstrip()
        return "opened" if tail.endswith(begin) else "closed" if tail.endswith(end) else "none"

    def reader(
        self,
        index: int,
        *,
        tools: Sequence[Tool],
        thinking: Thinking,
        separate: bool,
        most_calls: int | None = None,
        calls_only: bool = False,
        include_reasoning: bool = True,
    ) -> AnswerReader:
        thoughts = None
        if self.marks is not None and thinking != "closed":
            thoughts = ReasoningReader(self.marks, opened=thinking == "opened", separate=separate)
        return AnswerReader(
            index,
            reasoning=thoughts,
            syntax=self.format.syntax,
            tools={tool.name: tool.parameters for tool in tools},
            most_calls=most_calls,
            calls_only=calls_only,
            include_reasoning=include_reasoning,
            new_id=self.new_id,
        )

    def grammar(self, form: AnswerForm) -> str:
        """The grammar that a mask enforces, so that answers are read as this form."""
        named = "[ARGS]" in self._template.source
        grammar = AnswerGrammar(self.format.name, self._tokenizer.special_tokens, named_arguments=named)
        return grammar.write(form)

    def new_id(self) -> str:
        if self.format is formats.MISTRAL:
            return "".join(secrets.choice(_ALPHABET) for _ in range(_MISTRAL_ID))
        return f"call_{secrets.token_hex(12)}"


def dialect_of(template: ChatTemplate, tokenizer: Tokenizer, settings: ChatConfig) -> Dialect:
    return Dialect(
        template,
        tokenizer,
        tool_format=settings.tool_format,
        reasoning_format=settings.reasoning_format,
        reasoning_mode=settings.reasoning,
    )


def _is_of_tools(message: Mapping[str, Any]) -> bool:
    """Invalid messages are reported elsewhere."""
    return isinstance(message, Mapping) and (message.get("role") == "tool" or bool(message.get("tool_calls")))


def _with_names(messages: list[Message]) -> list[Message]:
    """Tool results with the names of their tools, which some templates need."""
    names = {call.get("id"): call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    return [
        {**message, "name": names[message["tool_call_id"]]}
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names
        else message
        for message in messages
    ]


def _flatten(messages: list[Message], form: formats.ToolFormat) -> list[Message]:
    """Calls and results as assistant and user text, for templates without tools."""
    flat: list[Message] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            name = f" of {message['name']}" if "name" in message else ""
            text = f"Result{name}:\n{message['content']}"
            if after_result:
                flat[-1] = {"role": "user", "content": f"{flat[-1]['content']}\n\n{text}"}
            else:
                flat.append({"role": "user", "content": text})
        elif "tool_calls" in message:
            written = form.write([call["function"] for call in message["tool_calls"]])
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            flat.append({**kept, "content": "\n".join(filter(None, (message["content"], written)))})
        else:
            flat.append(message)
        after_result = is_result
    return flat


def _nine(call_id: str) -> str:
    """An id as Mistral's templates require it: unchanged, or derived."""
    if len(call_id) == _MISTRAL_ID and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(blake2b(call_id.encode(), digest_size=8).digest(), "big")
    return "".join(_ALPHABET[number // len(_ALPHABET) ** place % len(_ALPHABET)] for place in range(_MISTRAL_ID))

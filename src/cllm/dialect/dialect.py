"""How tools are shown to one model, and how its answers are read: chosen from its chat template."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import groupby
from typing import TYPE_CHECKING, Any

from cllm.dialect import formats, reasoning
from cllm.dialect.call_runs import CallRuns
from cllm.dialect.deltas import ToolCallDelta
from cllm.dialect.formats import ToolFormat
from cllm.dialect.grammar import AnswerForm, AnswerGrammar
from cllm.dialect.reader import AnswerReader
from cllm.dialect.reasoning import Marks, ReasoningReader, Thinking
from cllm.dialect.tools import Tool
from cllm.dialect.whole_calls import WholeCalls
from cllm.text.chat_template import PromptOptions
from cllm.text.messages import Message, read_messages
from cllm.text.template_facts import EXAMPLE_ARGUMENTS, EXAMPLE_TOOL, TemplateFacts
from cllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from cllm.config.schema import ChatConfig

ALPHABET = string.ascii_letters + string.digits
MISTRAL_ID = 9
"""Length of the ids that Mistral's templates require."""


def is_of_tools(message: Mapping[str, Any]) -> bool:
    """Invalid messages are reported elsewhere."""
    return isinstance(message, Mapping) and (message.get("role") == "tool" or bool(message.get("tool_calls")))


def with_names(messages: list[Message]) -> list[Message]:
    """Tool results with the names of their tools, which some templates need."""
    calls = (call for message in messages for call in message.get("tool_calls", ()))
    names = {call["id"]: call["function"]["name"] for call in calls if "id" in call}
    return [
        {**message, "name": names[message["tool_call_id"]]}
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names
        else message
        for message in messages
    ]


def with_short_ids(messages: list[Message]) -> list[Message]:
    """Ids as Mistral's templates require them."""
    prepared = []
    for message in messages:
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": _nine(message["tool_call_id"])}
        if "tool_calls" in message:
            calls = [{**call, "id": _nine(call.get("id", ""))} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        prepared.append(message)
    return prepared


def one_by_one(messages: list[Message]) -> list[Message]:
    """Several calls of one message as several messages, each followed by its result, for templates that take no more
    than one call per message."""
    split: list[Message] = []
    waiting: list[Message] = []
    """Calls whose turn has not come."""
    for message in messages:
        if message["role"] == "tool":
            ids = (each["tool_calls"][0].get("id") for each in waiting)
            place = next((place for place, each in enumerate(ids) if each == message.get("tool_call_id")), None)
            split += [message] if place is None else [waiting.pop(place), message]
            continue
        split += waiting
        first, *others = message.get("tool_calls", [None])
        waiting = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in others]
        if others:
            waiting.insert(0, {**message, "tool_calls": [first]})
        else:
            split.append(message)
    return split + waiting


def flatten(messages: list[Message], form: ToolFormat) -> list[Message]:
    """Calls and results as assistant and user text, for templates without tools."""
    flat: list[Message] = []
    for are_results, group in groupby(messages, lambda message: message["role"] == "tool"):
        if are_results:
            flat.append({"role": "user", "content": "\n\n".join(map(_result, group))})
        else:
            flat += [_without_calls(message, form) for message in group]
    return flat


def _result(message: Message) -> str:
    name = f" of {message['name']}" if "name" in message else ""
    return f"Result{name}:\n{message['content']}"


def _without_calls(message: Message, form: ToolFormat) -> Message:
    if "tool_calls" not in message:
        return message
    written = form.write([call["function"] for call in message["tool_calls"]])
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, (message["content"], written)))}


def _nine(call_id: str) -> str:
    """An id as Mistral's templates require it: unchanged, or derived."""
    if len(call_id) == MISTRAL_ID and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(blake2b(call_id.encode(), digest_size=8).digest(), "big")
    return "".join(ALPHABET[number // len(ALPHABET) ** place % len(ALPHABET)] for place in range(MISTRAL_ID))


_TAIL = 16
"""Tokens at the end of a prompt that may open the reasoning."""

_TOOLS = ("tools", "functions")
"""Variables from which templates show tools."""
_EXAMPLE: str = EXAMPLE_TOOL["function"]["name"]


class Dialect:
    def __init__(self, template: TemplateFacts, tokenizer: Tokenizer, settings: ChatConfig) -> None:
        spoken = formats.detect_format(template.source)
        written = template.example_call if spoken is not None else None
        self._writes_calls = written is None or _EXAMPLE in written
        """Whether the template writes earlier calls."""
        if spoken is not None and written is not None and self._writes_calls and not _reads(spoken, written):
            spoken = None  # it has the same markers, but another format
        self.format = spoken or formats.JSON
        if settings.tool_format != "auto":
            self.format = formats.FORMATS[settings.tool_format]
        self._template = template
        self._tokenizer = tokenizer
        self._native = spoken is self.format and not template.variables.isdisjoint(_TOOLS)
        """Whether the template itself shows tools to the model, in this format."""
        given = settings.reasoning_format
        found = reasoning.detect_format(template.source) if given == "auto" else given
        if found is None and settings.reasoning == "on":
            found = "think"
        self.marks: Marks | None = reasoning.FORMATS[found] if found else None
        self.separates = settings.reasoning != "off"
        """Whether reasoning is separated if a request does not say."""

    # -- prompts -----------------------------------------------------------------------------------------------

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], options: PromptOptions
    ) -> tuple[Sequence[Mapping[str, Any]], PromptOptions]:
        """Messages and options as the template takes them."""
        if not options.tools and not any(is_of_tools(message) for message in messages):
            return messages, options
        read = with_names(read_messages(messages))
        if self._native:
            return self._for_template(read) if self._writes_calls else flatten(read, self.format), options
        flat = flatten(read, self.format)
        return self._describe(flat, options.tools) if options.tools else flat, replace(options, tools=())

    def _for_template(self, messages: list[Message]) -> list[Message]:
        if any(len(message.get("tool_calls", ())) > 1 for message in messages) and not self._template.takes_calls:
            messages = one_by_one(messages)
        return with_short_ids(messages) if self.format is formats.MISTRAL else messages

    def _describe(self, messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Put the tools into the system message, for templates without tools."""
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        form = self.format.write([_example_call(tools[0]["function"])])
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
        continues: bool = False,
        most_calls: int | None = None,
        calls_only: bool = False,
        masked: bool = False,
        include_reasoning: bool = True,
    ) -> AnswerReader:
        """`masked`: a grammar says where calls may be, and what they look like."""
        parameters, syntax = {tool.name: tool.parameters for tool in tools}, self.format.syntax
        thoughts = whole = None
        if self.marks is not None and thinking != "closed":
            marks = self.format.call_marks
            thoughts = ReasoningReader(
                self.marks,
                opened=thinking == "opened",
                continues=continues and thinking == "opened",
                separate=separate,
                calls=CallRuns(marks, syntax, parameters) if marks is not None and tools else None,
            )
        if tools and not (masked or continues or syntax.bare):
            whole = WholeCalls(AnswerReader(index, syntax=formats.JSON.syntax, tools=parameters, new_id=self.new_id))
        return AnswerReader(
            index,
            reasoning=thoughts,
            syntax=syntax,
            tools=parameters,
            most_calls=most_calls,
            calls_only=calls_only,
            whole=whole,
            include_reasoning=include_reasoning,
            new_id=self.new_id,
        )

    def grammar(self, form: AnswerForm) -> str:
        """The grammar that a mask enforces, so that answers are read as this form."""
        if form.several and self._native and not self._template.takes_calls:
            form = replace(form, several=False)
        marks = [mark for mark in ("[CALL_ID]", "[ARGS]") if mark in self._template.source]
        named = {**self._tokenizer.whole_tokens, **self._tokenizer.special_tokens}
        return AnswerGrammar(self.format.name, named, marks).write(form)

    def new_id(self) -> str:
        if self.format is formats.MISTRAL:
            return "".join(secrets.choice(ALPHABET) for _ in range(MISTRAL_ID))
        return f"call_{secrets.token_hex(12)}"


def _example_call(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A call of a real tool: small models repeat what they see."""
    properties = tool["parameters"].get("properties")
    names = list(properties) if isinstance(properties, Mapping) else []
    required = tool["parameters"].get("required")
    needed = [name for name in names if isinstance(required, Sequence) and name in required] or names[:1]
    return {"name": tool["name"], "arguments": dict.fromkeys(needed, "...")}


def _reads(form: ToolFormat, written: str) -> bool:
    reader = AnswerReader(0, syntax=form.syntax, tools={_EXAMPLE: EXAMPLE_TOOL["function"]["parameters"]})
    pieces = reader.push(written)
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, ToolCallDelta))
    try:
        return bool(json.loads(arguments) == EXAMPLE_ARGUMENTS)
    except ValueError:  # none, several, or cut off
        return False

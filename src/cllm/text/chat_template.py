"""Turns chat messages into a prompt with the model's own chat template, which runs in a sandbox.

The template's special tokens become special tokens; what users write never does. Content that contains the name of a
special token is passed to the template with a mark before that name: a private-use character that occurs nowhere else.
Wherever the mark comes out again, the character after it is kept out of special tokens. The template sees, trims and
cuts the real content, and the rest is tokenised in one piece. special_token_guard.py does the same for tools and the
arguments of calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateSyntaxError

from cllm.errors import InvalidRequestError, ModelError
from cllm.text.adapting import alternating, as_object, as_text, with_descriptions
from cllm.text.messages import Message, read_messages
from cllm.text.sandbox import environment
from cllm.text.special_token_guard import guard_for, insert_marks, map_strings, remove_marks, unused_character
from cllm.text.template_facts import EXAMPLE_ARGUMENTS, EXAMPLE_TOOL, TemplateFacts
from cllm.text.template_variables import TemplateVariables

if TYPE_CHECKING:
    from cllm.text.tokenizer import Tokenizer, TokenLimit

_OURS = frozenset({
    "messages", "tools", "bos_token", "eos_token", "add_generation_prompt", "continue_final_message",
})  # fmt: skip
"""Set by the server, so that chat_template_kwargs must not contain them."""
_USER = {"role": "user", "content": "x"}


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """How to render the prompt, besides the messages."""

    tools: Sequence[Mapping[str, Any]] = ()
    """As `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """chat_template_kwargs, such as enable_thinking."""
    asks: bool = True
    """Whether the prompt ends with the generation prompt; otherwise more messages may follow."""
    continues: bool = False
    """Whether the answer continues the last message, which is the assistant's."""


PLAIN = PromptOptions()


class ChatTemplate:
    def __init__(self, source: str, *, bos: str, eos: str) -> None:
        """`bos` and `eos`: the names of those tokens, or empty strings, for templates that use them."""
        try:
            self._template = environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template has an error in line {error.lineno} ({error.message}); set another one with "
                "model.chat_template"
            ) from error
        except Exception as error:  # a template is a program: compiling it can raise anything
            raise ModelError(
                f"the chat template cannot be compiled ({type(error).__name__}: {error}); set another one with "
                "model.chat_template"
            ) from error
        self.source = source
        self.bos = bos
        self.eos = eos

    @classmethod
    def of(cls, template: tuple[str, str, str]) -> ChatTemplate:
        """From a `TemplateSource`."""
        source, bos, eos = template
        return cls(source, bos=bos, eos=eos)

    @cached_property
    def facts(self) -> TemplateFacts:
        return TemplateFacts(
            source=self.source,
            variables=self.variables.read,
            takes_system=self.takes_system,
            takes_calls=self.takes_calls,
            example_call=self.write_call(EXAMPLE_TOOL, dict(EXAMPLE_ARGUMENTS)),
        )

    @cached_property
    def variables(self) -> TemplateVariables:
        return TemplateVariables(self.source)

    @cached_property
    def takes_system(self) -> bool:
        """Whether a conversation may begin with a system message."""
        return self._accepts([{"role": "system", "content": "x"}, _USER])

    @cached_property
    def takes_calls(self) -> bool:
        """Whether a message may have several calls."""
        calls = [_call(self._sample_arguments, "call00001"), _call(self._sample_arguments, "call00002")]
        return self._accepts([_USER, _assistant(*calls)])

    @cached_property
    def wants_arguments_as_text(self) -> bool:
        """Whether the template expects the arguments of calls as a JSON string instead of an object."""
        try:
            return "{'a': 'b'}" in self._render([_USER, _assistant(_call({"a": "b"}))], PLAIN)
        except InvalidRequestError:
            return self.takes_arguments_as_text

    @cached_property
    def takes_arguments_as_text(self) -> bool:
        return self._accepts([_USER, _assistant(_call('{"a": "b"}'))])

    def write_call(self, tool: Mapping[str, Any], arguments: dict[str, Any]) -> str | None:
        """What the template writes for a message that calls this tool, or all of it; None: it takes no calls."""
        given = json.dumps(arguments) if self.wants_arguments_as_text else arguments
        call = _call(given, name=tool["function"]["name"])
        try:
            before = self._render([_USER], PromptOptions([tool]))
            after = self._render([_USER, _assistant(call)], PromptOptions([tool], asks=False))
        except InvalidRequestError:
            return None
        return after.removeprefix(before)

    @property
    def _sample_arguments(self) -> Any:
        return '{"a": "b"}' if self.wants_arguments_as_text else {"a": "b"}

    def _accepts(self, messages: list[Message]) -> bool:
        try:
            self._render(messages, PLAIN)
        except InvalidRequestError:
            return False
        return True

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        return self._render(read_messages(messages), PromptOptions(asks=add_generation_prompt))

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        limit: TokenLimit | None = None,
        options: PromptOptions = PLAIN,
    ) -> list[int]:
        """The prompt as tokens; one that is longer than `limit` is refused."""
        text, literal = self.compose(frozenset(tokenizer.special_tokens), messages, options)
        return encode_composed(tokenizer, self.bos, text, literal, limit)

    def compose(
        self, special: frozenset[str], messages: Sequence[Mapping[str, Any]], options: PromptOptions = PLAIN
    ) -> tuple[str, list[int]]:
        """The prompt, and the positions in it that must not become special tokens, whose names are `special`.

        What the template rejects is adapted: roles, and tools without descriptions."""
        read = self._with_arguments(read_messages(messages))
        try:
            return self._compose(special, read, options)
        except TemplateRejectionError as error:
            described = replace(options, tools=[*map(with_descriptions, options.tools)])
            adapted = alternating(read, system=self.takes_system)
            with suppress(TemplateRejectionError):
                return self._compose(special, read, described)
            with suppress(TemplateRejectionError):
                return self._compose(special, adapted, described)
            raise error

    def _with_arguments(self, messages: list[Message]) -> list[Message]:
        """The arguments of calls in the form that the template expects."""
        if not any("tool_calls" in message for message in messages):
            return messages
        if self.wants_arguments_as_text:
            written = as_text
        elif not self.takes_arguments_as_text:
            written = as_object
        else:
            return messages
        return [
            {**message, "tool_calls": [written(call) for call in message["tool_calls"]]}
            if "tool_calls" in message
            else message
            for message in messages
        ]

    def _compose(
        self, special: frozenset[str], messages: list[Message], options: PromptOptions
    ) -> tuple[str, list[int]]:
        _check_options(messages, options)
        guard = guard_for(special)
        written = _user_texts(messages, options)
        risky = {text: spots for text in written if (spots := guard.find(text))}
        if options.continues:
            end = unused_character([self.source, self.bos, self.eos, *written], "messages")
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + end}]
            written.add(end)
            last = messages[-1]["content"]
            if spots := guard.find(last[:-1]):
                risky[last] = spots
        literal: list[int] = []
        if not risky:
            text = self._render(messages, options)
        else:
            mark = unused_character([self.source, self.bos, self.eos, *written], "messages")
            marked = {text: insert_marks(text, spots, mark) for text, spots in risky.items()}
            changed = _map_texts(messages, options, lambda text: marked.get(text, text))
            text, literal = remove_marks(self._render(*changed), mark)
        if not options.continues:
            return text, literal
        length = text.rfind(end)
        if length < 0:
            raise InvalidRequestError(
                "the last message cannot be continued: the model's chat template changes it", "messages"
            )
        return text[:length], [position for position in literal if position < length]

    @cached_property
    def _no_tools(self) -> list[Any] | None:
        """What the template takes where there are no tools: most want None, some a list."""
        try:
            self._fill([_USER], PLAIN, None)
        except TemplateRejectionError:
            with suppress(TemplateRejectionError):
                self._fill([_USER], PLAIN, [])
                return []
        return None

    def _render(self, messages: list[Message], options: PromptOptions) -> str:
        return self._fill(messages, options, options.tools or self._no_tools)

    def _fill(self, messages: list[Message], options: PromptOptions, tools: Sequence[Any] | None) -> str:
        try:
            return self._template.render(
                {**self.variables.values(tools), **options.arguments, "tools": tools},
                messages=messages,
                add_generation_prompt=options.asks and not options.continues,
                bos_token=self.bos,
                eos_token=self.eos,
            )
        except MemoryError:
            raise
        except Exception as error:  # a template is a program: it can raise anything
            if name := self.variables.missing(error):
                raise TemplateRejectionError(
                    f"the model's chat template reads {name}, which nobody gives it; send it in chat_template_kwargs, "
                    "or set another template with model.chat_template"
                ) from error
            raise TemplateRejectionError(f"the model's chat template rejected the messages: {error}") from error


def encode_composed(
    tokenizer: Tokenizer, bos: str, text: str, literal: Sequence[int], limit: TokenLimit | None = None
) -> list[int]:
    """The tokens of what `ChatTemplate.compose` made."""
    has_bos = bool(bos) and text.startswith(bos) and literal[:1] != [0]
    if limit is not None:
        limit.check_text(tokenizer, text, "messages", special=True)
    ids = tokenizer.encode(text, special=True, add_bos=not has_bos, literal=literal)
    if limit is not None:
        limit.check(ids, "messages")
    return ids


class TemplateRejectionError(InvalidRequestError):
    """The template raised an exception."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "messages")


def _assistant(*calls: Message) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": [*calls]}


def _call(arguments: Any, call_id: str = "call00001", name: str = "f") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _check_options(messages: list[Message], options: PromptOptions) -> None:
    if given := sorted(_OURS & set(options.arguments)):
        raise InvalidRequestError(
            f"chat_template_kwargs.{given[0]} is set by the server; remove it", "chat_template_kwargs"
        )
    if options.continues and (messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]):
        raise InvalidRequestError("only an assistant message without tool calls can be continued", "messages")


def _user_texts(messages: list[Message], options: PromptOptions) -> set[str]:
    found: set[str] = set()

    def note(text: str) -> str:
        found.add(text)
        return text

    _map_texts(messages, options, note)
    return found


def _map_texts(
    messages: list[Message], options: PromptOptions, change: Callable[[str], str]
) -> tuple[list[Message], PromptOptions]:
    """The same with all texts that users wrote changed."""
    changed = [
        {name: value if name == "role" else map_strings(value, change) for name, value in message.items()}
        for message in messages
    ]
    tools = map_strings(options.tools, change)
    arguments = {name: map_strings(value, change, 1) for name, value in options.arguments.items()}
    return changed, PromptOptions(tools, arguments, options.asks, options.continues)

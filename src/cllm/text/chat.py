"""Chat messages to a prompt, by the model's own template in a sandbox.

The template's special tokens become special tokens; what users write never does. Content that holds the name of a
special token is given to the template with a mark, a private-use character found nowhere else, before that name.
Wherever the mark comes out again, the character after it is kept out of special tokens. So the template sees, trims and
cuts the real content, and all other text is tokenised as if it had been written in one piece. `guard` does the same for
tools and the arguments of calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jinja2 import TemplateSyntaxError, meta

from cllm.errors import InvalidRequestError, ModelError
from cllm.models.gguf import GGUFModel
from cllm.text.bounded import TokenLimit
from cllm.text.guard import guard_for, insert, replaced, take_out, texts_in, unused_character
from cllm.text.messages import Message, read_messages
from cllm.text.sandbox import environment
from cllm.text.tokenizer import Tokenizer
from cllm.text.vocab import special_name

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""For models without a template of their own."""

_OURS = frozenset({
    "messages", "tools", "bos_token", "eos_token", "add_generation_prompt", "continue_final_message",
})  # fmt: skip
"""What the request itself says, so that no argument may."""


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What a request says about its prompt beside the messages."""

    tools: Sequence[Mapping[str, Any]] = ()
    """As `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """For the template, such as enable_thinking."""
    asks: bool = True
    """Whether the prompt ends with what makes the model answer; if not, more messages may follow."""
    continues: bool = False
    """Whether the answer goes on with the last message, which is the assistant's."""


PLAIN = PromptOptions()


class ChatTemplate:
    def __init__(self, source: str, *, bos: str, eos: str) -> None:
        """`bos` and `eos` are the names of those tokens, for templates that write them."""
        try:
            self._template = environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template has an error in line {error.lineno} ({error.message}); "
                "give another one with model.chat_template"
            ) from error
        except Exception as error:  # a template is a program: anything can go wrong in compiling it, too
            raise ModelError(
                f"the chat template cannot be compiled ({type(error).__name__}: {error}); "
                "give another one with model.chat_template"
            ) from error
        self._source = source
        self._bos = bos
        self._eos = eos

    @property
    def source(self) -> str:
        return self._source

    @cached_property
    def variables(self) -> frozenset[str]:
        """What the template asks for."""
        return frozenset(meta.find_undeclared_variables(environment().parse(self._source)))

    @cached_property
    def takes_system(self) -> bool:
        """Whether a conversation may begin with a system message."""
        system, user = {"role": "system", "content": "x"}, {"role": "user", "content": "y"}
        try:
            self._render([system, user], PLAIN)
        except InvalidRequestError:
            return False
        return True

    @cached_property
    def wants_arguments_as_text(self) -> bool:
        """Whether it can write the arguments of calls only where they are JSON text already."""
        function = {"name": "f", "arguments": {"a": "b"}}
        calls = [{"id": "call00001", "type": "function", "function": function}]
        messages: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
        try:
            self._render(messages, PLAIN)
        except InvalidRequestError:
            function["arguments"] = '{"a": "b"}'
            try:
                self._render(messages, PLAIN)
            except InvalidRequestError:
                return False
            return True
        return False

    @property
    def bos(self) -> str:
        """The name of that token, or nothing."""
        return self._bos

    @property
    def eos(self) -> str:
        return self._eos

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        return self._render(read_messages(messages), PromptOptions(asks=add_generation_prompt))

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        limit: TokenLimit | None = None,
        options: PromptOptions = PLAIN,
    ) -> list[int]:
        """The prompt that asks for the next answer, as tokens; one that passes `limit` is refused."""
        text, literal = self._compose(tokenizer, self._with_arguments(read_messages(messages)), options)
        has_bos = bool(self._bos) and text.startswith(self._bos) and literal[:1] != [0]
        if limit is not None:
            limit.check_text(tokenizer, text, "messages", special=True)
        ids = tokenizer.encode(text, special=True, add_bos=not has_bos, literal=literal)
        if limit is not None:
            limit.check(ids, "messages")
        return ids

    def _with_arguments(self, messages: list[Message]) -> list[Message]:
        """The arguments of calls in the form that the template can write."""
        if not any("tool_calls" in message for message in messages) or not self.wants_arguments_as_text:
            return messages
        return [
            {**message, "tool_calls": [_as_text(call) for call in message["tool_calls"]]}
            if "tool_calls" in message
            else message
            for message in messages
        ]

    def _compose(self, tokenizer: Tokenizer, messages: list[Message], options: PromptOptions) -> tuple[str, list[int]]:
        """The prompt, and the positions in it that are part of no special token."""
        _check_options(messages, options)
        guard = guard_for(frozenset(tokenizer.special_tokens))
        written = set(_user_texts(messages, options))
        risky = {text: spots for text in written if (spots := guard.find(text))}
        if options.continues:
            end = unused_character([self._source, self._bos, self._eos, *written], "messages")
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + end}]
            written.add(end)
            last = messages[-1]["content"]
            if spots := guard.find(last[:-1]):
                risky[last] = spots
        literal: list[int] = []
        if not risky:
            text = self._render(messages, options)
        else:
            mark = unused_character([self._source, self._bos, self._eos, *written], "messages")
            marked = {text: insert(text, spots, mark) for text, spots in risky.items()}
            text, literal = take_out(self._render(*_replace_texts(messages, options, marked)), mark)
        if not options.continues:
            return text, literal
        length = text.rfind(end)
        if length < 0:
            raise InvalidRequestError(
                "the model's chat template does not write the last message as it is, so that it cannot be continued",
                "messages",
            )
        return text[:length], [position for position in literal if position < length]

    def _render(self, messages: list[Message], options: PromptOptions) -> str:
        try:
            return self._template.render(
                {
                    "tools": None,
                    "documents": None,
                    **options.arguments,
                    **({"tools": options.tools} if options.tools else {}),
                },
                messages=messages,
                add_generation_prompt=options.asks and not options.continues,
                bos_token=self._bos,
                eos_token=self._eos,
            )
        except Exception as error:  # a template is a program: anything can go wrong in it
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error


def load_chat_template(model: GGUFModel, source: str | None = None) -> ChatTemplate:
    """The template `source`, or else the file's own, or else ChatML."""
    template = source or model.get("tokenizer.chat_template", "") or CHATML
    return ChatTemplate(template, bos=special_name(model, "bos"), eos=special_name(model, "eos"))


def _as_text(call: Message) -> Message:
    function = call["function"]
    if isinstance(function["arguments"], str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _check_options(messages: list[Message], options: PromptOptions) -> None:
    if given := sorted(_OURS & set(options.arguments)):
        raise InvalidRequestError(
            f"chat_template_kwargs.{given[0]} is set by the server; leave it out", "chat_template_kwargs"
        )
    if options.continues and (messages[-1]["role"] != "assistant" or "tool_calls" in messages[-1]):
        raise InvalidRequestError(
            "only a last message of the assistant without tool calls can be continued", "messages"
        )


def _user_texts(messages: list[Message], options: PromptOptions) -> Iterator[str]:
    for message in messages:
        for name, value in message.items():
            if name != "role":
                yield from texts_in(value)
    yield from texts_in(options.tools)
    yield from texts_in([*options.arguments.values()])


def _replace_texts(
    messages: list[Message], options: PromptOptions, by: Mapping[str, str]
) -> tuple[list[Message], PromptOptions]:
    marked = [
        {name: value if name == "role" else replaced(value, by) for name, value in message.items()}
        for message in messages
    ]
    arguments = {name: replaced(value, by) for name, value in options.arguments.items()}
    return marked, PromptOptions(replaced(options.tools, by), arguments, options.asks, options.continues)

"""Chat messages to a prompt, by the model's own template in a sandbox.

The template's special tokens become special tokens; what users write never does. Content that holds the name of a
special token is given to the template with a mark, a private-use character found nowhere else, before that name.
Wherever the mark comes out again, the character after it is kept out of special tokens. So the template sees, trims and
cuts the real content, and all other text is tokenised as if it had been written in one piece.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cllm.errors import InvalidRequestError, ModelError
from cllm.models.gguf import GGUFModel
from cllm.text.bounded import TokenLimit
from cllm.text.tokenizer import Tokenizer
from cllm.text.vocab import special_name

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""For models without a template of their own."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_FIELDS = ("role", "content", "name")
_SLICE = 1 << 16
"""Characters that are looked at before other threads get their turn."""
_MOST_BITS = 1 << 16
_MOST_REPEATED = 1 << 20
"""Of numbers and of texts that a template makes by multiplying."""


class ChatTemplate:
    def __init__(self, source: str, *, bos: str, eos: str) -> None:
        """`bos` and `eos` are the names of those tokens, for templates that write them."""
        try:
            self._template = _environment().from_string(source)
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

    @property
    def bos(self) -> str:
        """The name of that token, or nothing."""
        return self._bos

    @property
    def eos(self) -> str:
        return self._eos

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        return self._render(_read_messages(messages), add_generation_prompt=add_generation_prompt)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        limit: TokenLimit | None = None,
        *,
        asks: bool = True,
    ) -> list[int]:
        """The prompt that asks for the next answer, as tokens; one that passes `limit` is refused. `asks` is whether it
        ends with what makes the model answer; if not, more messages may follow."""
        plain = _read_messages(messages)
        guard = _guard(frozenset(tokenizer.special_tokens))
        risky = {text: spots for text in _user_texts(plain) if (spots := guard.find(text))}
        literal: list[int] = []
        if risky:
            mark = self._unused_character(plain)
            marked = {text: _insert(text, spots, mark) for text, spots in risky.items()}
            rendered = self._render(_replace_texts(plain, marked), add_generation_prompt=asks)
            text, literal = _take_out(rendered, mark)
        else:
            text = self._render(plain, add_generation_prompt=asks)
        has_bos = bool(self._bos) and text.startswith(self._bos) and literal[:1] != [0]
        if limit is not None:
            limit.check_text(tokenizer, text, "messages", special=True)
        ids = tokenizer.encode(text, special=True, add_bos=not has_bos, literal=literal)
        if limit is not None:
            limit.check(ids, "messages")
        return ids

    def _render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                bos_token=self._bos,
                eos_token=self._eos,
            )
        except Exception as error:  # a template is a program: anything can go wrong in it
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error

    def _unused_character(self, messages: list[dict[str, str]]) -> str:
        used = set(self._source + self._bos + self._eos)
        for text in _user_texts(messages):
            for start in range(0, len(text), _SLICE):
                used.update(text[start : start + _SLICE])
        for code in (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE)):
            if chr(code) not in used:
                return chr(code)
        raise InvalidRequestError("the messages use every private-use character there is; leave one out", "messages")


def load_chat_template(model: GGUFModel, source: str | None = None) -> ChatTemplate:
    """The template `source`, or else the file's own, or else ChatML."""
    template = source or model.get("tokenizer.chat_template", "") or CHATML
    return ChatTemplate(template, bos=special_name(model, "bos"), eos=special_name(model, "eos"))


class _SpecialTextGuard:
    """Finds where text could become part of a special token, by itself or together with what stands around it."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = sorted(names)
        self._longest = max(map(len, names), default=0)
        self._beginnings = {name[:length] for name in names for length in range(1, len(name))}
        self._endings = {name[-length:] for name in names for length in range(1, len(name))}

    def find(self, text: str) -> list[int]:
        """Characters of which at least one is in every such special token."""
        spots: set[int] = set()
        for name in self._names:
            at = text.find(name)
            while at >= 0:
                spots.add(at)
                at = text.find(name, at + 1)
        core = text.strip()  # templates trim
        if core:
            first = len(text) - len(text.lstrip())
            lengths = range(1, min(self._longest, len(core) + 1))
            within = len(core) <= self._longest and any(core in name for name in self._names)
            if within or any(core[:length] in self._endings for length in lengths):
                spots.add(first)
            if any(core[-length:] in self._beginnings for length in lengths):
                spots.add(first + len(core) - 1)
        return sorted(spots)


@lru_cache(maxsize=4)
def _guard(names: frozenset[str]) -> _SpecialTextGuard:
    return _SpecialTextGuard(names)


def _insert(text: str, spots: list[int], mark: str) -> str:
    bounds = [0, *spots, len(text)]
    return mark.join(text[start:stop] for start, stop in pairwise(bounds))


def _take_out(text: str, mark: str) -> tuple[str, list[int]]:
    """The text without marks, and the positions of the characters that followed one."""
    parts = text.split(mark)
    literal, length = [], 0
    for part in parts[:-1]:
        length += len(part)
        literal.append(length)
    return "".join(parts), literal


def _user_texts(messages: list[dict[str, str]]) -> set[str]:
    return {text for message in messages for field, text in message.items() if field != "role"}


def _replace_texts(messages: list[dict[str, str]], by: Mapping[str, str]) -> list[dict[str, str]]:
    return [
        {field: text if field == "role" else by.get(text, text) for field, text in message.items()}
        for message in messages
    ]


def _read_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    if not messages:
        raise InvalidRequestError("messages is empty; give at least one message", "messages")
    return [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _read_message(message: Mapping[str, Any], where: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise _refusal(f"{where} is a {type(message).__name__}; it must be an object with role and content")
    for field in message:
        if field not in _FIELDS:
            raise _refusal(f"{where}.{field} is not supported; a message has {', '.join(_FIELDS)}")
    role = message.get("role")
    if role not in ROLES:
        raise _refusal(f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    read = {"role": role, "content": _read_content(content, f"{where}.content")}
    name = message.get("name")
    if name is not None:
        if not isinstance(name, str):
            raise _refusal(f"{where}.name is a {type(name).__name__}; it must be a string")
        read["name"] = name
    return read


def _read_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        found = "missing" if content is None else f"a {type(content).__name__}"
        raise _refusal(f"{where} is {found}; it must be a string or a list of text parts")
    return "\n".join(_read_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _read_part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise _refusal(f"{where}.type is {kind!r}; only 'text' parts are supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise _refusal(f"{where}.text is a {type(text).__name__}; it must be a string")
    return text


def _refusal(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, "messages")


class _GenerationTag(Extension):
    """`{% generation %}` marks answers for training; here its content is just written."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """One that does not compute what would take all memory, either: a template came with a model."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            too_much = isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MOST_BITS
        else:
            counts = [each for each in (left, right) if isinstance(each, int)]
            pieces = [each for each in (left, right) if isinstance(each, str | bytes | list | tuple)]
            too_much = bool(counts and pieces) and len(pieces[0]) * counts[0] > _MOST_REPEATED
        if too_much:
            raise TemplateError(f"the result of {operator} would be too large")
        return super().call_binop(context, operator, left, right)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # else {{ 9 ** 9 ** 9 }} in a file is computed when the model is loaded
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, sort_keys: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)

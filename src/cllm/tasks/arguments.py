"""Checks what callers of `LLM` pass: what is wrong is said by name, before anything is computed."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, TypeGuard

from cllm.engine.params import SamplingParams
from cllm.errors import InvalidRequestError

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]

_MESSAGES = 'a list of messages, such as [{"role": "user", "content": "Hello"}]'


def is_prompt(value: object) -> TypeGuard[Prompt]:
    return isinstance(value, str) or (_is_list(value) and all(map(_is_id, value)))


def read_prompts(value: object, name: str) -> list[Prompt]:
    """One prompt or several, as a list. An empty list is no prompts."""
    if isinstance(value, str) or (is_prompt(value) and len(value)):
        return [value]
    if not _is_list(value):
        raise _wrong(name, value, "a text, a list of token ids, or a list of these")
    for number, prompt in enumerate(value):
        if not is_prompt(prompt):
            raise _wrong(f"{name}[{number}]", prompt, "a text or a list of token ids")
    return list(value)


def check_prompt(value: object) -> None:
    if not is_prompt(value):
        raise _wrong("prompt", value, "one text or a list of token ids")


def are_conversations(messages: object) -> bool:
    """Whether these are the messages of several conversations, or else of one."""
    if not _is_list(messages):
        raise _wrong("messages", messages, _MESSAGES)
    several = [_is_list(each) for each in messages]
    if any(several) and not all(several):
        number = several.index(not several[0])
        raise _wrong(f"messages[{number}]", messages[number], f"{'a list' if several[0] else 'a message'} as the first")
    return any(several)


def check_params(params: object) -> None:
    if params is None or isinstance(params, SamplingParams):
        return
    example = "SamplingParams(**params)" if isinstance(params, Mapping) else "SamplingParams(max_tokens=64)"
    raise _wrong("params", params, f"SamplingParams or None, for example {example}")


@contextmanager
def about(name: str | None) -> Iterator[None]:
    """Errors of requests name the one of several that they are about."""
    try:
        yield
    except InvalidRequestError as error:
        if name is None:
            raise
        raise InvalidRequestError(f"{name}: {error}", error.param, error.code) from error


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def _is_id(value: object) -> bool:
    return isinstance(value, (int, Integral)) and not isinstance(value, bool)


def _wrong(name: str, value: object, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {reprlib.repr(value)}; it must be {wanted}", name.partition("[")[0])

"""OpenAI's forms of an answer: whole choices, and events built from strings made once per request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cllm.server.answers import Answer, Answers
from cllm.server.openai_replies import (
    ChatChoice,
    ChatLogprob,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    PromptTokensDetails,
    ReplyMessage,
    TopLogprob,
    Usage,
)
from cllm.server.sse import DONE, data

if TYPE_CHECKING:
    from cllm.engine.sampling import TokenLogprob
    from cllm.generation import Delta
    from cllm.text.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


class Head(NamedTuple):
    """What every event and answer to one request begins with."""

    id: str
    created: int
    model: str


def usage_of(answers: Answers) -> Usage:
    return Usage(
        prompt_tokens=answers.prompt_tokens,
        completion_tokens=answers.completion_tokens,
        total_tokens=answers.prompt_tokens + answers.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=answers.cached_tokens),
    )


def completion_choice(index: int, answer: Answer, tokenizer: Tokenizer, *, echo: str) -> CompletionChoice:
    return CompletionChoice(
        index=index,
        text=echo + answer.text,
        logprobs=completion_logprobs(answer.logprobs, tokenizer) if answer.logprobs else None,
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
    )


def chat_choice(index: int, answer: Answer, tokenizer: Tokenizer) -> ChatChoice:
    return ChatChoice(
        index=index,
        message=ReplyMessage(content=answer.text),
        logprobs=chat_logprobs(answer.logprobs, tokenizer) if answer.logprobs else None,
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
    )


def completion_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer, offset: int = 0) -> CompletionLogprobs:
    """`offset` is where in the answer's text the first token begins."""
    tokens = [tokenizer.token_text(entry.token_id) for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[_finite(entry.logprob) for entry in entries],
        top_logprobs=[
            # The chosen token is always there, also when it is not among the likeliest.
            {tokenizer.token_text(token): _finite(logprob) for token, logprob in entry.top}
            | {token_text: _finite(entry.logprob)}
            for token_text, entry in zip(tokens, entries, strict=True)
        ],
        text_offset=offsets,
    )


def chat_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> ChatLogprobs:
    def fields(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        text = tokenizer.token_text(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw) if raw else None}

    return ChatLogprobs(
        content=[
            ChatLogprob(
                **fields(entry.token_id, entry.logprob),
                top_logprobs=[TopLogprob(**fields(*pair)) for pair in entry.top],
            )
            for entry in entries
        ]
    )


class _OpenAIEvents:
    """An event is a beginning made once, the text, and an end made once. No model is built per token."""

    _object: str

    def __init__(self, head: Head, tokenizer: Tokenizer, *, include_usage: bool) -> None:
        self._tokenizer = tokenizer
        self._head = {
            "id": head.id,
            "object": self._object,
            "created": head.created,
            "model": head.model,
        }
        self._include_usage = include_usage
        start = json.dumps(self._head, separators=(",", ":"))[:-1]
        self._start = f'data: {start},"choices":[{{"index":'
        self._stop = '}],"usage":null}\n\n' if include_usage else "}]}\n\n"
        self._running = f',"logprobs":null,"finish_reason":null{self._stop}'

    def end(self, answers: Answers) -> str:
        if not self._include_usage:
            return DONE
        return data({**self._head, "choices": [], "usage": usage_of(answers).model_dump()}) + DONE

    def _rest(self, delta: Delta, logprobs: str) -> str:
        """The event from the text on."""
        if delta.finish_reason is None:
            return self._running if logprobs == "null" else f',"logprobs":{logprobs},"finish_reason":null{self._stop}'
        finish, stop = json.dumps(delta.finish_reason), json.dumps(delta.stop_reason)
        return f',"logprobs":{logprobs},"finish_reason":{finish},"stop_reason":{stop}{self._stop}'


class CompletionEvents(_OpenAIEvents):
    _object = "text_completion"

    def __init__(self, head: Head, tokenizer: Tokenizer, *, include_usage: bool, echoes: Mapping[int, str]) -> None:
        """`echoes` is what goes in front of each answer."""
        super().__init__(head, tokenizer, include_usage=include_usage)
        self._echoes = dict(echoes)
        self._offsets: dict[int, int] = {}

    def event(self, delta: Delta) -> str:
        text = self._echoes.pop(delta.index, "") + delta.text if self._echoes else delta.text
        logprobs = "null" if delta.logprobs is None else self._logprobs(delta.index, delta.logprobs)
        return f'{self._start}{delta.index},"text":{json.dumps(text)}{self._rest(delta, logprobs)}'

    def _logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> str:
        offset = self._offsets.get(index, 0)
        logprobs = completion_logprobs(entries, self._tokenizer, offset)
        self._offsets[index] = offset + sum(map(len, logprobs.tokens))
        return logprobs.model_dump_json()


class ChatEvents(_OpenAIEvents):
    _object = "chat.completion.chunk"

    def __init__(self, head: Head, tokenizer: Tokenizer, *, include_usage: bool) -> None:
        super().__init__(head, tokenizer, include_usage=include_usage)
        self._introduced: set[int] = set()

    def event(self, delta: Delta) -> str:
        role = ""
        if delta.index not in self._introduced:
            self._introduced.add(delta.index)
            role = '"role":"assistant",'
        logprobs = "null"
        if delta.logprobs is not None:
            logprobs = chat_logprobs(delta.logprobs, self._tokenizer).model_dump_json()
        content = f'{{{role}"content":{json.dumps(delta.text)}}}'
        return f'{self._start}{delta.index},"delta":{content}{self._rest(delta, logprobs)}'


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)

"""Prompts to tokens for every endpoint: too long ones are refused early, and long ones do not block the event loop."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from cllm.errors import InvalidRequestError
from cllm.loading.embedder import EMBEDDING
from cllm.server.executor import SizedExecutor
from cllm.server.inference.truncation import Truncation
from cllm.text.chat_template import PLAIN, PromptOptions
from cllm.text.token_limit import CONTEXT_LENGTH_EXCEEDED, PIECE, TokenLimit
from cllm.text.tokenizer import encode_prompt

if TYPE_CHECKING:
    from cllm.engine.params import SamplingParams
    from cllm.llm import AsyncLLM

T = TypeVar("T")

INLINE = 2_000
"""Characters that are tokenised on the event loop, in about 3 ms at most (digits are the slowest: each is a word)."""
_EACH = 16
"""What a text or message costs by itself, in characters."""
_IDS = 16
"""Token ids that cost as much as a character."""


class PromptEncoder:
    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._executor = SizedExecutor("text", inline=INLINE, short=PIECE)

    def close(self) -> None:
        self._executor.close()

    async def encode(
        self, text: str, limit: TokenLimit, param: str, *, special: bool = False, add_bos: bool = True
    ) -> Sequence[int]:
        to_tokens = partial(self._llm.tokenizer.encode, special=special, add_bos=add_bos)
        return (await self._encode([text], limit, param, to_tokens, _size(text), special=special))[0]

    async def encode_prompt(
        self, text: str, params: SamplingParams | None = None, *, limit: TokenLimit | None = None, param: str = "prompt"
    ) -> Sequence[int]:
        """As completions take it. `limit`: another one than the context."""
        limit = limit or self._llm.prompt_limit(params)
        return (await self._encode([text], limit, param, self._to_prompt, _size(text), special=True))[0]

    async def encode_prompts(
        self, prompts: Sequence[str | list[int]], params: SamplingParams, *, limit: TokenLimit | None = None
    ) -> list[Sequence[int]]:
        """Strings become tokens, tokens an array. `limit`: another one than the context."""
        limit = limit or self._llm.prompt_limit(params)
        return await self._encode_all(prompts, limit, "prompt", self._to_prompt, special=True)

    def _to_prompt(self, text: str) -> list[int]:
        return encode_prompt(self._llm.tokenizer, text)

    async def encode_inputs(
        self, inputs: Sequence[str | list[int]], param: str, truncation: Truncation | None = None
    ) -> list[Sequence[int]]:
        """Texts to embed. Those without any token, and unknown tokens, are refused."""
        limit = self._llm.prompt_limit(EMBEDDING)._replace(what="a text")
        encode = self._llm.embedder.encode_text
        if truncation is not None:
            encode = partial(encode, most=truncation.most) if truncation.side == "right" else encode
            limit = truncation.reading_limit(self._llm.config)._replace(what="a text")
        encoded = await self._encode_all(inputs, limit, param, encode)
        if truncation is not None:
            encoded = [truncation.cut(ids) for ids in encoded]
        vocabulary = self._llm.shape.n_vocab

        def check() -> None:
            for number, ids in enumerate(encoded):
                if not len(ids):
                    raise InvalidRequestError(f"{param}[{number}] is empty: it needs at least one token", param)
                if max(ids) >= vocabulary:
                    raise InvalidRequestError(
                        f"{param}[{number}] contains token {max(ids)}; ids go from 0 to {vocabulary - 1}", param
                    )

        await self._executor.run(sum(map(len, encoded)), check)
        return encoded

    async def encode_pairs(self, query: str, documents: Sequence[str]) -> list[Sequence[int]]:
        """A query with each document, as a reranking model reads them."""
        limit = self._llm.prompt_limit(EMBEDDING)._replace(what="a document with the query")
        limit.check_text(self._llm.tokenizer, query, "query")
        return await self._encode_all(
            documents,
            limit,
            "documents",
            lambda document: self._llm.embedder.encode_pair(query, document),
            each=len(query),
        )

    async def _encode_all(
        self,
        prompts: Sequence[str | list[int]],
        limit: TokenLimit,
        param: str,
        encode: Callable[[str], list[int]],
        each: int = 0,
        *,
        special: bool = False,
    ) -> list[Sequence[int]]:
        """In jobs of about `PIECE` characters, so that others get their turn. `each`: further characters per text."""
        encoded: list[Sequence[int]] = []
        start = size = 0
        for stop, prompt in enumerate(prompts, 1):
            size += _size(prompt) + each
            if size >= PIECE or stop == len(prompts):
                encoded += await self._encode(prompts[start:stop], limit, param, encode, size, special=special)
                start, size = stop, 0
        return encoded

    async def encode_infill(
        self, prompts: Sequence[str | list[int]], suffix: str, params: SamplingParams
    ) -> list[Sequence[int]]:
        """Prompts that ask for the text between each of these and the suffix."""
        tokenizer, limit = self._llm.tokenizer, self._llm.prompt_limit(params)
        infill = tokenizer.infill
        if infill is None:
            raise InvalidRequestError(
                "suffix is not supported by this model: its vocabulary has no tokens for filling in the middle; "
                "leave it out",
                "suffix",
            )
        limit.check_text(tokenizer, suffix, "suffix")
        begin = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []

        def encode() -> list[Sequence[int]]:
            after = tokenizer.encode(suffix, add_bos=False)
            made: list[Sequence[int]] = []
            for prompt in prompts:
                if isinstance(prompt, str):
                    limit.check_text(tokenizer, prompt, "prompt")
                    prompt = tokenizer.encode(prompt, add_bos=False)
                ids = array("i", [*begin, *infill.prompt(prompt, after)])
                limit.check(ids, "prompt")
                made.append(ids)
            return made

        return await self._executor.run(sum(map(_size, [suffix, *prompts])), encode)

    async def encode_chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams, options: PromptOptions = PLAIN
    ) -> list[int]:
        try:
            return await self._encode_messages(messages, params, options, self._llm.encode_chat)
        except InvalidRequestError as error:
            if error.code != CONTEXT_LENGTH_EXCEEDED or not options.tools:
                raise
            share = await self._count_tools(params, options)
            message = f"{error} The tools alone have {share} tokens." if share else str(error)
            raise InvalidRequestError(message, error.param, error.code, error.numbers) from None

    async def _count_tools(self, params: SamplingParams, options: PromptOptions) -> int:
        """Refuse tools that leave no room for any message. 0: the template does not show them by themselves."""
        limit = self._llm.prompt_limit(params)._replace(what="the list of tools")
        options = replace(options, continues=False)
        try:
            return len(await self.encode_chat_within([{"role": "user", "content": "?"}], options, limit))
        except InvalidRequestError as error:
            if error.code == CONTEXT_LENGTH_EXCEEDED:
                raise InvalidRequestError(str(error), "tools", error.code, error.numbers) from None
            return 0

    async def encode_chat_within(
        self, messages: Sequence[dict[str, Any]], options: PromptOptions, limit: TokenLimit
    ) -> list[int]:
        """A prompt that may be longer than the context."""

        def encode(
            messages: Sequence[dict[str, Any]], params: SamplingParams | None, options: PromptOptions
        ) -> list[int]:
            return self._llm.encode_chat(messages, params, options, limit)

        return await self._encode_messages(messages, None, options, encode, limit)

    async def encode_beginning(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams | None = None,
        options: PromptOptions = PLAIN,
    ) -> list[int]:
        """The prefix of all prompts whose first messages are these."""
        return await self._encode_messages(messages, params, options, self._llm.encode_beginning)

    async def run_sized(self, data: Any, work: Callable[[], T]) -> T:
        """Run `work`, whose time grows with `data`, such as tools, without blocking others."""
        return await self._executor.run(estimated_cost(data), work)

    async def _encode_messages(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams | None,
        options: PromptOptions,
        encode: Callable[[Sequence[dict[str, Any]], SamplingParams | None, PromptOptions], list[int]],
        limit: TokenLimit | None = None,
    ) -> list[int]:
        limit = limit or self._llm.prompt_limit(params)
        # Templates trim the blanks around a message.
        size = sum(len(message["content"].strip()) for message in messages)
        if size > limit.most * self._llm.tokenizer.longest_token:
            has = f"messages of {size} characters, which are more than {limit.most} tokens"
            raise limit.error(has, "messages", size // self._llm.tokenizer.longest_token)
        size += _EACH * len(messages) + estimated_cost((options.tools, options.arguments))
        size += sum(estimated_cost(message["tool_calls"]) for message in messages if "tool_calls" in message)
        return await self._executor.run(size, lambda: encode(messages, params, options))

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of a prompt, special tokens by name."""
        decode = self._llm.tokenizer.decode
        return await self._executor.run(len(ids), lambda: decode(ids, skip_special=False))

    async def _encode(
        self,
        texts: Sequence[str | list[int]],
        limit: TokenLimit,
        param: str,
        to_tokens: Callable[[str], list[int]],
        size: int,
        *,
        special: bool = False,
    ) -> list[Sequence[int]]:
        tokenizer = self._llm.tokenizer

        def encode(text: str | list[int]) -> Sequence[int]:
            if not isinstance(text, str):
                limit.check(text, param)
                return array("i", text)
            limit.check_text(tokenizer, text, param, special=special)
            ids = to_tokens(text)
            limit.check(ids, param)
            return ids

        return await self._executor.run(size, lambda: [encode(text) for text in texts])


def each_prompt(given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """A flat list of token ids is one prompt, a list of strings or lists is several; an empty one is an empty prompt.
    All items are of one kind, so the first one tells: there may be very many."""
    if isinstance(given, str) or not given or isinstance(given[0], int):
        return [cast("str | list[int]", given)]
    return [*given]


def estimated_cost(value: Any, most: int = PIECE + 1) -> int:
    """About what nested data costs, in characters; counting stops at `most`."""
    total, waiting = 0, [value]
    while waiting and total < most:
        each = waiting.pop()
        if isinstance(each, str):
            total += len(each)
        elif isinstance(each, dict):
            waiting += each.keys()
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
        total += _EACH
    return total


def _size(prompt: str | list[int]) -> int:
    return _EACH + (len(prompt) if isinstance(prompt, str) else len(prompt) // _IDS)

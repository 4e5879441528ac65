"""Prompts to tokens for every endpoint: too long ones are refused early, and long ones do not block the event loop."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from cllm.errors import InvalidRequestError
from cllm.loading.embedder import EMBEDDING
from cllm.loading.text_model import IN_THREAD
from cllm.loading.text_tools import WHOLE_PROMPT, Encoding
from cllm.server.inference.truncation import Truncation
from cllm.text.chat_template import PLAIN, PromptOptions
from cllm.text.tokenizer import CONTEXT_LENGTH_EXCEEDED, PIECE, TokenLimit

if TYPE_CHECKING:
    from cllm.engine.params import SamplingParams
    from cllm.llm import AsyncLLM

P = TypeVar("P")

_EACH = 16
"""What a text costs by itself, in characters."""
_IDS = 16
"""Token ids that cost as much as a character."""


class PromptEncoder:
    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def encode(
        self, text: str, limit: TokenLimit, param: str, *, special: bool = False, add_bos: bool = True
    ) -> Sequence[int]:
        return await self._llm.text.work.encode(text, Encoding(special, add_bos), limit, param)

    async def encode_prompt(
        self, text: str, params: SamplingParams | None = None, *, limit: TokenLimit | None = None, param: str = "prompt"
    ) -> Sequence[int]:
        """As completions take it. `limit`: another one than the context."""
        return await self._llm.text.work.encode(text, WHOLE_PROMPT, limit or self._llm.text.prompt_limit(params), param)

    async def encode_prompts(
        self, prompts: Sequence[str | list[int]], params: SamplingParams, *, limit: TokenLimit | None = None
    ) -> list[Sequence[int]]:
        """Strings become tokens, tokens an array. `limit`: another one than the context."""
        return await self._encode_all(prompts, limit or self._llm.text.prompt_limit(params), "prompt", WHOLE_PROMPT)

    async def encode_inputs(
        self, inputs: Sequence[str | list[int]], param: str, truncation: Truncation | None = None
    ) -> list[Sequence[int]]:
        """Texts to embed. Those without any token, and unknown tokens, are refused."""
        limit = self._llm.text.prompt_limit(EMBEDDING)._replace(what="a text")
        encode = Encoding(end=tuple(self._llm.text.embedder.text_end))
        if truncation is not None:
            encode = replace(encode, most=truncation.most) if truncation.side == "right" else encode
            limit = truncation.reading_limit(self._llm.config)._replace(what="a text")
        encoded = await self._encode_all(inputs, limit, param, encode)
        if truncation is not None:
            encoded = [truncation.cut(ids) for ids in encoded]
        vocabulary = self._llm.text.spec.n_vocab

        def check() -> None:
            for number, ids in enumerate(encoded):
                if not len(ids):
                    raise InvalidRequestError(f"{param}[{number}] is empty: it needs at least one token", param)
                if max(ids) >= vocabulary:
                    raise InvalidRequestError(
                        f"{param}[{number}] contains token {max(ids)}; ids go from 0 to {vocabulary - 1}", param
                    )

        await self._llm.text.work.run(sum(map(len, encoded)), check)
        return encoded

    async def encode_pairs(self, query: str, documents: Sequence[str]) -> list[Sequence[int]]:
        """A query with each document, as a reranking model reads them."""
        limit = self._llm.text.prompt_limit(EMBEDDING)._replace(what="a document with the query")
        tokenizer, embedder = self._llm.text.tokenizer, self._llm.text.embedder
        limit.check_text(tokenizer, query, "query")

        def encode(document: str) -> list[int]:
            limit.check_text(tokenizer, document, "documents")
            ids = embedder.encode_pair(query, document)
            limit.check(ids, "documents")
            return ids

        return await self._in_pieces(documents, lambda document: _size(document) + len(query), encode)

    async def _encode_all(
        self, prompts: Sequence[str | list[int]], limit: TokenLimit, param: str, how: Encoding
    ) -> list[Sequence[int]]:
        tokenizer, encoded = self._llm.text.tokenizer, dict[int, Sequence[int]]()
        for number, prompt in enumerate(prompts):
            if isinstance(prompt, str) and len(prompt) > IN_THREAD:
                encoded[number] = await self._llm.text.work.encode(prompt, how, limit, param)

        def encode(prompt: str | list[int]) -> Sequence[int]:
            if isinstance(prompt, str):
                return how.checked(tokenizer, prompt, limit, param)
            limit.check(prompt, param)
            return array("i", prompt)

        others = [prompt for number, prompt in enumerate(prompts) if number not in encoded]
        rest = iter(await self._in_pieces(others, _size, encode))
        return [encoded[number] if number in encoded else next(rest) for number in range(len(prompts))]

    async def _in_pieces(
        self, items: Sequence[P], size_of: Callable[[P], int], encode: Callable[[P], Sequence[int]]
    ) -> list[Sequence[int]]:
        """In jobs of about `PIECE` characters, so that others get their turn."""
        encoded: list[Sequence[int]] = []
        start = size = 0
        for stop, item in enumerate(items, 1):
            size += size_of(item)
            if size >= PIECE or stop == len(items):
                encoded += await self._llm.text.work.run(size, partial(_each, encode, items[start:stop]))
                start, size = stop, 0
        return encoded

    async def encode_infill(
        self, prompts: Sequence[str | list[int]], suffix: str, params: SamplingParams
    ) -> list[Sequence[int]]:
        """Prompts that ask for the text between each of these and the suffix."""
        tokenizer, limit = self._llm.text.tokenizer, self._llm.text.prompt_limit(params)
        infill = tokenizer.infill
        if infill is None:
            raise InvalidRequestError(
                "suffix is not supported by this model: its vocabulary has no tokens for filling in the middle; "
                "leave it out",
                "suffix",
            )
        begin = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        after = await self.encode(suffix, limit, "suffix", add_bos=False)
        before = await self._encode_all(prompts, limit, "prompt", Encoding(add_bos=False))

        def join(prompt: Sequence[int]) -> Sequence[int]:
            ids = array("i", [*begin, *infill.prompt(prompt, after)])
            limit.check(ids, "prompt")
            return ids

        return await self._in_pieces(before, len, join)

    async def encode_chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams, options: PromptOptions = PLAIN
    ) -> list[int]:
        try:
            self._check_size(messages, self._llm.text.prompt_limit(params))
            return await self._llm.text.encode_chat(messages, params, options)
        except InvalidRequestError as error:
            if error.code != CONTEXT_LENGTH_EXCEEDED or not options.tools:
                raise
            share = await self._count_tools(params, options)
            message = f"{error} The tools alone have {share} tokens." if share else str(error)
            raise InvalidRequestError(message, error.param, error.code, error.numbers) from None

    async def _count_tools(self, params: SamplingParams, options: PromptOptions) -> int:
        """Refuse tools that leave no room for any message. 0: the template does not show them by themselves."""
        limit = self._llm.text.prompt_limit(params)._replace(what="the list of tools")
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
        self._check_size(messages, limit)
        return await self._llm.text.encode_chat(messages, options=options, limit=limit)

    async def encode_beginning(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams | None = None,
        options: PromptOptions = PLAIN,
    ) -> list[int]:
        """The prefix of all prompts whose first messages are these."""
        self._check_size(messages, self._llm.text.prompt_limit(params))
        return await self._llm.text.encode_beginning(messages, params, options)

    def _check_size(self, messages: Sequence[dict[str, Any]], limit: TokenLimit) -> None:
        # Templates trim the blanks around a message.
        size = sum(len(message["content"].strip()) for message in messages)
        if size > limit.most * self._llm.text.tokenizer.longest_token:
            has = f"messages of {size} characters, which are more than {limit.most} tokens"
            raise limit.error(has, "messages", size // self._llm.text.tokenizer.longest_token)

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of a prompt, special tokens by name."""
        decode = self._llm.text.tokenizer.decode
        return await self._llm.text.work.run(len(ids), lambda: decode(ids, skip_special=False))


def each_prompt(given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """A flat list of token ids is one prompt, a list of strings or lists is several; an empty one is an empty prompt.
    All items are of one kind, so the first one tells: there may be very many."""
    if isinstance(given, str) or not given or isinstance(given[0], int):
        return [cast("str | list[int]", given)]
    return [*given]


def _each(encode: Callable[[P], Sequence[int]], items: Sequence[P]) -> list[Sequence[int]]:
    return [encode(item) for item in items]


def _size(prompt: str | list[int]) -> int:
    return _EACH + (len(prompt) if isinstance(prompt, str) else len(prompt) // _IDS)

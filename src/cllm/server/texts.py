"""Texts to tokens for every endpoint: what is too long is refused early, and nobody waits for another's long text."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cllm.embedding import EMBEDDING
from cllm.errors import InvalidRequestError
from cllm.server.lanes import Lanes
from cllm.text.bounded import PIECE, TokenLimit

if TYPE_CHECKING:
    from cllm.engine.params import SamplingParams
    from cllm.llm import AsyncLLM

INLINE = 2_000
"""Characters that are tokenised on the event loop: at most about 3 ms (digits, each of which is a word by itself)."""
_EACH = 16
"""A text or message costs as much as so many characters, however short it is."""
_IDS = 16
"""So many token ids cost as much as a character."""


class Texts:
    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._lanes = Lanes("text", inline=INLINE, short=PIECE)

    def close(self) -> None:
        self._lanes.close()

    async def encode(self, text: str, limit: TokenLimit, param: str) -> Sequence[int]:
        return (await self._encode([text], limit, param, self._llm.tokenizer.encode, _size(text)))[0]

    async def encode_prompt(self, text: str, params: SamplingParams | None = None) -> Sequence[int]:
        return await self.encode(text, self._llm.prompt_limit(params), "prompt")

    async def encode_prompts(self, prompts: Sequence[str | list[int]], params: SamplingParams) -> list[Sequence[int]]:
        """Strings become tokens, tokens become an array. A job holds as many prompts as make a piece: others get their
        turn."""
        return await self._encode_all(prompts, self._llm.prompt_limit(params), "prompt", self._llm.tokenizer.encode)

    async def encode_inputs(self, inputs: Sequence[str | list[int]], param: str) -> list[Sequence[int]]:
        """Texts to embed. One without a token is refused, and so is one with a token that does not exist."""
        limit = self._llm.prompt_limit(EMBEDDING)._replace(what="a text")
        encoded = await self._encode_all(inputs, limit, param, self._llm.reads.encode_input)
        vocabulary = self._llm.shape.n_vocab
        for number, ids in enumerate(encoded):
            if not len(ids):
                raise InvalidRequestError(f"{param}[{number}] is empty: it needs at least one token", param)
            if max(ids) >= vocabulary:
                raise InvalidRequestError(
                    f"{param}[{number}] holds token {max(ids)}; ids go from 0 to {vocabulary - 1}", param
                )
        return encoded

    async def encode_pairs(self, query: str, documents: Sequence[str]) -> list[Sequence[int]]:
        """What a model reads to rank documents."""
        limit = self._llm.prompt_limit(EMBEDDING)._replace(what="a document with the query")
        limit.check_text(self._llm.tokenizer, query, "query")
        return await self._encode_all(
            documents,
            limit,
            "documents",
            lambda document: self._llm.reads.encode_pair(query, document),
            each=len(query),
        )

    async def _encode_all(
        self,
        prompts: Sequence[str | list[int]],
        limit: TokenLimit,
        param: str,
        encode: Callable[[str], list[int]],
        each: int = 0,
    ) -> list[Sequence[int]]:
        """A job holds as many texts as make a piece: others get their turn. `each`: characters beside those of each."""
        encoded: list[Sequence[int]] = []
        start = size = 0
        for stop, prompt in enumerate(prompts, 1):
            size += _size(prompt) + each
            if size >= PIECE or stop == len(prompts):
                encoded += await self._encode(prompts[start:stop], limit, param, encode, size)
                start, size = stop, 0
        return encoded

    async def encode_chat(self, messages: Sequence[dict[str, str]], params: SamplingParams) -> list[int]:
        return await self._encode_messages(messages, params, self._llm.encode_chat)

    async def encode_beginning(
        self, messages: Sequence[dict[str, str]], params: SamplingParams | None = None
    ) -> list[int]:
        """What prompts begin with whose first messages are these."""
        return await self._encode_messages(messages, params, self._llm.encode_beginning)

    async def _encode_messages(
        self,
        messages: Sequence[dict[str, str]],
        params: SamplingParams | None,
        encode: Callable[[Sequence[dict[str, str]], SamplingParams | None], list[int]],
    ) -> list[int]:
        most, reason, _ = self._llm.prompt_limit(params)
        # Templates trim: blanks around a message may count for nothing.
        size = sum(len(message["content"].strip()) for message in messages)
        if size > most * self._llm.tokenizer.longest_token:
            raise InvalidRequestError(
                f"the messages have {size} characters, which are more than {most} tokens; {reason}", "messages"
            )
        return await self._lanes.run(size + _EACH * len(messages), lambda: encode(messages, params))

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of a prompt, special tokens by name."""
        decode = self._llm.tokenizer.decode
        return await self._lanes.run(len(ids), lambda: decode(ids, skip_special=False))

    async def _encode(
        self,
        texts: Sequence[str | list[int]],
        limit: TokenLimit,
        param: str,
        to_tokens: Callable[[str], list[int]],
        size: int,
    ) -> list[Sequence[int]]:
        tokenizer = self._llm.tokenizer

        def encode(text: str | list[int]) -> Sequence[int]:
            if not isinstance(text, str):
                limit.check(text, param)
                return array("i", text)
            limit.check_text(tokenizer, text, param)
            ids = to_tokens(text)
            limit.check(ids, param)
            return ids

        return await self._lanes.run(size, lambda: [encode(text) for text in texts])


def _size(prompt: str | list[int]) -> int:
    return _EACH + (len(prompt) if isinstance(prompt, str) else len(prompt) // _IDS)

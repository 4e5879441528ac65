"""Texts to tokens for every endpoint: what is too long is refused early, and nobody waits for another's long text."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from cllm.embedding import EMBEDDING
from cllm.errors import InvalidRequestError
from cllm.server.lanes import Lanes
from cllm.text.bounded import PIECE, TokenLimit
from cllm.text.chat import PLAIN, PromptOptions

if TYPE_CHECKING:
    from cllm.engine.params import SamplingParams
    from cllm.llm import AsyncLLM

T = TypeVar("T")

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

    async def encode(
        self, text: str, limit: TokenLimit, param: str, *, special: bool = False, add_bos: bool = True
    ) -> Sequence[int]:
        to_tokens = partial(self._llm.tokenizer.encode, special=special, add_bos=add_bos)
        return (await self._encode([text], limit, param, to_tokens, _size(text), special=special))[0]

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

        def check() -> None:
            for number, ids in enumerate(encoded):
                if not len(ids):
                    raise InvalidRequestError(f"{param}[{number}] is empty: it needs at least one token", param)
                if max(ids) >= vocabulary:
                    raise InvalidRequestError(
                        f"{param}[{number}] holds token {max(ids)}; ids go from 0 to {vocabulary - 1}", param
                    )

        await self._lanes.run(sum(map(len, encoded)), check)
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

    async def encode_infill(
        self, prompts: Sequence[str | list[int]], suffix: str, params: SamplingParams
    ) -> list[Sequence[int]]:
        """Prompts that ask for what stands between each of these and the suffix."""
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

        return await self._lanes.run(sum(map(_size, [suffix, *prompts])), encode)

    async def encode_chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams, options: PromptOptions = PLAIN
    ) -> list[int]:
        return await self._encode_messages(messages, params, options, self._llm.encode_chat)

    async def encode_beginning(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams | None = None,
        options: PromptOptions = PLAIN,
    ) -> list[int]:
        """What prompts begin with whose first messages are these."""
        return await self._encode_messages(messages, params, options, self._llm.encode_beginning)

    async def apart(self, about: Any, work: Callable[[], T]) -> T:
        """Work whose time grows with what it is about, such as tools, out of everybody's way."""
        return await self._lanes.run(weight(about), work)

    async def _encode_messages(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams | None,
        options: PromptOptions,
        encode: Callable[[Sequence[dict[str, Any]], SamplingParams | None, PromptOptions], list[int]],
    ) -> list[int]:
        limit = self._llm.prompt_limit(params)
        # Templates trim: blanks around a message may count for nothing.
        size = sum(len(message["content"].strip()) for message in messages)
        if size > limit.most * self._llm.tokenizer.longest_token:
            has = f"messages of {size} characters, which are more than {limit.most} tokens"
            raise limit.refusal(has, "messages")
        size += _EACH * len(messages) + weight((options.tools, options.arguments))
        size += sum(weight(message["tool_calls"]) for message in messages if "tool_calls" in message)
        return await self._lanes.run(size, lambda: encode(messages, params, options))

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

        return await self._lanes.run(size, lambda: [encode(text) for text in texts])


def weight(value: Any, most: int = PIECE + 1) -> int:
    """About what nested data costs, in characters; what costs more than `most` is not looked at any further."""
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

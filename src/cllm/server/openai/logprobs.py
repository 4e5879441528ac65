"""Log probabilities as OpenAI's APIs write them, in pieces of JSON that each take little time to make.

Those of prompts (OpenAI's `echo` with `logprobs`, vLLM's `prompt_logprobs`) are many: they are kept as arrays, and
written a few tokens at a time.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol, overload

from cllm.engine.sampling import TokenLogprob
from cllm.server.http.response import as_json, list_pieces

if TYPE_CHECKING:
    from cllm.backends.base import PromptScores
    from cllm.generation import Generation
    from cllm.text.tokenizer import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")
_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write."""
_KEPT = 8192
"""Tokens whose JSON is kept; the same few hundred come again and again."""
_IDS = 4096
_ENTRIES = 64
"""A prompt's entries in one piece."""


class TokenForm(NamedTuple):
    """How the tokens of answers are shown."""

    tokenizer: Tokenizer
    by_ids: bool = False
    """Whether log probabilities name tokens by their ids."""
    lists_ids: bool = False
    """Whether there are lists of the ids of all tokens."""

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.by_ids else self.tokenizer.token_text(token_id)


class ChatLogprobs:
    """`{"content":[{"token":…,"logprob":…,"bytes":…,"top_logprobs":[…]},…],"refusal":null}`"""

    def __init__(self, form: TokenForm) -> None:
        self._form = form
        self._written: dict[int, tuple[str, str]] = {}

    def pieces(self, entries: Sequence[TokenLogprob]) -> Iterator[str]:
        yield '{"content":'
        yield from self.list_pieces(entries)
        yield ',"refusal":null}'

    def list_pieces(self, entries: Sequence[TokenLogprob]) -> Iterator[str]:
        return list_pieces(map(self._entry, entries))

    def _entry(self, entry: TokenLogprob) -> str:
        top = "},".join([self._fields(*pair) for pair in entry.top])
        closed = "}" if top else ""
        return f'{self._fields(entry.token_id, entry.logprob)},"top_logprobs":[{top}{closed}]}}'

    def _fields(self, token_id: int, logprob: float) -> str:
        """One token's object without its end."""
        written = self._written.get(token_id) or self._write(token_id)
        return f"{written[0]}{_finite(logprob)!r}{written[1]}"

    def _write(self, token_id: int) -> tuple[str, str]:
        if len(self._written) >= _KEPT:
            self._written.clear()
        raw = list(self._form.tokenizer.token_bytes(token_id)) or None
        written = f'{{"token":{as_json(self._form.name(token_id))},"logprob":', f',"bytes":{as_json(raw)}'
        self._written[token_id] = written
        return written


class CompletionLogprobs:
    """`{"tokens":[…],"token_logprobs":[…],"top_logprobs":[{…},…],"text_offset":[…]}`"""

    def __init__(self, form: TokenForm) -> None:
        self._name = form.name
        self._text = form.tokenizer.token_text
        self._bytes = form.tokenizer.token_bytes

    def pieces(self, entries: Sequence[TokenLogprob], offset: int = 0) -> Generator[str, None, int]:
        """`offset` is where in the answer's text the first token begins. Returns where the last one ends."""
        yield '{"tokens":'
        yield from list_pieces(as_json(self._name(entry.token_id)) for entry in entries)
        yield ',"token_logprobs":'
        yield from list_pieces(_number(entry.logprob) for entry in entries)
        yield ',"top_logprobs":'
        yield from list_pieces(map(self._top, entries))
        yield ',"text_offset":'
        offsets = self._offsets(entries, offset)
        yield from list_pieces(map(str, islice(offsets, len(entries))))
        yield "}"
        return next(offsets)

    def _top(self, entry: TokenLogprob) -> str:
        if math.isnan(entry.logprob):
            return "null"
        likeliest = {self._name(token): _finite(logprob) for token, logprob in entry.top}
        # The chosen token comes first, and is always listed, even if it is not among the likeliest.
        name = self._name(entry.token_id)
        return as_json({name: 0.0} | likeliest | {name: _finite(entry.logprob)})

    def _offsets(self, entries: Sequence[TokenLogprob], offset: int) -> Iterator[int]:
        """Where each token begins in the text, and where the last ends. Tokens of one character share its place."""
        decoder = _Utf8(errors="replace")
        for entry in entries:
            yield offset
            offset += len(decoder.decode(self._raw(entry.token_id)))
        yield offset + len(decoder.decode(b"", final=True))

    def _raw(self, token_id: int) -> bytes:
        """Special tokens by name."""
        return self._bytes(token_id) or self._text(token_id).encode()


def _number(logprob: float) -> str:
    """null for the first token of a prompt."""
    return "null" if math.isnan(logprob) else repr(_finite(logprob))


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


class PromptEntries(Sequence[TokenLogprob]):
    """A prompt's tokens with their log probabilities, each built on access. That of the first is NaN."""

    def __init__(self, ids: Sequence[int], scores: PromptScores, top: int) -> None:
        self._ids = ids
        self._scores = scores
        self._top = top

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> TokenLogprob: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprob]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprob | list[TokenLogprob]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        token = self._ids[index]
        if index == 0:
            return TokenLogprob(token, math.nan, ())
        scores, row = self._scores, index - 1
        ids, logprobs = scores.top_ids[row, : self._top].tolist(), scores.top_logprobs[row, : self._top].tolist()
        top = [(each, logprob) for each, logprob in zip(ids, logprobs, strict=True) if each >= 0]
        return TokenLogprob(token, float(scores.logprobs[row]), top)

    def rank(self, index: int) -> int:
        return int(self._scores.ranks[index - 1])


class HasGenerations(Protocol):
    @property
    def generations(self) -> Sequence[Generation]: ...


class PromptReport:
    """What the answers to a request say of its prompts: their tokens, and the log probabilities of these."""

    def __init__(
        self,
        answers: HasGenerations,
        form: TokenForm,
        n: int,
        *,
        echoed: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> None:
        """`echoed`, `prompt_logprobs`: how many alternatives go with each echoed token, and with each token of
        `prompt_logprobs`; None if the request did not ask for them."""
        self._answers = answers
        self._form = form
        self._n = n
        self._echoed = echoed
        self._prompt_logprobs = prompt_logprobs

    @property
    def is_empty(self) -> bool:
        return self._echoed is None and self._prompt_logprobs is None and not self._form.lists_ids

    def entries(self, index: int) -> Sequence[TokenLogprob]:
        """The echoed prompt's, which precede those of an answer."""
        return () if self._echoed is None else self._entries(index, self._echoed)

    def fields(self, index: int) -> Iterator[str]:
        """`,"prompt_token_ids":[…],"prompt_logprobs":[null,{"42":{"logprob":…,"rank":…,"decoded_token":…},…},…]`: what
        was asked for."""
        if self._form.lists_ids:
            yield ',"prompt_token_ids":'
            yield from list_pieces(map(str, self._answers.generations[index // self._n].prompt_ids), _IDS)
        if self._prompt_logprobs is not None:
            entries = self._entries(index, self._prompt_logprobs)
            yield ',"prompt_logprobs":'
            yield from list_pieces((self._written(entries, place) for place in range(len(entries))), _ENTRIES)

    def _entries(self, index: int, top: int) -> PromptEntries:
        generation = self._answers.generations[index // self._n]
        assert generation.prompt_scores is not None
        return PromptEntries(generation.prompt_ids, generation.prompt_scores, top)

    def _written(self, entries: PromptEntries, place: int) -> str:
        if place == 0:
            return "null"
        entry = entries[place]
        ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)}
        ranked[entry.token_id] = (entry.logprob, entries.rank(place))
        return as_json(
            {
                str(token): {
                    "logprob": max(logprob, _LEAST_LOGPROB),
                    "rank": rank,
                    "decoded_token": self._form.tokenizer.token_text(token),
                }
                for token, (logprob, rank) in ranked.items()
            }
        )

"""Log probabilities as OpenAI's two APIs write them, in pieces of JSON that each take little time to make."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from cllm.server.sliced import as_json, list_pieces

if TYPE_CHECKING:
    from cllm.engine.sampling import TokenLogprob
    from cllm.text.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write."""
_KEPT = 8192
"""Tokens whose JSON is kept; the same few hundred come again and again."""


class ChatLogprobs:
    """`{"content":[{"token":…,"logprob":…,"bytes":…,"top_logprobs":[…]},…],"refusal":null}`"""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
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
        raw = list(self._tokenizer.token_bytes(token_id)) or None
        written = f'{{"token":{as_json(self._tokenizer.token_text(token_id))},"logprob":', f',"bytes":{as_json(raw)}'
        self._written[token_id] = written
        return written


class CompletionLogprobs:
    """`{"tokens":[…],"token_logprobs":[…],"top_logprobs":[{…},…],"text_offset":[…]}`"""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._text = tokenizer.token_text

    def length(self, entries: Iterable[TokenLogprob]) -> int:
        """Characters of text that the tokens are."""
        return sum(len(self._text(entry.token_id)) for entry in entries)

    def pieces(self, entries: Sequence[TokenLogprob], offset: int = 0) -> Iterator[str]:
        """`offset` is where in the answer's text the first token begins."""
        yield '{"tokens":'
        yield from list_pieces(as_json(self._text(entry.token_id)) for entry in entries)
        yield ',"token_logprobs":'
        yield from list_pieces(_number(entry.logprob) for entry in entries)
        yield ',"top_logprobs":'
        yield from list_pieces(map(self._top, entries))
        yield ',"text_offset":'
        yield from list_pieces(map(str, self._offsets(entries, offset)))
        yield "}"

    def _top(self, entry: TokenLogprob) -> str:
        if math.isnan(entry.logprob):
            return "null"
        likeliest = {self._text(token): _finite(logprob) for token, logprob in entry.top}
        # The chosen token is always there, also when it is not among the likeliest.
        return as_json(likeliest | {self._text(entry.token_id): _finite(entry.logprob)})

    def _offsets(self, entries: Sequence[TokenLogprob], offset: int) -> Iterator[int]:
        for entry in entries:
            yield offset
            offset += len(self._text(entry.token_id))


def _number(logprob: float) -> str:
    """The first token of a prompt has none."""
    return "null" if math.isnan(logprob) else repr(_finite(logprob))


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)

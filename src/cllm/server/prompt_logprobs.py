"""Log probabilities of prompts in answers: OpenAI's `echo` with `logprobs`, and vLLM's `prompt_logprobs`.

Those of a long prompt are many. They are kept as arrays, and written a few tokens at a time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from cllm.engine.sampling import TokenLogprob
from cllm.server.sliced import as_json, list_pieces, slices
from cllm.server.sse import Events, EventStream, Source

if TYPE_CHECKING:
    from cllm.backends.base import PromptScores
    from cllm.generation import Generation
    from cllm.server.pulse import Progress, Wire
    from cllm.text.tokenizer import Tokenizer

T = TypeVar("T")
In = TypeVar("In", contravariant=True)

_ENTRIES = 64
_LEAST_LOGPROB = -9999.0


class PromptEntries(Sequence[TokenLogprob]):
    """A prompt's tokens with their log probabilities, each made when it is looked at. The first has none: NaN."""

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
    """What the answers to a request tell of their prompts."""

    def __init__(
        self,
        answers: HasGenerations,
        tokenizer: Tokenizer,
        n: int,
        *,
        echoed: int | None = None,
        told: int | None = None,
    ) -> None:
        """`echoed`: so many alternatives go with the tokens that are echoed, `told`: with `prompt_logprobs`; None: such
        log probabilities were not asked for."""
        self._answers = answers
        self._text = tokenizer.token_text
        self._n = n
        self._echoed = echoed
        self._told = told

    def entries(self, index: int) -> Sequence[TokenLogprob]:
        """What goes in front of the log probabilities of an answer."""
        return () if self._echoed is None else self._entries(index, self._echoed)

    def field(self, index: int) -> Iterator[str]:
        """`,"prompt_logprobs":[null,{"42":{"logprob":…,"rank":…,"decoded_token":…},…},…]`, if it was asked for."""
        if self._told is not None:
            entries = self._entries(index, self._told)
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
        told = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, 1)}
        told[entry.token_id] = (entry.logprob, entries.rank(place))
        return as_json(
            {
                str(token): {
                    "logprob": max(logprob, _LEAST_LOGPROB),
                    "rank": rank,
                    "decoded_token": self._text(token),
                }
                for token, (logprob, rank) in told.items()
            }
        )


class PiecewiseEvents(Events[In], Protocol[In]):
    """Events of which the first ones may be long."""

    def pieces(self, item: In, /) -> Iterator[str]: ...


class PiecewiseStream(EventStream):
    """A stream whose events are written a slice at a time: others' go out between two of them."""

    def __init__(self, source: Source[T], events: PiecewiseEvents[T], progress: Progress | None = None) -> None:
        super().__init__(source, events, progress)
        self._pieces = events.pieces

    async def _write_batch(self, wire: Wire, before: str, batch: Sequence[Any]) -> None:
        for part in slices(chain([before], chain.from_iterable(map(self._pieces, batch)))):
            await wire.write(part, more=True)
            await asyncio.sleep(0)

"""A step before it is computed: which tokens of which sequences, and which of them are drafts."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from cllm.backends.base import Chunk
from cllm.engine.budget import pairs
from cllm.engine.request import Sequence

T = TypeVar("T")
_PROMISED = array("i", [0])


@dataclass(slots=True)
class StepPlan:
    """One step: `chunks[i]` belongs to `sequences[i]`."""

    sequences: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    prompt_tokens: int = 0
    prompt_cost: float = 0.0
    """The same, weighted by what a token costs (`Sequence.weight`)."""
    pairs: float = 0.0
    """What these look back at: `budget.pairs`."""
    decode_rows: int = 0
    drafted: int = 0
    """Drafted tokens after those of the decode rows."""
    forced: int = 0
    """Tokens before those of the decode rows that a grammar forced."""
    epochs: list[int] | None = None
    """`Sequence.epoch` of each at launch, if several steps may be in flight: a sequence that stopped running since
    then, and perhaps came back, has no use for the result."""

    def add_prompt(self, sequence: Sequence, count: int) -> None:
        end = sequence.num_computed + sequence.submitted + count
        self.sequences.append(sequence)
        self.chunks.append(_chunk(sequence, end, sequence.generates and end == len(sequence.tokens)))
        self.prompt_tokens += count
        self.prompt_cost += count * sequence.weight
        self.pairs += pairs(count, sequence.position)

    @property
    def rows(self) -> int:
        """Tokens of answers that are computed."""
        return self.decode_rows + self.beside_rows

    @property
    def beside_rows(self) -> int:
        """Tokens that are computed together with the rows' own."""
        return self.drafted + self.forced

    def cut_forced(self, index: int, count: int) -> None:
        """Compute only `count` of the forced tokens of a row; only with the last one does it choose a token."""
        chunk = self.chunks[index]
        chunk.wanted_logits = int(count == len(chunk.tokens))
        chunk.tokens = chunk.tokens[:count]
        self.forced += count - 1

    def add_draft(self, index: int, tokens: array[int]) -> None:
        """Compute drafted tokens together with a row's own."""
        chunk = self.chunks[index]
        chunk.tokens = chunk.tokens + tokens
        chunk.wanted_logits += len(tokens)
        self.drafted += len(tokens)

    @classmethod
    def again(cls, sequence: Sequence, chunk: Chunk) -> StepPlan | None:
        """One sequence's part of a step that failed, without drafts; None if it is no longer running."""
        if not sequence.running or sequence.end != chunk.start:
            return None
        end = sequence.num_computed + len(chunk.tokens) - drafted_in(chunk)
        return cls([sequence], [_chunk(sequence, end, chunk.wanted_logits > 0)])

    def settle(self, index: int) -> bool:
        """A chunk is no longer in flight. False if its sequence has no use for it any more."""
        sequence, chunk = self.sequences[index], self.chunks[index]
        if not sequence.running:
            return False
        if self.epochs is not None:
            if sequence.epoch != self.epochs[index]:
                return False
            sequence.submitted -= len(chunk.tokens)
            sequence.promised -= chunk.wanted_logits
        return True


def drafted_in(chunk: Chunk) -> int:
    """How many of its tokens are drafts: logits are wanted of these and of the token before."""
    return max(0, chunk.wanted_logits - 1)


def _chunk(sequence: Sequence, end: int, wants_logits: bool) -> Chunk:
    start, dropped = sequence.num_computed + sequence.submitted, sequence.dropped
    reading = sequence.reading
    return Chunk(
        sequence.tokens[start:end],
        start - dropped,
        int(wants_logits),
        slot=sequence.slot,
        blocks=sequence.blocks,
        local=sequence.local,
        state=sequence.state,
        dropped=dropped,
        kept=sequence.kept,
        row=sequence.row,
        asks=None if reading is None else reading.ask(sequence.tokens, start, end),
        known=sequence.rebuilt,
    )


def row_of(sequence: Sequence) -> Chunk:
    """A decode row: the one missing token, after any forced ones, or the token that the step in flight will choose."""
    start, dropped = sequence.num_computed + sequence.submitted, sequence.dropped
    follows = sequence.promised > 0
    return Chunk(
        _PROMISED if follows else sequence.tokens[start:],
        start - dropped,
        1,
        sequence.slot,
        sequence.blocks,
        dropped,
        sequence.kept,
        sequence.row,
        follows,
        sequence.local,
        sequence.state,
        known=sequence.rebuilt,
    )


log = logging.getLogger("cllm.engine")

_NONE: array[int] = array("i")


class Drafter(Protocol):
    """Called on the engine's thread while a step is planned, so it must be fast. It may keep state in
    `sequence.drafts`, which lives as long as the sequence, also while that waits (its tokens only ever grow)."""

    def begin_step(self, rows: int, prompts_wait: bool) -> int:
        """How many drafted tokens a step of `rows` answers may have in all. `prompts_wait`: there are prompts to
        compute or to admit."""

    def propose(self, sequence: Sequence, most: int) -> array[int]:
        """What may follow `sequence.tokens`: up to `most` tokens (at least 1), or none."""

    def observe_step(self, rows: int, drafted: int, seconds: float, prompt_tokens: int) -> None:
        """How long a step took, with `rows` answers, and drafted and prompt tokens beside them."""

    def end(self, sequence: Sequence) -> None:
        """The answer has ended, for whatever reason."""


class Drafting:
    """Speculative decoding: drafted tokens are computed as rows of the same step, and kept only if they are right.

        tokens   … a b c            c is known and not computed
        draft            d e f      a guess of what follows
        chunk          [ c d e f ]  with the logits of all four
        chosen           d e g      from the rows of c, d, e: d and e are as drafted, g is not, and f is dropped

    Every token is chosen by the sequence's own chooser from the row of the token before it, one after another, as
    without drafts. A draft only decides which rows are computed together, so it changes no answer. Memory after the
    last right token is freed before the next step.

    If the drafter fails once, it is not used again, and nothing else is affected.
    """

    def __init__(self, drafter: Drafter, most: int) -> None:
        """`most`: how many drafted tokens the backend takes in a step, at least 1."""
        self._drafter: Drafter | None = drafter
        self._most = most

    @property
    def alive(self) -> bool:
        """Whether there may be drafts."""
        return self._drafter is not None

    def begin_step(self, rows: int, prompts_wait: bool) -> int:
        return max(0, min(self._ask(lambda drafter: drafter.begin_step(rows, prompts_wait), 0), self._most))

    def propose(self, sequence: Sequence, most: int) -> array[int]:
        return self._ask(lambda drafter: drafter.propose(sequence, most)[:most], _NONE)

    def observe_step(self, rows: int, drafted: int, seconds: float, prompt_tokens: int) -> None:
        self._ask(lambda drafter: drafter.observe_step(rows, drafted, seconds, prompt_tokens), None)

    def end(self, sequence: Sequence) -> None:
        self._ask(lambda drafter: drafter.end(sequence), None)

    def _ask(self, question: Callable[[Drafter], T], otherwise: T) -> T:
        if self._drafter is not None:
            try:
                return question(self._drafter)
            except Exception:
                self._drafter = None
                log.exception("drafting failed; continuing without drafts")
        return otherwise

"""A step before it is computed: which tokens of which sequences."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from cllm.backends.base import Chunk
from cllm.engine.costs import pairs
from cllm.engine.request import Sequence

_PROMISED = array("i", [0])


@dataclass(slots=True)
class Plan:
    """One step: `chunks[i]` belongs to `sequences[i]`."""

    sequences: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    prompt_tokens: int = 0
    prompt_cost: float = 0.0
    """The same, in tokens that cost as much as those of which nothing is read."""
    pairs: float = 0.0
    """What these look back at: `costs.pairs`."""
    decode_rows: int = 0
    drafted: int = 0
    """Tokens behind those of the decode rows that are only drafts."""
    forced: int = 0
    """Tokens in front of theirs that no draw chose."""
    stays: list[int] | None = None
    """Of each sequence how often it had left the running ones, if the step is one of several under way: whoever left
    since then, and perhaps came back, has no use for the result."""

    def add_prompt(self, sequence: Sequence, count: int) -> None:
        end = sequence.num_computed + sequence.submitted + count
        self.sequences.append(sequence)
        self.chunks.append(_chunk(sequence, end, sequence.answers and end == len(sequence.tokens)))
        self.prompt_tokens += count
        self.prompt_cost += count * sequence.weight
        self.pairs += pairs(count, sequence.position)

    @property
    def rows(self) -> int:
        """All that is computed of answers."""
        return self.decode_rows + self.beside_rows

    @property
    def beside_rows(self) -> int:
        """All that is computed together with the rows' own tokens."""
        return self.drafted + self.forced

    def cut_forced(self, index: int, count: int) -> None:
        """Compute so many of the tokens that a row has to catch up with; with the last of them it is a row."""
        chunk = self.chunks[index]
        chunk.wanted_logits = int(count == len(chunk.tokens))
        chunk.tokens = chunk.tokens[:count]
        self.forced += count - 1

    def add_draft(self, index: int, tokens: array[int]) -> None:
        """Compute what may follow the token of a row together with it."""
        chunk = self.chunks[index]
        chunk.tokens = chunk.tokens + tokens
        chunk.wanted_logits += len(tokens)
        self.drafted += len(tokens)

    @classmethod
    def again(cls, sequence: Sequence, chunk: Chunk) -> Plan | None:
        """What one sequence had in a step that did not happen, less any drafts; None if it is not there any more."""
        if not sequence.running or sequence.end != chunk.start:
            return None
        end = sequence.num_computed + len(chunk.tokens) - drafted_in(chunk)
        return cls([sequence], [_chunk(sequence, end, chunk.wanted_logits > 0)])

    def lands(self, index: int) -> bool:
        """A chunk is no longer under way. False: its sequence has no use for it any more."""
        sequence, chunk = self.sequences[index], self.chunks[index]
        if not sequence.running:
            return False
        if self.stays is not None:
            if sequence.stay != self.stays[index]:
                return False
            sequence.submitted -= len(chunk.tokens)
            sequence.promised -= chunk.wanted_logits
        return True


def drafted_in(chunk: Chunk) -> int:
    """How many of its tokens are drafts: of the one before the first of them the logits are wanted, too."""
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
        dropped=dropped,
        kept=sequence.kept,
        row=sequence.row,
        asks=None if reading is None else reading.ask(sequence.tokens, start, end),
    )


def row_of(sequence: Sequence) -> Chunk:
    """The one token that is missing, with those that no draw chose, or the one that the step under way will give."""
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
    )

"""Choosing tokens on the device: for the same logits, parameters and random number the token the host would choose.

`read_draws` gathers on the host what the chunks say, and its parts go to the device with the rest of the step; `choose`
queues the choice. A `Sampler` is the arithmetic: kernels on a GPU, plain torch elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cllm.backends.base import Bias, Chunk, Draw, Drawn, Seen
from cllm.backends.torch.batch import Ints
from cllm.backends.torch.staging import Numbers, download
from cllm.errors import BackendError

Floats = NDArray[np.float64]
Mask = NDArray[np.int32]

LOGPROB_ROWS = 16
"""Rows whose most likely tokens are found at once: that takes at least eight bytes per token and row."""
_NO_ID = 0x7FFFFFFF
_NO_RATES = (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class TokenBiases:
    """Tokens of each row, `ids[starts[row]:starts[row + 1]]`, and what is added to their logits."""

    ids: Tensor
    values: Tensor
    starts: Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    ids: Tensor
    counts: Tensor
    starts: Tensor
    rates: Tensor
    """Repetition, frequency and presence penalty of each row."""
    follows: Tensor
    """For each row: whose last token counts once more; -1: none."""


class Sampler(ABC):
    """What changes logits, chooses, and begins with what was chosen. Each row is processed by itself."""

    @abstractmethod
    def prepare(
        self, tokens: Tensor, follows: Tensor, last: Tensor, table: Tensor, firsts: Tensor, tables: Tensor
    ) -> None:
        """As `batch.Prepare` says."""

    @abstractmethod
    def bias(self, logits: Tensor, listed: TokenBiases) -> None: ...

    @abstractmethod
    def penalise(self, logits: Tensor, seen: Penalties, last: Tensor) -> None: ...

    @abstractmethod
    def choose(self, logits: Tensor, params: Tensor | None, owners: Tensor, last: Tensor) -> Tensor:
        """A token for every row, int32; -1: the row has no finite best. It is recorded in `last` for the row's owner.

        `params`, float64: temperature, top_k, top_p, min_p and uniform of each; None if all rows take the best.
        """


@dataclass(frozen=True, slots=True)
class HostDraws:
    """The draws of a step, in the order of the chunks that want them."""

    counts: list[int]
    """How many each chunk has."""
    owners: Ints
    """For each: whose last token it becomes; -1: nobody's."""
    rows: Ints | None = None
    """Which row of the logits each takes; None: its own."""
    params: Floats | None = None
    bias: tuple[Ints, Floats, Ints] | None = None
    penalties: tuple[Ints, Ints, Ints, Floats, Ints] | None = None
    masked: list[int] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    with_logprobs: list[int] = field(default_factory=list)
    """Draws that ask for log probabilities."""
    tops: list[int] = field(default_factory=list)
    """How many of the most likely tokens each of them asks for."""

    @property
    def simple(self) -> bool:
        """Whether each takes the best of its own row, with biases at most."""
        return (
            self.rows is None
            and self.params is None
            and self.penalties is None
            and not self.with_logprobs + self.masked
        )

    def parts(self) -> list[Numbers]:
        """What the device has to know of them, in the order in which `choose` takes it."""
        parts: list[Numbers] = [self.owners]
        if self.rows is not None:
            parts.append(self.rows)
        if self.with_logprobs:
            parts.append(np.array(self.with_logprobs, np.int32))
        if self.masked:
            parts += [np.array(self.masked, np.int32), np.concatenate(self.masks)]
        for group in (self.bias, self.penalties):
            parts.extend(group or ())
        if self.params is not None:
            parts.append(self.params)
        return parts


def read_draws(chunks: Sequence[Chunk], vocab_size: int) -> HostDraws:
    """Everything but masks is copied. Raises `BackendError` for token ids that there are not."""
    wanting = [chunk for chunk in chunks if chunk.wanted_logits]
    counts = [len(chunk.draws) for chunk in wanting]
    if counts.count(1) == len(counts):
        draws, rows = [chunk.draws[0] for chunk in wanting], None
        owners = np.array([chunk.row for chunk in wanting], np.int32)
    else:
        draws = [draw for chunk in wanting for draw in chunk.draws]
        rows = np.repeat(np.arange(len(wanting), dtype=np.int32), counts)
        owners = np.full(len(draws), -1, np.int32)
        owners[np.flatnonzero(np.diff(rows, prepend=-1))] = [chunk.row for chunk in wanting if chunk.draws]
    if draws and _is_best(draws[0]) and all(draw is draws[0] for draw in draws):  # most are
        return HostDraws(counts, owners, rows, bias=_biases_alike(draws[0].bias, len(draws), vocab_size))
    return _of_many_kinds(wanting, HostDraws(counts, owners, rows), draws, vocab_size)


def _is_best(draw: Draw) -> bool:
    """Whether it is the best token, with biases at most."""
    return draw.temperature == 0.0 and draw.logprobs is None and draw.penalties is None and draw.mask is None


def _of_many_kinds(wanting: Sequence[Chunk], drawn: HostDraws, draws: list[Draw], vocab_size: int) -> HostDraws:
    if not draws:
        return drawn
    *numbers, logprobs, biases, penalties, masks = zip(*draws, strict=True)
    follows = [chunk.row if chunk.follows else -1 for chunk in wanting for _ in chunk.draws]
    with_logprobs = [place for place, count in enumerate(logprobs) if count is not None]
    return replace(
        drawn,
        params=np.array(numbers, np.float64).T.copy() if any(numbers[0]) else None,
        bias=_biases(biases, vocab_size),
        penalties=_penalties(penalties, follows, vocab_size),
        masked=[place for place, mask in enumerate(masks) if mask is not None],
        masks=[_checked(mask, vocab_size) for mask in masks if mask is not None],
        with_logprobs=with_logprobs,
        tops=[logprobs[place] for place in with_logprobs],
    )


def _biases_alike(bias: Bias | None, count: int, vocab_size: int) -> tuple[Ints, Floats, Ints] | None:
    if bias is None:
        return None
    ids = _ids([bias.ids], vocab_size)
    starts = np.arange(count + 1, dtype=np.int32) * np.int32(len(ids))
    return np.tile(ids, count), np.tile(bias.values, count), starts


def _checked(mask: Mask, vocab_size: int) -> Mask:
    if mask.shape != ((vocab_size + 31) // 32,):
        raise BackendError(f"a mask has the shape {mask.shape}, but the vocabulary has {vocab_size} tokens")
    return mask


def _biases(biases: Sequence[Bias | None], vocab_size: int) -> tuple[Ints, Floats, Ints] | None:
    given = [bias for bias in biases if bias is not None]
    if not given:
        return None
    ids = _ids([bias.ids for bias in given], vocab_size)
    starts = _starts([0 if bias is None else len(bias.ids) for bias in biases])
    return ids, np.concatenate([bias.values for bias in given]), starts


def _penalties(
    seen: Sequence[Seen | None], follows: list[int], vocab_size: int
) -> tuple[Ints, Ints, Ints, Floats, Ints] | None:
    given = [each for each in seen if each is not None]
    if not given:
        return None
    ids = _ids([each.ids for each in given], vocab_size)
    counts = np.concatenate([each.counts for each in given])
    starts = _starts([0 if each is None else len(each.ids) for each in seen])
    rates = np.array([_NO_RATES if each is None else each[2:] for each in seen])
    unknown = [-1 if each is None else row for each, row in zip(seen, follows, strict=True)]
    return ids, counts, starts, rates, np.array(unknown, np.int32)


def _ids(parts: Sequence[Ints], vocab_size: int) -> Ints:
    ids = np.concatenate(parts)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise BackendError(f"a draw names a token outside the vocabulary of {vocab_size}")
    return ids


def _starts(counts: list[int]) -> Ints:
    return np.cumsum([0, *counts], dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a step's draws gave, on its way to the host."""

    counts: list[int]
    tokens: Tensor
    with_logprobs: list[int]
    tops: list[int]
    logprobs: Tensor | None
    """For each draw with log probabilities: its own, then ids and then log probabilities of the most likely tokens."""

    def read(self) -> list[list[Drawn]]:
        """Once the copies are there."""
        drawn = list(map(_plain, self.tokens.tolist()))
        if self.logprobs is not None:
            for place, asked, (logprob, *top) in zip(
                self.with_logprobs, self.tops, self.logprobs.tolist(), strict=True
            ):
                most = len(top) // 2  # as many as the draw with the most alternatives has
                count = min(asked, most)
                pairs = zip(map(int, top[:count]), top[most : most + count], strict=True)
                drawn[place] = Drawn(drawn[place].token_id, logprob, tuple(pair for pair in pairs if pair[1] > -np.inf))
        if len(drawn) == len(self.counts):
            return [[each] for each in drawn]
        rest = iter(drawn)
        return [[next(rest) for _ in range(count)] for count in self.counts]


def chosen_already(draws: HostDraws, tokens: Tensor) -> Chosen:
    return Chosen(draws.counts, download(tokens), [], [], None)


@lru_cache(maxsize=1 << 14)
def _plain(token: int) -> Drawn:
    return Drawn(token)


def choose(logits: Tensor, draws: HostDraws, moved: Sequence[Tensor], sampler: Sampler, last: Tensor) -> Chosen:
    """Queue the choice from `logits`, which may be changed.

    `moved` are the draws' parts on the device; `last` has the last token of every row number.
    """
    part = iter(moved)
    owners = next(part)
    if draws.rows is not None:
        logits = logits[next(part).long()]
    kept, with_logprobs = logits, None
    if draws.with_logprobs:
        with_logprobs = next(part).long()
        kept = logits[with_logprobs]  # a copy, so it stays as the model gave it
    if draws.masked:
        places = next(part).long()
        bits = next(part).view(len(draws.masked), -1)
        logits[places] = logits[places].masked_fill(~_unpacked(bits, logits.shape[1]), -torch.inf)
    if draws.bias is not None:
        sampler.bias(logits, TokenBiases(*(next(part) for _ in range(3))))
    if draws.penalties is not None:
        sampler.penalise(logits, Penalties(*(next(part) for _ in range(5))), last)
    params = None if draws.params is None else next(part)
    tokens = sampler.choose(logits, params, owners, last)
    logprobs = None if with_logprobs is None else download(_logprobs(kept, tokens[with_logprobs], max(draws.tops)))
    return Chosen(draws.counts, download(tokens), draws.with_logprobs, draws.tops, logprobs)


def _unpacked(bits: Tensor, count: int) -> Tensor:
    """The first `count` bits of each row, the lowest of a word first."""
    shifts = torch.arange(32, device=bits.device, dtype=torch.int32)
    return (bits[:, :, None] >> shifts & 1).bool().flatten(1)[:, :count]


def _logprobs(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    pieces = zip(logits.split(LOGPROB_ROWS), tokens.split(LOGPROB_ROWS), strict=True)
    return torch.cat([_logprobs_of(*piece, most) for piece in pieces])


def _logprobs_of(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    wide = logits.double()
    totals = wide.logsumexp(1, keepdim=True)
    own = wide.gather(1, tokens.clamp(min=0).long()[:, None]) - totals
    most = min(most, logits.shape[1])
    if most == 0:
        return own
    # Ordered by value, equal ones by id: one number that says both, as no two tokens have the same.
    bits = (logits + 0.0).view(torch.int32)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    key |= _NO_ID - torch.arange(logits.shape[1], device=logits.device)
    ids = _NO_ID - (key.topk(most, dim=1).values & _NO_ID)
    return torch.cat([own, ids.double(), wide.gather(1, ids) - totals], dim=1)

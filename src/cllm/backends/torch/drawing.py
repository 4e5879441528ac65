"""Choosing tokens on the device: for the same logits, parameters and random number the token the host would choose.

`read_draws` gathers on the host what the chunks say; `Drawing` takes it to the device and chooses. A `Chooser` is the
arithmetic: kernels on a GPU, plain torch elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cllm.backends.base import Bias, Chunk, Drawn, Seen
from cllm.backends.torch.batch import Ints
from cllm.backends.torch.staging import Numbers, download, upload
from cllm.errors import BackendError

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

LOGPROB_ROWS = 16
"""Rows whose most likely tokens are looked for at once: that takes eight bytes and more for each token of each."""
_NO_ID = 0x7FFFFFFF
_NO_RATES = (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Listed:
    """Tokens of each row, `ids[starts[row]:starts[row + 1]]`, and what is added to their logits."""

    ids: torch.Tensor
    values: torch.Tensor
    starts: torch.Tensor


@dataclass(frozen=True, slots=True)
class Penalised:
    ids: torch.Tensor
    counts: torch.Tensor
    starts: torch.Tensor
    rates: torch.Tensor
    """Of each row repetition, frequency, presence."""
    follows: torch.Tensor
    """Of each row whose last token counts once more; -1: nobody's."""


class Chooser(ABC):
    """What changes logits, chooses, and begins with what was chosen. Each row is processed by itself."""

    @abstractmethod
    def prepare(
        self,
        tokens: torch.Tensor,
        follows: torch.Tensor,
        last: torch.Tensor,
        table: torch.Tensor,
        firsts: torch.Tensor,
        tables: torch.Tensor,
    ) -> None:
        """As `batch.Prepare` says."""

    @abstractmethod
    def bias(self, logits: torch.Tensor, listed: Listed) -> None: ...

    @abstractmethod
    def penalise(self, logits: torch.Tensor, seen: Penalised, last: torch.Tensor) -> None: ...

    @abstractmethod
    def choose(
        self, logits: torch.Tensor, params: torch.Tensor | None, owners: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        """A token for every row, int32; -1 where a row has no finite best. It is noted in `last` for who owns the row.

        `params`, float64: temperature, top_k, top_p, min_p and uniform of each; None if all rows take the best.
        """


@dataclass(frozen=True, slots=True)
class HostDraws:
    """The draws of a step, in the order of the chunks that want them."""

    counts: list[int]
    """How many each chunk has."""
    owners: Ints
    rows: Ints | None
    """Which row of the logits each takes; None: its own."""
    params: Floats | None
    bias: tuple[Ints, Floats, Ints] | None
    penalties: tuple[Ints, Ints, Ints, Floats, Ints] | None
    masked: list[int]
    masks: list[Mask]
    told: list[int]
    """Draws that ask for log probabilities."""
    most: int
    """Most likely tokens that any of them asks for."""

    @property
    def adjusts(self) -> bool:
        return self.bias is not None or self.penalties is not None or bool(self.masked)


def read_draws(chunks: Sequence[Chunk], vocab_size: int) -> HostDraws:
    """Everything is copied. Raises `BackendError` for token ids that there are not."""
    wanting = [chunk for chunk in chunks if chunk.wants_logits]
    counts = [len(chunk.draws) for chunk in wanting]
    draws = [draw for chunk in wanting for draw in chunk.draws]
    single = len(draws) == len(wanting) and 0 not in counts
    if single:
        owners = np.array([chunk.row for chunk in wanting], np.int32)
        follows = [chunk.row if chunk.follows else -1 for chunk in wanting]
    else:
        owners = np.full(len(draws), -1, np.int32)
        first = np.cumsum([0, *counts[:-1]], dtype=np.intp)
        owners[first[np.array(counts) > 0]] = [chunk.row for chunk in wanting if chunk.draws]
        follows = [chunk.row if chunk.follows else -1 for chunk in wanting for _ in chunk.draws]
    told = [place for place, draw in enumerate(draws) if draw.logprobs is not None]
    masked = [place for place, draw in enumerate(draws) if draw.mask is not None]
    return HostDraws(
        counts=counts,
        owners=owners,
        rows=None if single else np.repeat(np.arange(len(wanting), dtype=np.int32), counts),
        params=np.array([draw[:5] for draw in draws]) if any(draw.temperature for draw in draws) else None,
        bias=_biases([draw.bias for draw in draws], vocab_size),
        penalties=_penalties([draw.penalties for draw in draws], follows, vocab_size),
        masked=masked,
        masks=[_checked(draw.mask, vocab_size) for draw in draws if draw.mask is not None],
        told=told,
        most=max((draws[place].logprobs or 0 for place in told), default=0),
    )


def _checked(mask: Mask, vocab_size: int) -> Mask:
    if mask.shape != (vocab_size,):
        raise BackendError(f"a mask has the shape {mask.shape}, of {vocab_size} tokens there are")
    return mask.copy()


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
        raise BackendError(f"a draw names a token that is not there, of {vocab_size} there are")
    return ids


def _starts(counts: list[int]) -> Ints:
    return np.cumsum([0, *counts], dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a step's draws gave, on its way to the host."""

    counts: list[int]
    tokens: torch.Tensor
    told: list[int]
    logprobs: torch.Tensor | None
    """Of each draw that is told its log probability, then ids and then log probabilities of the most likely tokens."""

    def read(self) -> list[list[Drawn]]:
        """Once the copies are there."""
        drawn = [Drawn(token) for token in self.tokens.tolist()]
        if self.logprobs is not None:
            for place, (logprob, *top) in zip(self.told, self.logprobs.tolist(), strict=True):
                most = len(top) // 2
                pairs = zip(map(int, top[:most]), top[most:], strict=True)
                drawn[place] = Drawn(drawn[place].token_id, logprob, tuple(pair for pair in pairs if pair[1] > -np.inf))
        if len(drawn) == len(self.counts):
            return [[each] for each in drawn]
        rest = iter(drawn)
        return [[next(rest) for _ in range(count)] for count in self.counts]


def choose(logits: torch.Tensor, draws: HostDraws, chooser: Chooser, last: torch.Tensor) -> Chosen:
    """Queue the choice from `logits`, which may be changed. `last` has the last token of every row number."""
    device = logits.device
    parts: list[Numbers] = [draws.owners]
    if draws.rows is not None:
        parts.append(draws.rows)
    for group in (draws.bias, draws.penalties):
        parts.extend(group or ())
    if draws.params is not None:
        parts.append(draws.params)
    moved = iter(upload(parts, device))
    owners = next(moved)
    if draws.rows is not None:
        logits = logits[next(moved).long()]
    told = draws.told
    kept = logits
    if told and draws.adjusts:
        kept = logits[_indices(told, device)]
    elif len(told) < len(logits):
        kept = logits[_indices(told, device)] if told else logits[:0]
    if draws.masked:
        allowed = torch.from_numpy(np.stack(draws.masks)).to(device, non_blocking=True)
        places = _indices(draws.masked, device)
        logits[places] = logits[places] + torch.where(allowed, 0.0, -torch.inf)
    if draws.bias is not None:
        ids, values, starts = (next(moved) for _ in range(3))
        chooser.bias(logits, Listed(ids, values, starts))
    if draws.penalties is not None:
        chooser.penalise(logits, Penalised(*(next(moved) for _ in range(5))), last)
    params = None if draws.params is None else next(moved)
    tokens = chooser.choose(logits, params, owners, last)
    logprobs = download(_logprobs(kept, tokens[_indices(told, device)], draws.most)) if told else None
    return Chosen(draws.counts, download(tokens), told, logprobs)


def _indices(places: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(places, dtype=torch.long).to(device, non_blocking=True)


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> torch.Tensor:
    pieces = zip(logits.split(LOGPROB_ROWS), tokens.split(LOGPROB_ROWS), strict=True)
    return torch.cat([_logprobs_of(*piece, most) for piece in pieces])


def _logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> torch.Tensor:
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

"""From logits to tokens, the same for every backend.

The order of operations on a row:

1. the token mask, `logit_bias`, `min_tokens` (which forbids the tokens that end an answer) and `ignore_eos` (which
   always forbids the model's own end of text, as llama-server does: nothing sensible follows it);
2. repetition, frequency and presence penalties;
3. the best token if greedy (the lowest id among equals), otherwise
4. temperature, `top_k`, `top_p`, `min_p`, and one draw.

Steps 1 to 3 are vLLM's, and so is temperature before the truncations: they act on the distribution that is
drawn from. `min_p` comes last, as in transformers, SGLang and llama.cpp; vLLM has it before `top_k`. It compares
a token with the best one alone, so coming last it changes nothing for the other two; coming first it would take
mass away that `top_p` counts.

Log probabilities are those of the model itself, before all of this (as OpenAI's, and vLLM's default).
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cllm.backends.base import Bias, Draw, Drawn
from cllm.engine.draw import Constraint, Mask, Penalties, Row, leaves_some, mix64, uniform
from cllm.engine.params import SamplingParams
from cllm.engine.row_sampler import DEFAULT_SAMPLER, RowSampler
from cllm.errors import InvalidRequestError, named


class TokenLogprob:
    """A token's log probability, and the most likely tokens with theirs, best first.

    `top` has no tokens of probability zero, so it may be shorter than requested. It is stored as two arrays: an answer
    has thousands of these, and as objects the twenty pairs of one would take two thousand bytes.
    """

    __slots__ = ("_top_ids", "_top_logprobs", "logprob", "token_id")

    def __init__(self, token_id: int, logprob: float, top: Sequence[tuple[int, float]]) -> None:
        self.token_id = token_id
        self.logprob = logprob
        self._top_ids: array[int] = array("i", [each for each, _ in top])
        self._top_logprobs: array[float] = array("d", [each for _, each in top])

    @property
    def top(self) -> list[tuple[int, float]]:
        return list(zip(self._top_ids, self._top_logprobs, strict=True))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenLogprob):
            return NotImplemented
        return (self.token_id, self.logprob, self.top) == (other.token_id, other.logprob, other.top)

    def __repr__(self) -> str:
        return f"TokenLogprob({self.token_id}, {self.logprob}, {self.top})"


class Choice(NamedTuple):
    token_id: int
    logprob: TokenLogprob | None


def _without_logprob(token_id: int) -> Choice:
    """Bypasses the constructor, which takes several times as long: most rows of most steps need one."""
    return tuple.__new__(Choice, (token_id, None))


class TokenChooser:
    """Chooses the tokens of one answer: the parameters, and what they need to know of the answer so far.

    A draw depends on `seed` and the number of tokens generated, nothing else. A new chooser that was given an answer's
    tokens by `observe` continues as the old one would have.
    """

    __slots__ = (
        "_best",
        "_bias",
        "_bias_ids",
        "_early_best",
        "_end_ids",
        "_failure",
        "_forbidden",
        "_forbidden_ids",
        "_key",
        "_penalties",
        "_plain",
        "_rows",
        "_vocab_size",
        "constraint",
        "generated",
        "params",
    )

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        *,
        end_ids: frozenset[int],
        forbidden: frozenset[int] = frozenset(),
        seed: int,
        vocab_size: int,
        rows: RowSampler | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        """`end_ids` end the answer, so they wait for `min_tokens`; `forbidden` ones are never chosen. The `constraint`
        takes precedence over everything else."""
        check_token_ids(params, vocab_size)
        self.params = params
        self._rows = DEFAULT_SAMPLER if rows is None else rows
        self.constraint = constraint
        self._failure: Exception | None = None
        self._vocab_size = vocab_size
        self.generated = 0
        self._key = mix64(seed)
        self._penalties = Penalties(params, prompt)
        self._bias_ids: NDArray[np.intp] = np.array(list(params.logit_bias), np.intp)
        self._bias = np.array(list(params.logit_bias.values()), np.float64)
        self._end_ids: NDArray[np.intp] = np.array(sorted(end_ids), np.intp)
        self._forbidden = forbidden
        self._forbidden_ids: NDArray[np.intp] = np.array(sorted(forbidden), np.intp)
        # Made once: hundreds of rows use them in every step, and many share the same object.
        self._best = _best(params, forbidden)
        self._early_best = _best(params, forbidden | end_ids) if params.min_tokens else self._best
        # Then the best token is all that is needed.
        self._plain = params.greedy and params.logprobs is None and not self._adjusts

    def twin(self, seed: int) -> TokenChooser:
        """A chooser for another answer to the same prompt, made from one that has not chosen yet. What never changes is
        shared, so it is cheap, however long the prompt and the lists of tokens are."""
        twin = copy(self)
        twin._key = mix64(seed)
        twin._penalties = self._penalties.twin()
        if self.constraint is not None:
            twin.constraint = self.constraint.twin()
        return twin

    def observe(self, token_id: int) -> None:
        """Take a token as generated."""
        if self.constraint is not None:
            self.constraint.accept(token_id)
        self.generated += 1
        if self._penalties.active:
            self._penalties.observe(token_id)

    def observe_all(self, tokens: Sequence[int]) -> None:
        """Take tokens as generated, faster than one by one. If the constraint raises, `generated` says at which."""
        if self.constraint is None:
            self.generated += len(tokens)
        else:
            for token_id in tokens:
                self.constraint.accept(token_id)
                self.generated += 1
        if self._penalties.active:
            for token_id, times in Counter(tokens).items():
                self._penalties.observe(token_id, times)

    def agreed(self, tokens: Sequence[int]) -> int:
        """How many of these could come next. If the constraint fails here, it will fail again when it matters."""
        if self.constraint is None:
            return len(tokens)
        try:
            return self.constraint.agreed(tokens)
        except Exception:
            return 0

    def can_draw_ahead(self, ahead: int) -> bool:
        """Whether `draw_ahead` works after `ahead` tokens that are not known yet: of these, a backend that draws can
        count only the last one for penalties, and a constraint has to see them all."""
        if self.constraint is not None:
            return ahead == 0
        return ahead <= 1 or not self._penalties.active

    def draw_ahead(self, ahead: int, mask: Mask | Exception | None = None) -> Draw:
        """How to draw the token after the next `ahead` ones, for a backend that draws itself. If `mask` is an
        exception, `take` raises it."""
        if isinstance(mask, Exception):
            self._failure = mask
            mask = np.zeros((self._vocab_size + 31) // 32, np.int32)
        params, generated = self.params, self.generated + ahead
        if self.forced is not None:
            return Draw(0.0, 0, 1.0, 0.0, 0.0, params.logprobs, None, None, mask)
        early = self._too_early(generated, mask)
        if mask is None and params.greedy and not self._penalties.active:
            return self._early_best if early else self._best
        return Draw(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            uniform=uniform(self._key, generated),
            logprobs=params.logprobs,
            bias=(self._early_best if early else self._best).bias,
            penalties=self._penalties.seen() if self._penalties.active else None,
            mask=mask,
        )

    def take(self, drawn: Drawn) -> Choice | None:
        """Observe a token that the backend drew; None if the row had no finite best."""
        token_id = drawn.token_id
        if self._failure is not None:
            raise self._failure
        if token_id < 0:
            return None
        self.observe(token_id)
        if self.params.logprobs is None:
            return _without_logprob(token_id)
        return Choice(token_id, TokenLogprob(token_id, drawn.logprob, drawn.top))

    def choose(self, logits: Row, mask: Mask | None) -> Choice | None:
        """Choose and observe the next token; None if the row has no finite best. `mask` is the constraint's."""
        best = self._rows.argmax(logits)
        peak = float(logits[best])
        if not math.isfinite(peak):
            return None
        if self._plain and mask is None and best not in self._forbidden:
            self.generated += 1
            return _without_logprob(best)
        with np.errstate(over="ignore", under="ignore"):
            return self._choose(logits, best, peak, mask)

    def _choose(self, logits: Row, best: int, peak: float, mask: Mask | None) -> Choice | None:
        model_peak = peak
        if (forced := self.forced) is not None:
            return self._chosen(forced, logits, model_peak)
        values = self._adjusted(logits, best, mask)
        if values is not logits:
            best = self._rows.argmax(values)
            peak = float(values[best])
            if not math.isfinite(peak):
                return None
        return self._chosen(best if self.params.greedy else self._draw(values, peak), logits, model_peak)

    def _chosen(self, token_id: int, logits: Row, model_peak: float) -> Choice:
        self.observe(token_id)
        if self.params.logprobs is None:
            return Choice(token_id, None)
        return Choice(token_id, _logprob(self._rows, logits, model_peak, token_id, self.params.logprobs))

    @property
    def forced(self) -> int | None:
        """The token that must come next, if there is only one."""
        if self.constraint is None or not self.constraint.forced:
            return None
        return self.constraint.forced[0]

    def _too_early(self, generated: int, mask: Mask | None) -> bool:
        """Whether `min_tokens` forbids an end. Not if the mask allows nothing else."""
        return generated < self.params.min_tokens and (mask is None or leaves_some(mask, self._end_ids))

    @property
    def _adjusts(self) -> bool:
        """Whether anything but a mask or a forbidden token may change the choice."""
        return self._penalties.active or len(self._bias) > 0 or self.generated < self.params.min_tokens

    def _adjusted(self, logits: Row, best: int, mask: Mask | None) -> Row:
        """The row after steps 1 and 2: a copy, or `logits` itself if nothing applies."""
        # Greedily, a forbidden token matters only if it is the best.
        forbids = len(self._forbidden) > 0 and (not self.params.greedy or best in self._forbidden)
        if mask is None and not (forbids or self._adjusts):
            return logits
        values = logits.copy() if mask is None else self._rows.masked(logits, mask)
        if len(self._bias):
            values[self._bias_ids] = values[self._bias_ids] + self._bias
        if self._too_early(self.generated, mask):
            values[self._end_ids] = -np.inf
        values[self._forbidden_ids] = -np.inf
        if self._penalties.active:
            self._penalties.apply(values)
        return values

    def _draw(self, values: Row, peak: float) -> int:
        params = self.params
        return self._rows.draw(
            values,
            peak,
            uniform(self._key, self.generated),
            temperature=params.temperature,
            top_k=min(params.top_k, len(values)),
            top_p=params.top_p,
            min_p=params.min_p,
        )


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise `InvalidRequestError` for token ids that the vocabulary does not have."""
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        unknown = [str(token_id) for token_id in ids if not 0 <= token_id < vocab_size]
        if unknown:
            known = f"this model's ids are 0 to {vocab_size - 1}"
            raise InvalidRequestError(f"{name} has the {named('token id', unknown)}; {known}", name)


def choose(
    logits: NDArray[np.float32],
    wanted: Sequence[tuple[int, TokenChooser]],
    masks: Sequence[Mask | Exception | None] | None = None,
) -> list[Choice | Exception | None]:
    """One token for each wanted (row, chooser), with its mask if any; several choosers may share a row.

    None where a row has no finite best: it has NaN or +inf, or nothing is allowed. An exception where one was raised:
    the other choosers have chosen, so their tokens must count. `logits` is not changed.
    """
    choices: list[Choice | Exception | None] = []
    for index, (row, chooser) in enumerate(wanted):
        mask = None if masks is None else masks[index]
        if isinstance(mask, Exception):
            choices.append(mask)
            continue
        try:
            choices.append(chooser.choose(logits[row], mask))
        except Exception as error:
            choices.append(error)
    return choices


def _best(params: SamplingParams, bans: frozenset[int]) -> Draw:
    """A draw of the best token, with `logit_bias` and without banned tokens."""
    if not params.logit_bias:
        return _best_without(bans, params.logprobs)
    biased = {token: bias for token, bias in params.logit_bias.items() if token not in bans}
    ids, values = [*biased, *sorted(bans)], [*biased.values(), *[-math.inf] * len(bans)]
    bias = Bias(np.array(ids, np.int32), np.array(values, np.float64))
    return Draw(0.0, 0, 1.0, 0.0, 0.0, params.logprobs, bias, None, None)


@lru_cache(maxsize=256)
def _best_without(bans: frozenset[int], logprobs: int | None) -> Draw:
    bias = Bias(np.array(sorted(bans), np.int32), np.full(len(bans), -math.inf)) if bans else None
    return Draw(0.0, 0, 1.0, 0.0, 0.0, logprobs, bias, None, None)


def _logprob(rows: RowSampler, logits: Row, peak: float, token_id: int, count: int) -> TokenLogprob:
    total = rows.log_total(logits, peak)
    ids = rows.largest(logits, count) if count else np.empty(0, np.intp)
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    top = [(int(each), float(logits[each]) - total) for each in ids]
    return TokenLogprob(token_id, float(logits[token_id]) - total, top)

"""Which tokens are drafted: as many as are expected to make answers faster, and none where none do.

A step gives a token for every answer, and takes as long as so many rows take. With drafts it has more rows, and gives a
token more for each of them that comes true:

    tokens per second = (answers + Σ drafted tokens' chances to come true, with all before them) / seconds(rows)

The chance is that of `acceptance.py`, the seconds those of `costs.py`: both are measured, so the same rule drafts many
tokens where rows cost next to nothing (large models, whose steps wait for the memory), few where each costs its time,
and none where a step is busy with many answers.
"""

from __future__ import annotations

from array import array

from cllm.drafts.costs import MOST_ROWS, StepCosts
from cllm.drafts.follower import Follower
from cllm.drafts.recent import Recent
from cllm.engine.request import Sequence

WORTH = 1.04
"""Drafts are made if they promise so many times the speed; less is within what the estimates are wrong by."""
BEST_RATE = 0.95
"""Of drafted tokens that come true, where drafts are at their best."""
SLICE_TOKENS = 2048
"""Tokens of prompts that are taken into indexes in one step."""
LOOKS = 12
"""A sequence for which nothing was drafted so many times in a row is looked at every second step only, after as many
more every third, and so on: what is asked in vain costs next to nothing."""
LONGEST_REST = 3
"""Steps between two looks."""
SAMPLE_EVERY = 4
"""Of steps without drafts, where their time is known, one in so many is learnt from."""
_NONE: array[int] = array("i")


class Drafter:
    """Of one model's engine, called on its thread."""

    def __init__(self, *, max_tokens: int = 16, max_step_tokens: int = 48, recent_tokens: int = 262_144) -> None:
        """`max_tokens` for one sequence in a step, `max_step_tokens` for all; `recent_tokens`: of answers that are
        remembered."""
        self._max_tokens = max_tokens
        self._max_step_tokens = max_step_tokens
        self._recent = Recent(recent_tokens)
        self._costs = StepCosts()
        self._most: dict[int, int] = {}
        """Rows -> drafted tokens that could pay beside them."""
        self._most_of = self._costs.changes
        self._to_index = 0
        self._steps = 0
        self._rows = 0
        self._expected = 0.0
        """Tokens of the step that is being planned, with the drafts so far."""

    def begin_step(self, rows: int, prompts_wait: bool) -> int:
        if prompts_wait or not 0 < rows < MOST_ROWS or not self._costs.knows(rows):
            return 0  # without drafts, so that it is known, or stays known, what they are compared with
        self._rows = rows
        self._expected = float(rows)
        self._to_index = SLICE_TOKENS
        if self._most_of != self._costs.changes:
            self._most_of = self._costs.changes
            self._most.clear()
        most = self._most.get(rows)
        if most is None:
            most = self._most[rows] = self._could_pay(rows)
        return most

    def _could_pay(self, rows: int) -> int:
        """The most drafted tokens that pay, over all answers alike, if as many come true as can be hoped for."""
        limit = min(rows * self._max_tokens, self._max_step_tokens, self._costs.most_rows - rows)
        cost = self._costs.of
        bound, expected, most = WORTH * rows / cost(rows), float(rows), 0
        for count in range(1, limit + 1):
            expected += BEST_RATE ** -(-count // rows)
            if expected / cost(rows + count) >= bound:
                most = count
        return most

    def propose(self, sequence: Sequence, most: int) -> array[int]:
        tokens = sequence.tokens
        follower = sequence.drafts
        if not isinstance(follower, Follower):
            follower = sequence.drafts = Follower(tokens, self._recent.space(sequence.space))
        if follower.rest:
            follower.rest -= 1
            return _NONE
        draft = self._look(follower, tokens, most)
        if draft:
            follower.in_vain = 0
        else:
            follower.in_vain += 1
            follower.rest = min(follower.in_vain // LOOKS, LONGEST_REST)
        return draft

    def _look(self, follower: Follower, tokens: array[int], most: int) -> array[int]:
        if missing := follower.grams.missing(tokens):
            count = min(missing, self._to_index)
            self._to_index -= count
            follower.grams.extend(tokens, count)
        follower.follow(tokens)
        if not follower.length:
            return _NONE
        count = self._how_many(follower, min(most, self._max_tokens, MOST_ROWS - self._rows))
        if not count:
            return _NONE
        draft = follower.ahead(tokens, count)
        self._rows += len(draft)
        return draft

    def _how_many(self, follower: Follower, most: int) -> int:
        """How many tokens make the step the most worth; what they promise then counts for those that come after."""
        cost, rows = self._costs.of, self._rows
        best, best_count, best_expected = WORTH * self._expected / cost(rows), 0, self._expected
        expected, chance = self._expected, 1.0
        for count, rate in enumerate(follower.acceptance.rates(follower.kind, follower.length, most), 1):
            chance *= rate
            expected += chance
            value = expected / cost(rows + count)
            if value > best:
                best, best_count, best_expected = value, count, expected
        self._expected = best_expected
        return best_count

    def took(self, rows: int, drafted: int, seconds: float, prompt_tokens: int) -> None:
        if prompt_tokens or not rows:
            return
        self._steps += 1
        if drafted or self._steps % SAMPLE_EVERY == 0 or not self._costs.knows(rows):
            self._costs.observe(rows + drafted, seconds)

    def ended(self, sequence: Sequence) -> None:
        sequence.drafts = None
        self._recent.add(sequence.space, sequence.tokens, sequence.n_prompt)

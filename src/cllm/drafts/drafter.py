"""Decides how many tokens to draft: as many as should make answers faster, or none.

A step gives one token per answer. With drafts it has more rows, and gives one more token for each that is accepted:

    tokens per second = (answers + Σ chances of drafted tokens to be accepted, with all before them) / seconds(rows)

The chances come from `acceptance.py`, the seconds from `step_shape.py`. Both are measured, so the same rule drafts many
tokens where rows cost next to nothing (large models, whose steps wait for memory), few where each costs time, and none
where a step is busy with many answers.
"""

from __future__ import annotations

from array import array

from cllm.drafts.follower import Follower
from cllm.drafts.recent_answers import RecentAnswers
from cllm.drafts.step_shape import MOST_ROWS, StepShape
from cllm.engine.request import Sequence

WORTH = 1.04
"""The least speed-up that is worth a draft; less is within the error of the estimates."""
BEST_RATE = 0.95
"""The acceptance rate of drafts at their best."""
SLICE_TOKENS = 2048
"""Prompt tokens that are indexed in one step."""
LOOKUPS = 12
"""After this many lookups in a row without a draft, a sequence is looked at every second step only, after as many more
every third, and so on, so that lookups in vain cost next to nothing."""
LONGEST_REST = 3
"""Steps between two lookups."""
SAMPLE_EVERY = 4
"""One in this many steps without drafts is measured, once their time is known."""
_NONE: array[int] = array("i")


class Drafter:
    """Called on the engine's thread."""

    def __init__(self, *, max_tokens: int = 16, max_step_tokens: int = 48, recent_tokens: int = 262_144) -> None:
        """Drafted tokens per sequence and step, and per step; tokens of recent answers to remember."""
        self._max_tokens = max_tokens
        self._max_step_tokens = max_step_tokens
        self._recent = RecentAnswers(recent_tokens)
        self._shape = StepShape()
        self._most: dict[int, int] = {}
        """Rows -> the most drafted tokens that could pay beside them."""
        self._most_of = self._shape.changes
        self._to_index = 0
        self._steps = 0
        self._rows = 0
        self._expected = 0.0
        """Expected tokens of the step that is being planned, with the drafts so far."""

    def begin_step(self, rows: int, prompts_wait: bool) -> int:
        if prompts_wait or not 0 < rows < MOST_ROWS or not self._shape.knows(rows):
            return 0  # also to measure what drafts are compared with
        self._rows = rows
        self._expected = float(rows)
        self._to_index = SLICE_TOKENS
        if self._most_of != self._shape.changes:
            self._most_of = self._shape.changes
            self._most.clear()
        most = self._most.get(rows)
        if most is None:
            most = self._most[rows] = self._could_pay(rows)
        return most

    def _could_pay(self, rows: int) -> int:
        """The most drafted tokens that pay, spread over all answers, at the best acceptance rate."""
        limit = min(rows * self._max_tokens, self._max_step_tokens, self._shape.most_rows - rows)
        cost = self._shape.of
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
        draft = self._look_up(follower, tokens, most)
        if draft:
            follower.in_vain = 0
        else:
            follower.in_vain += 1
            follower.rest = min(follower.in_vain // LOOKUPS, LONGEST_REST)
        return draft

    def _look_up(self, follower: Follower, tokens: array[int], most: int) -> array[int]:
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
        """How many tokens give the step the best rate. Their expected tokens then count for later sequences."""
        cost, rows = self._shape.of, self._rows
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

    def observe_step(self, rows: int, drafted: int, seconds: float, prompt_tokens: int) -> None:
        if prompt_tokens or not rows:
            return
        self._steps += 1
        if drafted or self._steps % SAMPLE_EVERY == 0 or not self._shape.knows(rows):
            self._shape.observe(rows + drafted, seconds)

    def end(self, sequence: Sequence) -> None:
        sequence.drafts = None
        self._recent.add(sequence.space, sequence.tokens, sequence.n_prompt)

"""How long a step takes, learnt from the steps themselves.

    seconds = rows x row cost                                     the answers' next tokens
            + drafted tokens x draft cost                         guesses of what follows
            + pass cost + tokens x token cost + pairs x pair cost if there are prompts

A pair is a token of a prompt and one that it attends to: far into a long prompt a token costs more. Rows together cost
less than each alone, so the row cost is kept separately for 1, 2-3, 4-7, 8-15 … rows, each measured in steps without
prompts. The pass cost is what prompts add however short they are, where a backend reads its weights once more for them;
in a step without rows, one row's cost counts for that. A drafted token costs less than a row; until it was measured it
counts as a token of a prompt.

All costs follow the machine: up quickly, down slowly, since a step that is too long is worse than one too short.
`margin` covers the rest: how far steps exceeded their prediction on average, times a factor that one step in a hundred
exceeds.
"""

from __future__ import annotations

import math

PAIRS = 4096.0
PASS = 4.0
"""This many pairs, or a quarter of a pass, cost about as much as a token: in these units all are learnt equally
fast."""

ROW_WEIGHT = 0.3
SLOWER_WEIGHT = 0.5
FASTER_WEIGHT = 0.2
HOST_WEIGHT = 0.1

OVERRUN_WEIGHT = 0.05
OVERRUN_MOST = 1.0
"""A step counts as at most this much longer than predicted, as a share: one that was held up must not make the next
hundred short."""
DRAFT_FADES = 0.998
"""Per step without drafts, so that drafts that seemed too slow are tried again."""
HOST_MOST_S = 0.02
"""The time between two steps counts as at most twice the known one plus this, for the same reason."""
MARGIN_OVERRUNS = 10.0
"""With normally distributed errors of 2 to 10 %, about one step in a hundred then takes longer than planned."""

LEAST_MARGIN = 0.14
FIRST_OVERRUN = 0.015
"""The assumed mean at the start: a burst of prompts may be over before it is measured."""


class StepCosts:
    def __init__(self) -> None:
        self.token_s = 0.0
        """What the first tokens of a prompt cost each; 0: not known yet."""
        self.host_s = 0.0
        """The time between two steps: choosing and sending tokens, planning the next step."""
        self._pairs_s = 0.0
        self._pass_s = 0.0
        self._row_s: dict[int, float] = {}
        self._draft_s: float | None = None
        self._overrun = FIRST_OVERRUN

    @property
    def margin(self) -> float:
        """How much longer than predicted a step may take, as a share."""
        return max(LEAST_MARGIN, MARGIN_OVERRUNS * self._overrun)

    def knows_rows(self, rows: int) -> bool:
        return rows.bit_length() in self._row_s

    def row_s(self, rows: int) -> float:
        """What each of `rows` rows costs; 0: not known."""
        return self._row_s.get(max(rows, 1).bit_length(), 0.0)

    def rows_s(self, rows: int) -> float:
        return rows * self.row_s(rows)

    def cheapest_row_s(self, least: int, most: int) -> float:
        """The least that a row costs in a step of so many; 0: not known."""
        sizes = range(least.bit_length(), most.bit_length() + 1)
        return min((self._row_s[size] for size in sizes if size in self._row_s), default=0.0)

    def tokens_s(self, tokens: int, position: int) -> float:
        """What `tokens` of a prompt cost after `position` others."""
        return tokens * self.token_s + pairs(tokens, position) / PAIRS * self._pairs_s

    def tokens_within(self, seconds: float, position: int) -> float:
        """How many tokens of a prompt fit into the time after `position` others, once a token's cost is known."""
        each = self.token_s + position / PAIRS * self._pairs_s
        # Tokens of the chunk attend to each other, too: to half of it on average.
        return seconds / (each + max(seconds, 0.0) / each / 2 / PAIRS * self._pairs_s)

    def pass_s(self, rows: int) -> float:
        """What prompts add to a step of `rows` rows before their first token."""
        return PASS * self._pass_s + (0.0 if rows else self.row_s(1))

    def drafts_s(self, drafted: int, rows: int) -> float:
        """What `drafted` tokens add to a step of `rows` rows."""
        return drafted * self._each_draft_s(rows)

    def drafts_within(self, seconds: float, rows: int) -> float:
        """How many drafted tokens fit into the time beside `rows` rows. An unknown cost does not limit."""
        each = self._each_draft_s(rows)
        return max(seconds, 0.0) / each if each else math.inf

    def _each_draft_s(self, rows: int) -> float:
        return (self.token_s or self.row_s(rows)) if self._draft_s is None else self._draft_s

    def observe_host(self, seconds: float) -> None:
        self.host_s += HOST_WEIGHT * (min(seconds, 2 * self.host_s + HOST_MOST_S) - self.host_s)

    def observe_rows(self, rows: int, seconds: float) -> None:
        """A step without prompts."""
        each, size = seconds / rows, rows.bit_length()
        known = self._row_s.get(size, each)
        self._row_s[size] = known + ROW_WEIGHT * (min(each, (1 + OVERRUN_MOST) * known) - known)
        if self._draft_s is not None:
            self._draft_s *= DRAFT_FADES

    def observe_drafts(self, drafted: int, rows: int, seconds: float) -> None:
        """A step without prompts, with drafted tokens."""
        rows_s = self.rows_s(rows)
        if rows_s == 0.0:
            return
        known = self._each_draft_s(rows)
        seconds = min(seconds, (1 + OVERRUN_MOST) * (rows_s + drafted * known))
        each = max(seconds - rows_s, 0.0) / drafted
        self._draft_s = known + (SLOWER_WEIGHT if each > known else FASTER_WEIGHT) * (each - known)

    def observe_prompts(self, tokens: float, pair_count: float, rows: int, seconds: float) -> None:
        """A step with prompts and `rows` rows."""
        looked_back = pair_count / PAIRS
        predicted = PASS * self._pass_s + tokens * self.token_s + looked_back * self._pairs_s
        if rows and seconds < self.rows_s(rows):
            # Rows cannot take longer without prompts than with them: their measurement was disturbed.
            self._row_s[rows.bit_length()] = max(seconds - predicted, seconds / 4) / rows
        others_s = self.rows_s(rows) + (0.0 if rows else self.row_s(1))
        if self.token_s == 0.0:
            self.token_s = max(seconds - others_s, 0.0) / tokens
            return
        seconds = min(seconds, (1 + OVERRUN_MOST) * (others_s + predicted))
        measured = seconds - others_s
        if rows:
            overrun = max(seconds / (others_s + predicted) - 1.0, 0.0)
            self._overrun += OVERRUN_WEIGHT * (overrun - self._overrun)
        # A step that took less than its rows should have says nothing about prompt tokens.
        if measured <= 0.0:
            return
        error = measured - predicted
        weight = SLOWER_WEIGHT if error > 0 else FASTER_WEIGHT
        # A gradient step: each cost changes in proportion to its part in this step.
        change = weight * error / (PASS * PASS + tokens * tokens + looked_back * looked_back)
        self._pass_s = max(self._pass_s + change * PASS, 0.0)
        self.token_s = max(self.token_s + change * tokens, self.token_s / 2)
        self._pairs_s = max(self._pairs_s + change * looked_back, 0.0)


def pairs(tokens: int, position: int) -> float:
    """How many tokens those of a chunk attend to, in total."""
    return tokens * (position + tokens / 2)

"""How many prompt tokens a step computes beside running answers. What steps cost is learnt (`StepCosts`).

Two settings limit how much prompts may slow answers down. `max_gap_s` is a promise: no step with answers is planned
longer, counting everything that makes the gap between two tokens (the rows, the chunk, the host's work between steps,
and a margin for uncertainty). `inter_token_s` is what a gap should be on average while fewer sequences wait for their
first token than for their next; while more do, steps take as long as the promise permits.

    few prompts    rows ▇ chunk ▇▇▇           up to the target, or up to three times what the rows take
    many prompts   rows ▇ chunk ▇▇▇▇▇▇▇▇▇▇    up to the longest gap

That suits a backend where small chunks cost no more per token than large ones. Where they do cost more (`chunk_gap_s`:
llama.cpp on two cores computes 16 tokens at 149 a second, 64 at 194, 256 at 223), prompts save up for larger chunks:
every step earns them what the target leaves.

    step        decode  decode  decode+chunk  decode  decode  decode+chunk
    allowance     ▂       ▅        █ → 0        ▂       ▅        █ → 0

Prompts always advance. If the rows alone take as long as the promise, it cannot be kept: prompts get a little all the
same, and the engine logs a warning (`take_warning`).
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
    """How long a step takes, learnt from the steps themselves.

        seconds = rows x row cost                                     the answers' next tokens
                + drafted tokens x draft cost                         guesses of what follows
                + pass cost + tokens x token cost + pairs x pair cost if there are prompts

    A pair is a token of a prompt and one that it attends to: far into a long prompt a token costs more. Rows
    together cost less than each alone, so the row cost is kept separately for 1, 2-3, 4-7, 8-15 … rows, each
    measured in steps without prompts. The pass cost is what prompts add however short they are, where a backend
    reads its weights once more for them; in a step without rows, one row's cost counts for that. A drafted token
    costs less than a row; until it was measured it counts as a token of a prompt.

    All costs follow the machine: up quickly, down slowly, since a step that is too long is worse than one too
    short. `margin` covers the rest: how far steps exceeded their prediction on average, times a factor that one
    step in a hundred exceeds.
    """

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


FIRST_CHUNK = 64
SMALLEST_CHUNK = 4
"""Prompts always advance by at least this many tokens,"""
LEAST_SHARE = 1 / 3
"""or by what takes this share of the rows' time, if that is more."""

PROMPT_SHARE = 2.0
"""While few prompts wait, they take at most this many times as long as the rows, or what the target leaves,"""
CHUNK_SHARE = 5.0
"""and a chunk that was saved up for this many times."""

MANY_ROWS = 32
"""Up to this many rows are computed together: fewer would cost almost as much,"""
FEW_ROWS = 8
"""except far into a long context, where most of a row's cost is its own. This many always are."""
HARDLY_MORE = 1.25
"""Rows of a smaller step cost hardly more than those of a larger one if each costs at most this many times as much."""

REMEASURE_ROWS_EVERY = 16
"""After this many steps with prompts one goes without, so that the cost of rows stays known."""

PAUSE_STEPS = 8
CAREFUL_STEPS = 2
CAREFUL_SHARE = 0.6
"""After `PAUSE_STEPS` without prompts, the next `CAREFUL_STEPS` with them get this share of what the promise leaves:
new requests are still being tokenized on the same cores, and the cost of prompts was measured long ago."""

UNMET_STEPS = 16
"""The promise cannot be kept if this many steps in a row had to be planned longer."""


class Allowance:
    """The time and tokens that the prompts of one step may take, first come, first served."""

    def __init__(self, costs: StepCosts, seconds: float, tokens: int) -> None:
        self._costs = costs
        self._seconds = seconds
        self._tokens = tokens
        self._least = SMALLEST_CHUNK

    def take(self, wanted: int, position: int, weight: float = 1.0) -> int:
        """How many of `wanted` tokens a prompt may compute after `position` others; 0: none are left. `weight`: what
        each costs, relative to others."""
        most = min(wanted, self._tokens)
        # Clamped before the conversion: a fast backend makes it huge. An unknown cost does not limit.
        if self._costs.token_s:
            most = int(min(max(self._costs.tokens_within(self._seconds / weight, position), self._least), most))
        if most < min(SMALLEST_CHUNK, wanted, self._tokens):
            most = 0
        self._seconds -= weight * self._costs.tokens_s(most, position)
        self._tokens -= most
        self._least = 0
        return most


class StepBudget:
    def __init__(
        self,
        *,
        inter_token_s: float,
        max_gap_s: float,
        prompt_only_s: float,
        max_tokens: int,
        chunk_gap_s: float = 0.0,
    ) -> None:
        """`prompt_only_s`: how long a step may take while no answer waits for a token. `chunk_gap_s`: how long a step
        with a chunk should take where small chunks cost more per token; 0: they do not."""
        self.costs = StepCosts()
        self._inter_token_s = inter_token_s
        self.max_gap_s = max_gap_s
        self._prompt_only_s = prompt_only_s
        self.chunk_gap_s = chunk_gap_s
        self._max_tokens = max_tokens
        self._saved_s = max_gap_s
        self._mixed_steps = REMEASURE_ROWS_EVERY
        self._plain_steps = PAUSE_STEPS
        self._careful_steps = 0
        self._crowded = False
        self._share = 1.0
        self._others_answer = False
        self._unmet_steps = 0
        self._warning: str | None = None
        self._warned = False

    def share(self, part: float, others_answer: bool) -> None:
        """Other models compute in turns with this one: `part` of a step's time is its own. If they have answers
        waiting, a step without answers is planned as short as one with answers."""
        self._share, self._others_answer = part, others_answer

    def rows_at_once(self, rows: int, requests: int) -> int:
        """How many rows the next step computes. Every request has one in every step; requests for many answers wait for
        the rest."""
        if rows <= max(FEW_ROWS, requests) or self.chunk_gap_s:
            return rows
        # More rows cost no more each than fewer. So what is measured while some wait tells when they need not; few rows
        # may have been measured near the beginning of a context, though.
        row_s = self.costs.cheapest_row_s(min(MANY_ROWS, rows), rows)
        longest_s = self._share * self._inter_token_s
        if rows * (row_s or self.costs.cheapest_row_s(1, rows)) <= longest_s:
            return rows
        most = int(longest_s / row_s) if row_s else 0
        return min(rows, max(requests, most if most >= MANY_ROWS else self._fewer_rows(longest_s)))

    def _fewer_rows(self, longest_s: float) -> int:
        """Rows for a step where `MANY_ROWS` may take longer than this: from `FEW_ROWS` up, as long as twice as many do
        not, or cost much less each. What was never measured is tried in steps of twice as many."""
        rows, row_s = FEW_ROWS, self.costs.row_s
        while rows < MANY_ROWS and (each := row_s(rows)):
            double = row_s(2 * rows)
            fits = 2 * rows * (double or each) <= longest_s
            fewer, more = (each, double) if double else (row_s(rows // 2), each)
            if not fits and fewer and fewer <= HARDLY_MORE * more:
                return max(rows, min(2 * rows - 1, int(longest_s / each)))
            rows *= 2
        return rows

    def most_drafts(self, decode_rows: int) -> int | None:
        """How many drafted tokens fit into a step: they get what few prompts get, within the promise. None: any number.
        If the rows alone take longer, it cannot be kept anyway, and drafts get what prompts get at least."""
        rows_s = self.costs.rows_s(decode_rows)
        if rows_s <= self._longest_s:
            seconds = min(self._room_s(rows_s), self._earned_s(rows_s))
        else:
            seconds = LEAST_SHARE * rows_s
        most = self.costs.drafts_within(seconds, decode_rows)
        return None if most == math.inf else int(most)

    def chunk_tokens(self, decode_rows: int) -> int:
        """About the largest chunk beside `decode_rows` answers."""
        return self._allowance(decode_rows, decode_rows > 0).take(self._max_tokens, 0)

    def allowance(
        self, decode_rows: int, prompts: int, wanted_s: float, answering: bool, drafted: int = 0
    ) -> Allowance | None:
        """For `prompts` prompts in the next step, which would take `wanted_s` in all; None: no prompts in this step.
        `answering`: some sequences wait for their next token, whether they have a row or not. `drafted`: tokens that
        are computed with the rows."""
        self._crowded = prompts > decode_rows
        costs = self.costs
        if decode_rows == 0:
            return self._allowance(0, answering)
        if self._mixed_steps >= REMEASURE_ROWS_EVERY or not costs.knows_rows(decode_rows):
            return None
        # A full account pays for the smallest chunk even where that costs more than the account can hold.
        cost = min(costs.pass_s(decode_rows) + wanted_s, self._chunk_s(decode_rows, True))
        if self.chunk_gap_s and self._saved_s < cost:
            return None
        return self._allowance(decode_rows, True, costs.drafts_s(drafted, decode_rows))

    def observe(
        self, prompt_tokens: float, decode_rows: int, seconds: float, pairs: float = 0.0, drafted: int = 0
    ) -> None:
        """Learn from a step, and keep the account. `pairs`: see `costs.pairs`. `drafted`: tokens that were computed
        with the rows."""
        costs = self.costs
        if prompt_tokens == 0:
            if drafted:
                costs.observe_drafts(drafted, decode_rows, seconds)
            elif decode_rows:
                costs.observe_rows(decode_rows, seconds)
            if decode_rows:
                self._mixed_steps = 0
                self._plain_steps += 1
        else:
            if decode_rows:
                paused = self._plain_steps >= PAUSE_STEPS
                self._careful_steps = CAREFUL_STEPS - 1 if paused else max(self._careful_steps - 1, 0)
                self._plain_steps = 0
            seconds -= costs.drafts_s(drafted, decode_rows)
            self._mixed_steps += decode_rows > 0
            self._saved_s -= max(0.0, seconds - costs.rows_s(decode_rows))
            costs.observe_prompts(prompt_tokens, pairs, decode_rows, seconds)
        if self.chunk_gap_s:
            chunk_s = self._chunk_s(decode_rows, decode_rows > 0)
            earned = chunk_s if self._crowded else self._earned_s(costs.rows_s(decode_rows))
            self._saved_s = min(max(self._saved_s, 0.0) + earned, chunk_s + earned)
        if decode_rows:
            self._check_promise(decode_rows, prompt_tokens)

    def take_warning(self) -> str | None:
        """Why the promise cannot be kept, once."""
        warning, self._warning = self._warning, None
        return warning

    def _allowance(self, decode_rows: int, answering: bool, drafts_s: float = 0.0) -> Allowance:
        costs = self.costs
        row_s = costs.row_s(decode_rows)
        seconds = self._chunk_s(decode_rows, answering) - costs.pass_s(decode_rows) - drafts_s
        most = self._max_tokens
        if costs.token_s == 0.0:
            # All that is known is that a prompt's token costs no more than a row.
            known = int(min(seconds / row_s, FIRST_CHUNK)) if answering and row_s else FIRST_CHUNK
            most = min(most, max(known, SMALLEST_CHUNK))
        return Allowance(costs, seconds, most)

    def _chunk_s(self, decode_rows: int, answering: bool) -> float:
        """How long the prompts of the next step may take."""
        answering = answering or self._others_answer
        if not answering:
            return self._prompt_only_s
        rows_s = self.costs.rows_s(decode_rows)
        room_s = self._room_s(rows_s)
        if self._careful_steps or self._plain_steps >= PAUSE_STEPS:
            room_s *= CAREFUL_SHARE
        if not self._crowded or decode_rows == 0:
            chunk_gap_s = self._share * self.chunk_gap_s
            wanted_s = max(chunk_gap_s - rows_s, CHUNK_SHARE * rows_s) if chunk_gap_s else self._earned_s(rows_s)
            room_s = min(room_s, wanted_s)
        return max(room_s, LEAST_SHARE * rows_s)

    def _room_s(self, rows_s: float) -> float:
        """What the promise leaves after the rows."""
        return self._longest_s / (1 + self.costs.margin) - rows_s

    @property
    def _longest_s(self) -> float:
        return self._share * self.max_gap_s - self.costs.host_s

    def _earned_s(self, rows_s: float) -> float:
        """What prompts get of a step on average while few of them wait, and drafts at most."""
        return max(self._share * self._inter_token_s - rows_s, PROMPT_SHARE * rows_s)

    def _check_promise(self, rows: int, prompt_tokens: float) -> None:
        if self._warned:
            return
        costs = self.costs
        rows_s = costs.rows_s(rows)
        least_s = rows_s + costs.pass_s(rows) + SMALLEST_CHUNK * costs.token_s if prompt_tokens else rows_s
        self._unmet_steps = self._unmet_steps + 1 if least_s > self._longest_s else 0
        if self._unmet_steps >= UNMET_STEPS:
            self._warned = True
            self._warning = self._why_unmet(rows, rows_s, least_s)

    def _why_unmet(self, rows: int, rows_s: float, least_s: float) -> str:
        part = f" (this model's share is {self._share:.0%})" if self._share < 1 else ""
        answers = "one answer takes" if rows == 1 else f"{rows} answers at once take"
        remedy = "a smaller model or more cores" if rows == 1 else "a lower scheduler.max_running or a smaller model"
        with_prompt = ""
        if rows_s <= self._longest_s:
            with_prompt = f", {least_s * 1e3:.0f} ms with {SMALLEST_CHUNK} tokens of a prompt"
        return (
            f"scheduler.max_gap_ms is {self.max_gap_s * 1e3:g}{part}, which cannot be kept: "
            f"{answers} {rows_s * 1e3:.0f} ms for the next token{with_prompt}, "
            f"and {self.costs.host_s * 1e3:.0f} ms pass between two steps. Gaps are as short as possible; "
            f"for shorter ones use {remedy}"
        )

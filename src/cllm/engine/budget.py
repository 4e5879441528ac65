"""How many prompt tokens a step computes beside the answers that are running. What steps cost is learnt (`costs.py`).

Two settings say what prompts may do to answers. `max_gap_s` is a promise: no step beside answers is planned longer,
with all that belongs to a gap between two tokens (the rows, the chunk, what the host does between steps, and a margin
for what is known to be unsure). `inter_token_s` is what a gap should be on average while fewer wait for their first
token than for their next; where more do, steps take as long as the promise permits.

    few prompts    rows ▇ chunk ▇▇▇           up to the target, or up to three times what the rows take
    many prompts   rows ▇ chunk ▇▇▇▇▇▇▇▇▇▇    up to the longest gap

That suits a backend to which small chunks cost no more than large ones, for each token. Where they do cost more
(`chunk_gap_s`: llama.cpp on two cores computes 16 tokens at 149 a second, 64 at 194, 256 at 223), a few prompts save up
for chunks that are worth their while: every step earns them what the target leaves.

    step        decode  decode  decode+chunk  decode  decode  decode+chunk
    allowance     ▂       ▅        █ → 0        ▂       ▅        █ → 0

Prompts always advance. If the rows alone take as long as the promise, it cannot be kept, whatever prompts do: they get
a little, and the engine says so (`take_unmet`).
"""

from __future__ import annotations

import math

from cllm.engine.costs import StepCosts

FIRST_CHUNK = 64
SMALLEST_CHUNK = 4
"""Prompts always advance by so many tokens,"""
LEAST_SHARE = 1 / 3
"""or by what takes this share of the time of the rows beside them, if that is more."""

PROMPT_SHARE = 2.0
"""While few prompts wait, they take at most so many times as long as the rows, if the target leaves less than that,"""
CHUNK_SHARE = 5.0
"""and a chunk that was saved up for this many times."""

MANY_ROWS = 32
"""So many rows are always computed together: fewer would cost almost as much."""

REMEASURE_ROWS_EVERY = 16
"""After so many steps with prompts one goes without, so that the cost of rows stays known."""

PAUSE_STEPS = 8
CAREFUL_STEPS = 2
CAREFUL_SHARE = 0.6
"""After so many steps without prompts, so many with them get this share of what the promise leaves: those who have just
come are still being read in on the same cores, and what prompts cost was measured long ago."""

UNMET_STEPS = 16
"""The promise cannot be kept if so many steps in a row had to be planned longer."""


class Allowance:
    """What the prompts of one step may take. It is handed out in the order in which they ask."""

    def __init__(self, costs: StepCosts, seconds: float, tokens: int) -> None:
        self._costs = costs
        self._seconds = seconds
        self._tokens = tokens
        self._least = SMALLEST_CHUNK

    def take(self, wanted: int, position: int, weight: float = 1.0) -> int:
        """How many tokens a prompt may compute of those it wants, if so many are computed; 0: none are left. `weight`:
        what each of them costs, if others cost 1."""
        most = min(wanted, self._tokens)
        # Clamped before the conversion: a fast backend makes it huge. A cost that is not known does not limit.
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
        """`prompt_only_s`: what a step takes while nobody waits for a next token. `chunk_gap_s`: what one with a chunk
        should take where small chunks cost more for each token; 0: they do not."""
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
        self._unmet: str | None = None
        self._told = False

    def share(self, part: float, others_answer: bool) -> None:
        """Other models compute in turns with this one: of what a step may take, so much is its own. Where they have
        answers waiting for it, a step without any of its own keeps to what one beside answers may take."""
        self._share, self._others_answer = part, others_answer

    def rows_at_once(self, rows: int, requests: int) -> int:
        """How many of the answers' rows the next step computes. Every request has one in every step; those that asked
        for many answers wait for them."""
        if rows <= MANY_ROWS or rows <= requests or self.chunk_gap_s:
            return rows
        # Rows together cost no more than fewer do, each. So what is measured while some wait tells when they need not.
        row_s = self.costs.cheapest_row_s(rows)
        longest_s = self._share * self._inter_token_s
        if rows * row_s <= longest_s:
            return rows
        return max(MANY_ROWS, requests, int(longest_s / row_s))

    def most_drafts(self, decode_rows: int) -> int | None:
        """How many drafted tokens a step of so many answers has time for within the promise; None: any number. Where
        the rows alone take longer, it cannot be kept, and drafts may take as long as prompts at least."""
        rows_s = self.costs.rows_s(decode_rows)
        seconds = self._room_s(rows_s) if rows_s <= self._longest_s else LEAST_SHARE * rows_s
        most = self.costs.drafts_within(seconds, decode_rows)
        return None if most == math.inf else int(most)

    def chunk_tokens(self, decode_rows: int) -> int:
        """About the largest chunk beside `decode_rows` answers."""
        return self._allowance(decode_rows, decode_rows > 0).take(self._max_tokens, 0)

    def allowance(
        self, decode_rows: int, prompts: int, wanted_s: float, answering: bool, drafted: int = 0
    ) -> Allowance | None:
        """For prompts in the next step, of which there are so many, and which would all take `wanted_s`; None: this
        step is the answers'. `answering`: some wait for their next token, whether they have a row or not. `drafted`:
        tokens that are computed behind theirs."""
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
        behind those of the rows."""
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

    def take_unmet(self) -> str | None:
        """Why the promise cannot be kept, in plain words, if that was found out; it is told once."""
        unmet, self._unmet = self._unmet, None
        return unmet

    def _allowance(self, decode_rows: int, answering: bool, drafts_s: float = 0.0) -> Allowance:
        costs = self.costs
        row_s = costs.row_s(decode_rows)
        seconds = self._chunk_s(decode_rows, answering) - costs.pass_s(decode_rows) - drafts_s
        most = self._max_tokens
        if costs.token_s == 0.0:
            # A token of a prompt costs no more than a row, and that may be all that is known.
            known = int(min(seconds / row_s, FIRST_CHUNK)) if answering and row_s else FIRST_CHUNK
            most = min(most, max(known, SMALLEST_CHUNK))
        return Allowance(costs, seconds, most)

    def _chunk_s(self, decode_rows: int, answering: bool) -> float:
        """What prompts may take of the next step."""
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
        """What the promise leaves beside rows that take so long."""
        return self._longest_s / (1 + self.costs.margin) - rows_s

    @property
    def _longest_s(self) -> float:
        return self._share * self.max_gap_s - self.costs.host_s

    def _earned_s(self, rows_s: float) -> float:
        """What prompts get of a step on average, while few of them wait."""
        return max(self._share * self._inter_token_s - rows_s, PROMPT_SHARE * rows_s)

    def _check_promise(self, rows: int, prompt_tokens: float) -> None:
        if self._told:
            return
        costs = self.costs
        rows_s = costs.rows_s(rows)
        least_s = rows_s + costs.pass_s(rows) + SMALLEST_CHUNK * costs.token_s if prompt_tokens else rows_s
        self._unmet_steps = self._unmet_steps + 1 if least_s > self._longest_s else 0
        if self._unmet_steps >= UNMET_STEPS:
            self._told = True
            self._unmet = self._why_unmet(rows, rows_s, least_s)

    def _why_unmet(self, rows: int, rows_s: float, least_s: float) -> str:
        part = f" (of which this model has {self._share:.0%})" if self._share < 1 else ""
        answers = "one answer alone takes" if rows == 1 else f"{rows} answers at once take"
        shorter = (
            "a smaller model or more cores make"
            if rows == 1
            else ("a lower scheduler.max_running or a smaller model makes")
        )
        beside = ""
        if rows_s <= self._longest_s:
            beside = f", and {least_s * 1e3:.0f} ms with {SMALLEST_CHUNK} tokens of a prompt beside that"
        return (
            f"scheduler.max_gap_ms is {self.max_gap_s * 1e3:g}{part}, which cannot be kept: "
            f"{answers} {rows_s * 1e3:.0f} ms for the next token{beside}, "
            f"and {self.costs.host_s * 1e3:.0f} ms pass between two steps. Gaps are as short as that permits; "
            f"{shorter} them shorter"
        )

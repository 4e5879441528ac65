"""How many prompt tokens a step computes beside the answers that are running, learnt from the steps themselves.

The model of a step is

    seconds = decode rows x row cost + (row cost + prompt tokens x token cost, if there are any)

Both costs are moving averages, so they follow the machine, the model and the lengths at hand. Rows together cost less
than each alone, so the row cost is kept apart for 1, 2-3, 4-7, 8-15 … rows; where one of these is not known yet, a step
without prompts measures it first. The row cost counts once more for prompts because a backend reads all its weights
once more for them, which is most of what a row costs too.

Prompts hold up the answers, so they live on an allowance: every step earns them the time that the inter-token target
leaves, and they spend it in chunks as long as the longest gap permits that an answer may have to bear. If that is the
target itself, every step has a chunk, which suits a backend to which small chunks cost no more than large ones. If it
is longer, chunks are larger and fewer, which suits one that reads all its weights for each: llama.cpp on two cores
computes 16 tokens at 149 a second, 64 at 194, 256 at 223. Where many answers run, so that their rows alone take long,
a chunk may be several times as long as those. Where more wait for their first token than for their next, chunks are as
long as with no answers. Neither holds where small chunks cost no more: there a step stays within half as much again as
the target, if the rows leave room for that, and if there are many that do not, some of them wait for the next step.

    step        decode  decode  decode+chunk  decode  decode  decode+chunk
    allowance     ▂       ▅        █ → 0        ▂       ▅        █ → 0
"""

from __future__ import annotations

FIRST_CHUNK = 64
SMALLEST_CHUNK = 16
"""Prompts always advance, even where decoding alone takes longer than the longest gap."""

CHUNK_SHARE = 5.0
"""A chunk may take this many times as long as the rows beside it, if that is more than the longest gap leaves."""

PROMPT_SHARE = 2.0
"""On average prompts take at most this many times as long as the rows, if that is more than the target leaves."""

LONGEST_STEP = 1.5
"""A step beside answers, in longest gaps, where small chunks cost no more than large ones,"""
SMALL_CHUNK_SHARE = 1.5
"""unless the rows take long themselves: then a chunk may take so many times as long, so that prompts advance."""

MANY_ROWS = 32
"""So many rows are always computed together: fewer would cost almost as much."""

REMEASURE_ROWS_EVERY = 16
"""After so many steps with prompts one goes without, so that the cost of rows stays known."""

WEIGHT = 0.3


class StepBudget:
    def __init__(self, *, inter_token_s: float, max_gap_s: float, prompt_only_s: float, max_tokens: int) -> None:
        self._inter_token_s = inter_token_s
        self._max_gap_s = max_gap_s
        self._prompt_only_s = prompt_only_s
        self._longest_s = LONGEST_STEP * max_gap_s if max_gap_s <= inter_token_s else None
        self._max_tokens = max_tokens
        self._row_s: dict[int, float] = {}
        self._token_s = 0.0
        self._saved_s = max_gap_s
        self._mixed_steps = REMEASURE_ROWS_EVERY
        self._crowded = False
        self._share = 1.0
        self._others_answer = False

    def share(self, part: float, others_answer: bool) -> None:
        """Other models compute in turns with this one: of what a step may take, so much is its own. Where they have
        answers waiting for it, a step without any of its own keeps to what one beside answers may take."""
        self._share, self._others_answer = part, others_answer

    @property
    def token_s(self) -> float:
        """What a token of a prompt costs; 0: not known yet."""
        return self._token_s

    def rows_at_once(self, rows: int) -> int:
        """How many of the answers' rows the next step computes."""
        if rows <= MANY_ROWS or self._longest_s is None:
            return rows
        # Rows together cost no more than fewer do, each. So what is measured while some wait tells when they need not.
        known = [seconds for size, seconds in self._row_s.items() if size <= rows.bit_length()]
        row_s = min(known, default=0.0)
        longest_s = self._share * self._max_gap_s
        if rows * row_s <= longest_s:
            return rows
        return max(MANY_ROWS, int(longest_s / row_s))

    def chunk_tokens(self, decode_rows: int) -> int:
        """The largest chunk beside `decode_rows` answers."""
        if self._token_s == 0.0:
            return min(FIRST_CHUNK, self._max_tokens)
        seconds = self._chunk_s(decode_rows) - self._one_row_s(decode_rows)
        # Clamped before the conversion: a fast backend makes the quotient huge.
        fitting = min(seconds / self._token_s, float(self._max_tokens))
        return max(int(fitting), min(SMALLEST_CHUNK, self._max_tokens))

    def prompt_tokens(self, decode_rows: int, prompts: int, wanted: int) -> int:
        """Prompt tokens for the next step, of `wanted` that `prompts` sequences have; 0: this step is the answers'."""
        self._crowded = prompts > decode_rows
        count = min(wanted, self.chunk_tokens(decode_rows))
        if decode_rows == 0:
            return count
        if self._mixed_steps >= REMEASURE_ROWS_EVERY or decode_rows.bit_length() not in self._row_s:
            return 0
        # A full account pays for the smallest chunk even where that costs more than the account can hold.
        cost = self._one_row_s(decode_rows) + count * self._token_s
        return count if self._saved_s >= min(cost, self._chunk_s(decode_rows)) else 0

    def observe(self, prompt_tokens: int, decode_rows: int, seconds: float) -> None:
        """Learn from a step, and keep the account."""
        row_s = self._one_row_s(decode_rows)
        rows_s = decode_rows * row_s
        if prompt_tokens == 0:
            if decode_rows:
                self._row_s[decode_rows.bit_length()] = _blend(row_s, seconds / decode_rows)
                self._mixed_steps = 0
        else:
            self._mixed_steps += decode_rows > 0
            spent = max(0.0, seconds - rows_s)
            self._saved_s -= spent
            # A step that took less than its rows alone should have says nothing about prompt tokens.
            if spent > row_s:
                self._token_s = _blend(self._token_s, (spent - row_s) / prompt_tokens)
        chunk_s = self._chunk_s(decode_rows)
        target_s = self._share * self._inter_token_s
        earned = chunk_s if self._crowded else max(target_s - rows_s, PROMPT_SHARE * rows_s)
        self._saved_s = min(max(self._saved_s, 0.0) + earned, chunk_s + earned)

    def _one_row_s(self, decode_rows: int) -> float:
        """What a row costs among so many; 0: not known."""
        return self._row_s.get(max(decode_rows, 1).bit_length(), 0.0)

    def _chunk_s(self, decode_rows: int) -> float:
        gap_s = self._share * self._max_gap_s
        if decode_rows == 0:
            return gap_s if self._others_answer else self._prompt_only_s
        rows_s = decode_rows * self._one_row_s(decode_rows)
        chunk_s = self._prompt_only_s if self._crowded else min(CHUNK_SHARE * rows_s, self._prompt_only_s)
        if self._longest_s is not None:
            chunk_s = min(chunk_s, max(self._share * self._longest_s - rows_s, SMALL_CHUNK_SHARE * rows_s))
        return max(gap_s - rows_s, chunk_s)


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else old + WEIGHT * (new - old)

"""How many prompt tokens a step computes beside the answers that are running, learnt from the steps themselves.

The model of a step is

    seconds = decode rows x row cost + (row cost + prompt tokens x token cost, if there are any)

Both costs are moving averages, so they follow the machine, the model and the lengths at hand. The row cost counts once
more for prompts because a backend reads all its weights once more for them, which is most of what a row costs too.

Prompts hold up the answers, so they live on an allowance: every step earns them the time that the inter-token target
leaves, and they spend it in chunks. Chunks are large enough to use the machine well (on two cores a chunk of 16 tokens
computes at two thirds of the speed of one of 256) and no longer than the longest gap that an answer may have to bear.
Where more wait for their first token than for their next, chunks are longer.

    step        decode  decode  decode+chunk  decode  decode  decode+chunk
    allowance     ▂       ▅        █ → 0        ▂       ▅        █ → 0
"""

from __future__ import annotations

FIRST_CHUNK = 64
SMALLEST_CHUNK = 16
"""Prompts always advance, even where decoding alone takes longer than the longest gap."""

EFFICIENT_CHUNK_ROWS = 16
"""A chunk that takes as long as this many rows loses 6 % to reading the weights once more."""

PROMPT_SHARE = 2.0
"""Prompts may take this many times as long as the rows beside them, if that is more than the target leaves."""

CROWDED_GAPS = 2.0
"""How many times the longest gap a step may take while more wait for their first token than for their next."""

REMEASURE_ROWS_EVERY = 16
"""After so many steps with prompts one goes without, so that the cost of rows stays known."""

WEIGHT = 0.3


class StepBudget:
    def __init__(self, *, inter_token_s: float, max_gap_s: float, prompt_only_s: float, max_tokens: int) -> None:
        self._inter_token_s = inter_token_s
        self._max_gap_s = max_gap_s
        self._prompt_only_s = prompt_only_s
        self._max_tokens = max_tokens
        self._row_s = 0.0
        self._token_s = 0.0
        self._saved_s = max_gap_s
        self._mixed_steps = REMEASURE_ROWS_EVERY
        self._crowded = False

    def chunk_tokens(self, decode_rows: int) -> int:
        """The largest chunk beside `decode_rows` answers."""
        if self._token_s == 0.0:
            return min(FIRST_CHUNK, self._max_tokens)
        seconds = self._chunk_s(decode_rows) - self._row_s
        # Clamped before the conversion: a fast backend makes the quotient huge.
        fitting = min(seconds / self._token_s, float(self._max_tokens))
        return max(int(fitting), min(SMALLEST_CHUNK, self._max_tokens))

    def prompt_tokens(self, decode_rows: int, prompts: int, wanted: int) -> int:
        """Prompt tokens for the next step, of `wanted` that `prompts` sequences have; 0: this step is the answers'."""
        self._crowded = prompts > decode_rows
        count = min(wanted, self.chunk_tokens(decode_rows))
        if decode_rows == 0:
            return count
        if self._mixed_steps >= REMEASURE_ROWS_EVERY:
            return 0
        # A full account pays for the smallest chunk even where that costs more than the account can hold.
        cost = self._row_s + count * self._token_s
        return count if self._saved_s >= min(cost, self._chunk_s(decode_rows)) else 0

    def observe(self, prompt_tokens: int, decode_rows: int, seconds: float) -> None:
        """Learn from a step, and keep the account."""
        rows_s = decode_rows * self._row_s
        if prompt_tokens == 0:
            if decode_rows:
                self._row_s = _blend(self._row_s, seconds / decode_rows)
                self._mixed_steps = 0
        else:
            self._mixed_steps += decode_rows > 0
            spent = max(0.0, seconds - rows_s)
            self._saved_s -= spent
            # A step that took less than its rows alone should have says nothing about prompt tokens.
            if spent > self._row_s:
                self._token_s = _blend(self._token_s, (spent - self._row_s) / prompt_tokens)
        chunk_s = self._chunk_s(decode_rows)
        earned = chunk_s if self._crowded else max(self._inter_token_s - rows_s, PROMPT_SHARE * rows_s)
        self._saved_s = min(max(self._saved_s, 0.0) + earned, chunk_s)

    def _chunk_s(self, decode_rows: int) -> float:
        if decode_rows == 0:
            return self._prompt_only_s
        if self._crowded:
            return max(CROWDED_GAPS * self._max_gap_s, self._inter_token_s)
        efficient = max(EFFICIENT_CHUNK_ROWS * self._row_s, self._inter_token_s)
        return max(min(efficient, self._max_gap_s - decode_rows * self._row_s), 0.0)


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else old + WEIGHT * (new - old)

"""How many prompt tokens fit into a step, learnt from the steps themselves.

The model of a step is `seconds = decode rows x row cost + prompt tokens x token cost`. Both costs are moving averages,
so they follow the machine, the model and the lengths at hand.
"""

from __future__ import annotations

FIRST_CHUNK = 64
SMALLEST_CHUNK = 16
"""Prompts always advance, even when decoding alone uses up the target."""

WEIGHT = 0.3


class StepBudget:
    def __init__(self, *, inter_token_s: float, prompt_only_s: float, max_tokens: int) -> None:
        self._inter_token_s = inter_token_s
        self._prompt_only_s = prompt_only_s
        self._max_tokens = max_tokens
        self._row_s = 0.0
        self._token_s = 0.0

    def prompt_tokens(self, decode_rows: int) -> int:
        """Prompt tokens to compute beside `decode_rows` running answers.

        While somebody waits for the next token the step stays within the inter-token target; while nobody does it may
        be longer, which computes prompts faster.
        """
        if self._token_s == 0.0:
            return min(FIRST_CHUNK, self._max_tokens)
        target = self._inter_token_s if decode_rows else self._prompt_only_s
        spare = target - decode_rows * self._row_s
        # Clamped before the conversion: a fast backend makes the quotient huge.
        fitting = min(spare / self._token_s, float(self._max_tokens))
        return max(int(fitting), min(SMALLEST_CHUNK, self._max_tokens))

    def observe(self, prompt_tokens: int, decode_rows: int, seconds: float) -> None:
        if prompt_tokens == 0:
            if decode_rows:
                self._row_s = _blend(self._row_s, seconds / decode_rows)
            return
        share = seconds - decode_rows * self._row_s
        # A step that took less than its decode rows alone should have says nothing about prompt tokens.
        if share > 0.0:
            self._token_s = _blend(self._token_s, share / prompt_tokens)


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else old + WEIGHT * (new - old)

"""Penalties for tokens that were seen before, counted as they come, never anew."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cllm.engine.draw import Row
from cllm.engine.params import SamplingParams

_FLOAT32_MAX = float(np.finfo(np.float32).max)


class Penalties:
    """What one answer has seen, and how much less likely that makes each token.

    Repetition looks at prompt and answer, as in vLLM; frequency and presence at the answer alone, as in OpenAI's
    API and vLLM.
    """

    __slots__ = ("_counts", "_drops", "_frequency", "_ids", "_places", "_presence", "_repetition", "active")

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._repetition = params.repetition_penalty
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        repeats = self._repetition != 1.0
        self.active = repeats or self._frequency != 0.0 or self._presence != 0.0
        seen = np.unique(np.asarray(prompt, np.intp)) if repeats else np.empty(0, np.intp)
        # Parallel, one place per distinct token: its id, how often it was generated, what that costs it.
        self._places = {token: place for place, token in enumerate(seen.tolist())}
        self._counts = [0] * len(seen)
        self._ids = seen
        self._drops = np.zeros(len(seen))

    def observe(self, token_id: int) -> None:
        """Count one generated token."""
        place = self._places.setdefault(token_id, len(self._counts))
        if place == len(self._counts):
            self._counts.append(0)
            if place == len(self._ids):
                self._grow()
            self._ids[place] = token_id
        self._counts[place] += 1
        self._drops[place] = self._frequency * self._counts[place] + self._presence

    def apply(self, values: Row) -> None:
        """Change `values` in place, in float64 rounded once."""
        size = len(self._counts)
        ids = self._ids[:size]
        seen = values[ids].astype(np.float64)
        if self._repetition != 1.0:
            seen = np.where(seen > 0.0, seen / self._repetition, seen * self._repetition)
        # A tiny repetition penalty may overflow float32; "as likely as can be" is what it asks for.
        values[ids] = np.minimum(seen - self._drops[:size], _FLOAT32_MAX)

    def _grow(self) -> None:
        spare = len(self._ids) + 64
        self._ids = np.concatenate([self._ids, np.zeros(spare, np.intp)])
        self._drops = np.concatenate([self._drops, np.zeros(spare)])

"""Penalties for repeated tokens, counted incrementally."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from cllm.backends.base import Seen
from cllm.engine.draw import Row
from cllm.engine.params import SamplingParams

_FLOAT32_MAX = float(np.finfo(np.float32).max)


class Penalties:
    """The tokens one answer has seen, and how much less likely that makes each.

    Repetition looks at prompt and answer, as in vLLM; frequency and presence at the answer alone, as in OpenAI's
    API and vLLM.
    """

    __slots__ = (
        "_counts",
        "_drops",
        "_frequency",
        "_ids",
        "_places",
        "_presence",
        "_prompt_ids",
        "_repetition",
        "_size",
        "active",
    )

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._repetition = params.repetition_penalty
        self._frequency = params.frequency_penalty
        self._presence = params.presence_penalty
        repeats = self._repetition != 1.0
        self.active = repeats or self._frequency != 0.0 or self._presence != 0.0
        # Counted, not sorted: a prompt may be long, and this runs on the event loop.
        seen = np.flatnonzero(np.bincount(np.asarray(prompt, np.intp))) if repeats else np.empty(0)
        # Parallel arrays, one entry per distinct token: its id, how often it was generated, its penalty. Those of the
        # prompt's tokens come first, in order of ids, and never move.
        self._ids = self._prompt_ids = seen.astype(np.int32)
        self._places: dict[int, int] = {}
        self._size = len(seen)
        self._counts = np.zeros(len(seen), np.int32)
        self._drops = np.zeros(len(seen))

    def twin(self) -> Penalties:
        """A copy for another answer to the same prompt, before anything was generated."""
        twin = copy(self)
        twin._places = {}
        twin._counts = np.zeros_like(self._counts)
        twin._drops = np.zeros_like(self._drops)
        return twin

    def observe(self, token_id: int, times: int = 1) -> None:
        """Count a generated token."""
        place = int(self._prompt_ids.searchsorted(np.int32(token_id)))
        if place == len(self._prompt_ids) or self._prompt_ids[place] != token_id:
            place = self._places.setdefault(token_id, self._size)
        if place == self._size:
            self._size += 1
            if place == len(self._ids):
                self._grow()
            self._ids[place] = token_id
        self._counts[place] += times
        self._drops[place] = self._frequency * self._counts[place] + self._presence

    def apply(self, values: Row) -> None:
        """Change `values` in place, in float64 rounded once."""
        size = self._size
        ids = self._ids[:size]
        seen = values[ids].astype(np.float64)
        if self._repetition != 1.0:
            seen = np.where(seen > 0.0, seen / self._repetition, seen * self._repetition)
        # A tiny repetition penalty may overflow float32; the largest value is what it asks for.
        values[ids] = np.minimum(seen - self._drops[:size], _FLOAT32_MAX)

    def seen(self) -> Seen:
        """For a backend that draws itself. Valid until the next token is observed."""
        size = self._size
        return Seen(self._ids[:size], self._counts[:size], self._repetition, self._frequency, self._presence)

    def _grow(self) -> None:
        """New arrays: the old ones may be shared with another answer."""
        spare = len(self._ids) + 64
        self._ids = np.concatenate([self._ids, np.zeros(spare, np.int32)])
        self._counts = np.concatenate([self._counts, np.zeros(spare, np.int32)])
        self._drops = np.concatenate([self._drops, np.zeros(spare)])

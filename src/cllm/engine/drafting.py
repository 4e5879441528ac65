"""Drafts: tokens that may follow, computed as rows of the same step and kept only where they turn out to be right.

    tokens   … a b c            c is known and not computed
    draft            d e f      what may follow
    chunk          [ c d e f ]  with the logits of all four
    chosen           d e g      from the rows of c, d, e: d and e are as drafted, g is not, and f is of no use

Every token is chosen by the sequence's own chooser from the row of the token before it, one after another, as without
drafts. A draft only says which rows are computed together, so it changes no answer. What was computed behind the last
token that was right is forgotten, and its memory given back, before the next step.

Who finds the drafts, and decides how many are worth it, is a `Drafter`.
"""

from __future__ import annotations

import logging
from array import array
from typing import Protocol

from cllm.engine.request import Sequence

log = logging.getLogger("cllm.engine")

_NONE: array[int] = array("i")


class Drafter(Protocol):
    """Called on the engine's thread, within a step's time: it returns at once. It may keep what it knows of a sequence
    in `sequence.drafts`, which stays while the sequence waits (its tokens only ever get more) and goes with it."""

    def begin_step(self, rows: int, prompts_wait: bool) -> int:
        """A step of so many answers is planned; `prompts_wait` if there are prompts to be computed, or to be admitted.
        How many drafted tokens it may have in all; 0: none."""

    def propose(self, sequence: Sequence, most: int) -> array[int]:
        """What may follow `sequence.tokens`: at most `most` tokens, which is at least 1; empty: no idea."""

    def took(self, rows: int, drafted: int, seconds: float, prompt_tokens: int) -> None:
        """What a step took, with `rows` answers, so many drafted tokens beside them, and a part of prompts."""

    def ended(self, sequence: Sequence) -> None:
        """The answer is over, however that came about."""


class Drafting:
    """A drafter as the scheduler uses it: one that fails is not asked again, and nothing else is."""

    def __init__(self, drafter: Drafter, most: int) -> None:
        """`most`: drafted tokens that the backend takes in a step, at least 1."""
        self._drafter: Drafter | None = drafter
        self._most = most

    @property
    def alive(self) -> bool:
        """Whether there may be drafts."""
        return self._drafter is not None

    def begin_step(self, rows: int, prompts_wait: bool) -> int:
        if self._drafter is None:
            return 0
        try:
            return max(0, min(self._drafter.begin_step(rows, prompts_wait), self._most))
        except Exception:
            self._give_up()
            return 0

    def propose(self, sequence: Sequence, most: int) -> array[int]:
        if self._drafter is None:
            return _NONE
        try:
            return self._drafter.propose(sequence, most)[:most]
        except Exception:
            self._give_up()
            return _NONE

    def took(self, rows: int, drafted: int, seconds: float, prompt_tokens: int) -> None:
        if self._drafter is not None:
            try:
                self._drafter.took(rows, drafted, seconds, prompt_tokens)
            except Exception:
                self._give_up()

    def ended(self, sequence: Sequence) -> None:
        if self._drafter is not None:
            try:
                self._drafter.ended(sequence)
            except Exception:
                self._give_up()

    def _give_up(self) -> None:
        self._drafter = None
        log.exception("drafting failed; answers go on without drafts")

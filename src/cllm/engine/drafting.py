"""Speculative decoding: drafted tokens are computed as rows of the same step, and kept only if they are right.

    tokens   … a b c            c is known and not computed
    draft            d e f      a guess of what follows
    chunk          [ c d e f ]  with the logits of all four
    chosen           d e g      from the rows of c, d, e: d and e are as drafted, g is not, and f is dropped

Every token is chosen by the sequence's own chooser from the row of the token before it, one after another, as without
drafts. A draft only decides which rows are computed together, so it changes no answer. Memory after the last right
token is freed before the next step.

A `Drafter` finds the drafts and decides how many are worth it.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from typing import Protocol, TypeVar

from cllm.engine.request import Sequence

log = logging.getLogger("cllm.engine")

T = TypeVar("T")
_NONE: array[int] = array("i")


class Drafter(Protocol):
    """Called on the engine's thread while a step is planned, so it must be fast. It may keep state in
    `sequence.drafts`, which lives as long as the sequence, also while that waits (its tokens only ever grow)."""

    def begin_step(self, rows: int, prompts_wait: bool) -> int:
        """How many drafted tokens a step of `rows` answers may have in all. `prompts_wait`: there are prompts to
        compute or to admit."""

    def propose(self, sequence: Sequence, most: int) -> array[int]:
        """What may follow `sequence.tokens`: up to `most` tokens (at least 1), or none."""

    def observe_step(self, rows: int, drafted: int, seconds: float, prompt_tokens: int) -> None:
        """How long a step took, with `rows` answers, and drafted and prompt tokens beside them."""

    def end(self, sequence: Sequence) -> None:
        """The answer has ended, for whatever reason."""


class Drafting:
    """A drafter as the scheduler uses it: if it fails once, it is not used again, and nothing else is affected."""

    def __init__(self, drafter: Drafter, most: int) -> None:
        """`most`: how many drafted tokens the backend takes in a step, at least 1."""
        self._drafter: Drafter | None = drafter
        self._most = most

    @property
    def alive(self) -> bool:
        """Whether there may be drafts."""
        return self._drafter is not None

    def begin_step(self, rows: int, prompts_wait: bool) -> int:
        return max(0, min(self._ask(lambda drafter: drafter.begin_step(rows, prompts_wait), 0), self._most))

    def propose(self, sequence: Sequence, most: int) -> array[int]:
        return self._ask(lambda drafter: drafter.propose(sequence, most)[:most], _NONE)

    def observe_step(self, rows: int, drafted: int, seconds: float, prompt_tokens: int) -> None:
        self._ask(lambda drafter: drafter.observe_step(rows, drafted, seconds, prompt_tokens), None)

    def end(self, sequence: Sequence) -> None:
        self._ask(lambda drafter: drafter.end(sequence), None)

    def _ask(self, question: Callable[[Drafter], T], otherwise: T) -> T:
        if self._drafter is not None:
            try:
                return question(self._drafter)
            except Exception:
                self._drafter = None
                log.exception("drafting failed; continuing without drafts")
        return otherwise

"""A compiled grammar, and the state of one answer in it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from cllm.errors import StructureError
from cllm.structured.vocabulary import Vocabulary

MOST_THREADS = 8

Mask = NDArray[np.int32]
"""A bit for every token, the lowest of a word first."""


class Grammar:
    """A compiled structure, shared by any number of answers."""

    def __init__(self, beginning: LLMatcher, masks: MaskFiller) -> None:
        self._beginning = beginning
        self.masks = masks
        self.tokens = 0
        """How many have been accepted, in all answers."""

    def start(self) -> Matcher:
        """For one answer."""
        return Matcher(self._beginning.deep_copy(), self)


class Matcher:
    """Forced tokens are those that the tokenizer would make of the text that must come, as far as what comes after
    cannot change them."""

    __slots__ = ("_forced", "_grammar", "inner")

    def __init__(self, inner: LLMatcher, grammar: Grammar) -> None:
        self.inner = inner
        self._grammar = grammar
        self._forced: list[int] = []
        self._look_ahead()

    @property
    def masks(self) -> MaskFiller:
        return self._grammar.masks

    @property
    def forced(self) -> Sequence[int]:
        return self._forced

    def accept(self, token: int) -> None:
        if not self.inner.consume_token(token):
            raise too_complex(self.inner)
        self._grammar.tokens += 1
        expected, self._forced = self._forced, self._forced[1:]
        if not self._forced or token != expected[0]:
            self._look_ahead()

    def agreed(self, tokens: Sequence[int]) -> int:
        return self.inner.validate_tokens(list(tokens))

    def twin(self) -> Matcher:
        return Matcher(self.inner.deep_copy(), self._grammar)

    def _look_ahead(self) -> None:
        if not self.inner.is_stopped():
            self._forced = self.inner.compute_ff_tokens()
        elif self.inner.is_error():
            raise too_complex(self.inner)
        else:
            self._forced = [self._grammar.masks.end_id]


class MaskFiller:
    """Fills masks for one model. Those of several answers are made at the same time, with the GIL released."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        assert vocabulary.end_id is not None
        self.end_id = vocabulary.end_id
        self._words = (vocabulary.n_vocab + 31) // 32
        self._filled = np.zeros((0, self._words), np.int32)
        self._executor: LLExecutor | None = None

    def fill(self, constraints: Sequence[Matcher]) -> list[Mask | Exception]:
        """For each answer, the mask of the next token, or an error. Valid until the next call."""
        if len(self._filled) < len(constraints):
            self._filled = np.zeros((len(constraints), self._words), np.int32)
        filled = self._filled
        open_ways: list[tuple[LLMatcher, int]] = []
        for place, each in enumerate(constraints):
            if each.forced:
                _allow_only(each.forced[0], filled[place])
            else:
                open_ways.append((each.inner, place))
        if len(open_ways) == 1:
            ((inner, place),) = open_ways
            fill_next_token_bitmask(inner, filled, place)
        elif open_ways:
            if self._executor is None:
                self._executor = LLExecutor(min(MOST_THREADS, os.cpu_count() or 1))
            fill_next_token_bitmask_par(self._executor, open_ways, filled)
        masks: list[Mask | Exception] = list(filled[: len(constraints)])
        for inner, place in open_ways:
            if inner.is_error():
                masks[place] = too_complex(inner)
        return masks


def _allow_only(token: int, mask: Mask) -> None:
    mask[:] = 0
    mask.view(np.uint32)[token >> 5] = 1 << (token & 31)


def too_complex(inner: LLMatcher) -> StructureError:
    reason = " ".join(inner.get_error().replace("<non-verbose/>", "").split())
    return StructureError(f"the answer's structure became too complex: {reason}")

"""Filling in the middle: the tokens with which some models are told what stands before a gap and after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

_PREFIXES = ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>")
_SUFFIXES = ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>")
_MIDDLES = ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>")


class Infill(NamedTuple):
    """The ids of the three tokens."""

    prefix: int
    suffix: int
    middle: int

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """What a model goes on from with the text between `before` and `after`."""
        return [self.prefix, *before, self.suffix, *after, self.middle]


def named_infill(special: Mapping[str, int]) -> Infill | None:
    """Those that a vocabulary has under one of the names that models give them."""
    found = [next((special[name] for name in names if name in special), None) for names in _ALL]
    return None if None in found else Infill(*(each for each in found if each is not None))


_ALL = (_PREFIXES, _SUFFIXES, _MIDDLES)

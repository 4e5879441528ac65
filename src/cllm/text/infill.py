"""Fill in the middle (FIM): the special tokens that mark the text before and after a gap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

_PREFIXES = ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>")
_SUFFIXES = ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>")
_MIDDLES = ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>")
INFILL_NAMES = frozenset({*_PREFIXES, *_SUFFIXES, *_MIDDLES})


class InfillTokens(NamedTuple):
    """The ids of the FIM tokens."""

    prefix: int
    suffix: int
    middle: int

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The prompt for the text between `before` and `after`."""
        return [self.prefix, *before, self.suffix, *after, self.middle]


def find_infill_tokens(special: Mapping[str, int]) -> InfillTokens | None:
    """Find the FIM tokens of a vocabulary by their usual names."""
    named = (_PREFIXES, _SUFFIXES, _MIDDLES)
    return infill_tokens([next((special[name] for name in names if name in special), None) for names in named])


def infill_tokens(found: Sequence[int | None]) -> InfillTokens | None:
    """None, unless there are all three."""
    return None if None in found else InfillTokens(*(each for each in found if each is not None))

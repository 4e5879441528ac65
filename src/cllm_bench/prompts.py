"""Deterministic pseudo-text of a wanted length in tokens."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence

Encode = Callable[[str], Sequence[int]]
"""Text to token ids."""

_TRIES = 20
"""Texts drawn in search of one of exactly the wanted length."""

# Common words, most of them one token in any vocabulary.
_COMMON = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work night point home water room mother area money story fact
month lot right study book eye job word business issue side kind head house service friend father power hour game
line end member law car city community name president team minute idea kid body information back parent face others
level office door health person art war history party result change morning reason research girl guy moment air
teacher force education foot boy age policy music market sense nation plan college interest death experience effect
use class control field development role effort rate heart drug show leader light voice wife police mind price
report decision son view relationship town road arm difference value building action season society tax director
position player record paper space ground form event official matter center couple site project activity star table
need court oil situation cost industry figure street image phone data picture practice piece land product doctor
wall patient worker news test movie north love support technology
"""
WORDS = _COMMON.split()


class Prompts:
    """A source of different texts. The same seed gives the same texts, so that all servers get the same work."""

    def __init__(self, encode: Encode, seed: str) -> None:
        self._encode = encode
        self.random = random.Random(seed)
        """For whatever else must be the same for all servers."""
        self._tokens_per_word = len(encode(" ".join(WORDS))) / len(WORDS)

    def text(self, tokens: int) -> str:
        """The next text, `tokens` long; within one word's tokens of it where no draw fits exactly."""
        best, best_distance = "", None
        for _ in range(_TRIES):
            text = self._longest_within(tokens)
            distance = abs(tokens - len(self._encode(text)))
            if best_distance is None or distance < best_distance:
                best, best_distance = text, distance
            if distance == 0:
                break
        return best

    def rough(self, tokens: int) -> str:
        """The next text, about `tokens` long. It costs next to nothing, so it may be made while a server works."""
        return " ".join(self.random.choices(WORDS, k=max(1, round(tokens / self._tokens_per_word))))

    def _longest_within(self, tokens: int) -> str:
        words = self.random.choices(WORDS, k=tokens)

        def length(count: int) -> int:
            return len(self._encode(" ".join(words[:count])))

        fitting = bisect_right(range(tokens + 1), tokens, key=length) - 1
        return " ".join(words[: max(1, fitting)])

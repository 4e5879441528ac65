"""Incremental detokenisation of one answer: only complete characters, and nothing from a stop string on."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from functools import lru_cache

from cllm.errors import InvalidRequestError
from cllm.text.tokenizer import Tokenizer

MAX_STOP_CHARACTERS = 4096
"""Total length of a request's stop strings, which bounds the memory they need."""


class Detokenizer:
    """Pass tokens to `push`, send what it returns, and end with `flush`.

    What was sent is always a prefix of the final text. Of several stop strings the one completed first counts, and of
    those completed at the same character the longest, so the result does not depend on token boundaries.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), shown: Mapping[int, bytes] | None = None
    ) -> None:
        """`shown`: special tokens to include as text."""
        self._tokenizer = tokenizer
        self._shown = shown or {}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = _matcher(tuple(stop)) if stop else None
        self._state = 0
        self._held = ""
        self.stopped: str | None = None
        """The stop string that was found."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is final now."""
        raw = self._tokenizer.token_bytes(token_id) or self._shown.get(token_id, b"")
        return self._release(self._decoder.decode(raw))

    def flush(self) -> str:
        """The rest of the text, after the last token. An incomplete character becomes U+FFFD."""
        released = self._release(self._decoder.decode(b"", final=True))
        held, self._held, self._state = self._held, "", 0
        return released + held

    def _release(self, text: str) -> str:
        if self.stopped is not None:
            return ""
        if self._matcher is None:
            return text
        known = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            self._state = self._matcher.advance(self._state, char)
            self.stopped = self._matcher.complete[self._state]
            if self.stopped is not None:
                self._held = ""
                return known[: end - len(self.stopped)]
        certain = len(known) - self._matcher.depth[self._state]
        self._held = known[certain:]
        return known[:certain]


class _StopMatcher:
    """An Aho-Corasick automaton: constant average work per character, however many stop strings there are.

    A state stands for the longest suffix of the text so far that is a prefix of a stop string; 0 is none.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self.depth = [0]
        """The length of the prefix that a state stands for."""
        self.complete: list[str | None] = [None]
        """The longest stop string that is complete in a state."""
        for stop in stops:
            self._add(stop)
        self._link()

    def advance(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, 0)

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self._next[state].setdefault(char, len(self._next))
            if following == len(self._next):
                self._next.append({})
                self._fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.complete.append(None)
            state = following
        self.complete[state] = stop

    def _link(self) -> None:
        """Set the fallbacks, shallow states first: a state's fallback is always shallower."""
        reached = list(self._next[0].values())
        for state in reached:
            for char, following in self._next[state].items():
                self._fallback[following] = self.advance(self._fallback[state], char)
                reached.append(following)
            if self.complete[state] is None:
                self.complete[state] = self.complete[self._fallback[state]]


def check_stop_strings(stops: Sequence[str]) -> None:
    total = sum(map(len, stops))
    if total > MAX_STOP_CHARACTERS:
        raise InvalidRequestError(
            f"the stop strings have {total} characters in total; at most {MAX_STOP_CHARACTERS} are allowed", "stop"
        )


@lru_cache(maxsize=16)
def _matcher(stops: tuple[str, ...]) -> _StopMatcher:
    check_stop_strings(stops)
    return _StopMatcher(stops)

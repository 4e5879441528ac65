"""Texts that may have so many tokens: found too long without tokenising much more than that."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cllm.errors import InvalidRequestError
from cllm.text.tokenizer import Tokenizer

PIECE = 32_768
"""Characters that are tokenised at a time. A text no longer than this is tokenised whole at once."""
SLACK = 16
"""Tokens by which a cut may lengthen a text, beside the token that it goes through, which may fall into as many as it
has bytes: merges near a cut come out differently, those a few words away do not. More than 7 were never found."""


CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class TokenLimit(NamedTuple):
    most: int
    reason: str
    """What allows no more, for the error."""
    what: str = "the prompt"
    code: str | None = None
    """Of that error."""

    @classmethod
    def of_context(cls, context: int, *, answers: bool = True) -> TokenLimit:
        """Clients look for these words, and for the code, to shorten a conversation by themselves. `answers`: at least
        one token is to follow."""
        reason = f"this model's maximum context length is {context} tokens"
        if answers:
            reason += ", of which at least one is for the answer"
        return cls(context - answers, reason, code=CONTEXT_LENGTH_EXCEEDED)

    def refusal(self, has: str, param: str) -> InvalidRequestError:
        """`has` is how long the text is."""
        if self.code is None:
            return InvalidRequestError(f"{self.what} has {has}; {self.reason}", param)
        reason = self.reason[0].upper() + self.reason[1:]
        return InvalidRequestError(f"{reason}. However, {self.what} has {has}. Shorten it.", param, self.code)

    def check(self, ids: Sequence[int], param: str) -> None:
        if len(ids) > self.most:
            raise self.refusal(f"{len(ids)} tokens", param)

    def check_text(self, tokenizer: Tokenizer, text: str, param: str, *, special: bool = False) -> None:
        """Refuse a text that is too long for certain: from its size, since no token stands for more bytes than the
        longest; then piece by piece, until there are too many. What passes is worth tokenising whole, and may turn out
        to be too long by little; that is for `check` to say.
        """
        if len(text) * 4 <= self.most:
            return
        size = len(text.encode(errors="replace"))
        if size > self.most * tokenizer.longest_token:
            raise self.refusal(
                f"{size} bytes of text, which are more than {self.most} tokens (the longest has "
                f"{tokenizer.longest_token} bytes)",
                param,
            )
        if size > self.most and len(text) > PIECE:
            self._count(tokenizer, text, param, special=special)

    def _count(self, tokenizer: Tokenizer, text: str, param: str, *, special: bool) -> None:
        count, slack = 0, tokenizer.longest_token + SLACK
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            count += max(len(tokenizer.encode(piece, special=special, add_bos=False)) - slack, 0)
            if count > self.most:
                raise self.refusal(
                    f"more than {self.most} tokens in the first {start + len(piece)} of its {len(text)} characters",
                    param,
                )


def checked_ids(prompt: Sequence[int], limit: TokenLimit, vocab: int) -> array[int]:
    """The prompt as an array, which can be looked through in no time, however long it is."""
    if not len(prompt):
        raise InvalidRequestError("the prompt is empty: it needs at least one token", "prompt")
    limit.check(prompt, "prompt")
    try:
        ids = array("i", prompt)
        values = np.frombuffer(ids, np.int32)
        known = values.min() >= 0 and values.max() < vocab
    except OverflowError:
        known = False
    if not known:
        wrong = next(i for i in prompt if not 0 <= i < vocab)
        raise InvalidRequestError(f"the prompt holds token {wrong}; ids go from 0 to {vocab - 1}", "prompt")
    return ids

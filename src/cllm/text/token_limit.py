"""Limits on the number of tokens in a text, checked without tokenising much more than the limit."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cllm.errors import InvalidRequestError
from cllm.text.tokenizer import Tokenizer

PIECE = 32_768
"""Characters tokenised at a time. A shorter text is tokenised at once."""
SLACK = 16
"""Extra tokens that cutting a text may cause, besides the token that is cut, which may become one token per byte.
Merges change near a cut, but not a few words away. No more than 7 have been observed."""


CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class TokenLimit(NamedTuple):
    most: int
    reason: str
    """For the error message: why there is no more room."""
    what: str = "the prompt"
    code: str | None = None
    """The error code."""
    advice: str = ""
    """What else to do than to shorten the text."""
    context: int = 0
    """The context's length, if that is the limit."""

    @classmethod
    def of_context(cls, context: int, *, answers: bool = True, advice: str = "") -> TokenLimit:
        """Clients look for this wording and code to shorten a conversation automatically. `answers`: leave room for at
        least one token."""
        reason = f"this model's maximum context length is {context} tokens"
        if answers:
            reason += ", of which at least one is for the answer"
        return cls(context - answers, reason, code=CONTEXT_LENGTH_EXCEEDED, advice=advice, context=context)

    def error(self, has: str, param: str, tokens: int = 0) -> InvalidRequestError:
        """`has`: the length of the text, in words. `tokens`: as far as it was counted."""
        if self.code is None:
            return InvalidRequestError(f"{self.what} has {has}; {self.reason}", param)
        reason = self.reason[0].upper() + self.reason[1:]
        message = f"{reason}. However, {self.what} has {has}. " + f"Shorten it. {self.advice}".strip()
        # In llama-server's words.
        numbers = {"n_prompt_tokens": max(tokens, self.most + 1), "n_ctx": self.context}
        return InvalidRequestError(message, param, self.code, numbers)

    def check(self, ids: Sequence[int], param: str) -> None:
        if len(ids) > self.most:
            raise self.error(f"{len(ids)} tokens", param, len(ids))

    def check_text(self, tokenizer: Tokenizer, text: str, param: str, *, special: bool = False) -> None:
        """Refuse a text that is certainly too long: first by its size, given the longest token, then by tokenising it
        piece by piece until there are too many. A text that passes may still be slightly too long, which `check` finds.
        """
        if len(text) * 4 <= self.most:
            return
        size = len(text.encode(errors="replace"))
        if size > self.most * tokenizer.longest_token:
            raise self.error(
                f"{size} bytes of text, which are more than {self.most} tokens (the longest has "
                f"{tokenizer.longest_token} bytes)",
                param,
                -(-size // tokenizer.longest_token),
            )
        if size > self.most and len(text) > PIECE:
            self._count(tokenizer, text, param, special=special)

    def _count(self, tokenizer: Tokenizer, text: str, param: str, *, special: bool) -> None:
        count, slack = 0, tokenizer.longest_token + SLACK
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            count += max(len(tokenizer.encode(piece, special=special, add_bos=False)) - slack, 0)
            if count > self.most:
                raise self.error(
                    f"more than {self.most} tokens in the first {start + len(piece)} of its {len(text)} characters",
                    param,
                    count,
                )


def validate_ids(prompt: Sequence[int], limit: TokenLimit, vocab: int) -> array[int]:
    """The prompt as an array, which is fast to check however long it is."""
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
        raise InvalidRequestError(f"the prompt contains token id {wrong}; ids go from 0 to {vocab - 1}", "prompt")
    return ids

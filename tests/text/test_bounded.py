"""Texts that are too long are refused from their size or their first pieces; all others are tokenised as ever."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.errors import InvalidRequestError
from cllm.text.tokenizer import PIECE, SLACK, ByteTokenizer, TokenLimit

LIMIT = TokenLimit(1000, "the context is 1001")
LONGEST = 20


class Counting(ByteTokenizer):
    """One token per byte, as far as the limit knows up to 20 of them, and how much was tokenised."""

    def __init__(self) -> None:
        super().__init__()
        self.longest_token = LONGEST
        self.encoded = 0

    def encode(
        self, text: str, *, special: bool = False, add_bos: bool = True, literal: Sequence[int] = ()
    ) -> list[int]:
        self.encoded += len(text)
        return super().encode(text, special=special, add_bos=add_bos, literal=literal)


def test_a_text_too_large_for_any_tokens_is_refused_untouched() -> None:
    tokenizer = Counting()
    with pytest.raises(InvalidRequestError, match=r"the prompt has 20001 bytes.*1000 tokens.*context is 1001") as error:
        LIMIT.check_text(tokenizer, "x" * 20_001, "prompt")
    assert (error.value.param, tokenizer.encoded) == ("prompt", 0)


def test_size_is_counted_in_bytes() -> None:
    with pytest.raises(InvalidRequestError, match="20004 bytes"):
        LIMIT.check_text(Counting(), "é" * 10_002, "prompt")


def test_no_more_is_tokenised_than_shows_that_it_is_too_long() -> None:
    tokenizer, limit = Counting(), TokenLimit(2 * PIECE, "no more")
    text = "x" * (PIECE * 10)
    with pytest.raises(InvalidRequestError, match=rf"more than {2 * PIECE} tokens in the first {3 * PIECE} of its"):
        limit.check_text(tokenizer, text, "text")
    assert tokenizer.encoded == 3 * PIECE


@pytest.mark.parametrize("count", [1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE])
def test_what_fits_passes(count: int) -> None:
    LIMIT.check_text(Counting(), "x" * 1000, "prompt")
    TokenLimit(count, "").check_text(Counting(), "x" * count, "prompt")


@given(size=st.integers(0, 3 * PIECE), most=st.integers(1, 3 * PIECE))
def test_what_is_refused_is_too_long(size: int, most: int) -> None:
    limit = TokenLimit(most, "")
    try:
        limit.check_text(Counting(), "x" * size, "prompt")
    except InvalidRequestError:
        assert size > most
    else:
        assert size <= max(most + 4 * (LONGEST + SLACK), PIECE)


def test_the_tokens_themselves_have_the_last_word() -> None:
    LIMIT.check([0] * 1000, "prompt")
    with pytest.raises(InvalidRequestError, match="the prompt has 1001 tokens; the context is 1001"):
        LIMIT.check([0] * 1001, "messages")

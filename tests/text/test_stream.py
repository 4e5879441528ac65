"""Streaming text: whole characters, nothing from a stop string on, and in the end exactly the decoded text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cllm.errors import InvalidRequestError
from cllm.models.gguf import GGUFModel
from cllm.models.registry import resolve
from cllm.text.detokenizer import MAX_STOP_CHARACTERS, Detokenizer
from cllm.text.tokenizer import ByteTokenizer, TableTokenizer, load_tokenizer


def tokens_of(pieces: Sequence[bytes]) -> TableTokenizer:
    """A vocabulary in which token n is the n-th piece, and two special tokens come after them."""
    return TableTokenizer(
        [*pieces, b"", b""],
        encoder=lambda texts: [[] for _ in texts],
        special_tokens={"<é>": len(pieces), "<b>": len(pieces) + 1},
        whole_tokens={},
        bos_id=None,
        eos_ids=frozenset(),
        add_bos=False,
    )


def stream(pieces: Sequence[bytes], stop: Sequence[str] = ()) -> tuple[list[str], str, str | None]:
    """What each push gave, what flush gave, and the stop string met."""
    text = Detokenizer(tokens_of(pieces), stop)
    pushed = [text.push(token_id) for token_id in range(len(pieces))]
    return pushed, text.flush(), text.stopped


def cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The plain way: the text before the stop string that is complete first, the longest one among equals."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def split(raw: bytes, at: Sequence[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(raw) + 1) for place in at), len(raw)]
    return [raw[start:stop] for start, stop in pairwise(bounds)]


RAW = st.text(max_size=30).map(lambda text: text.encode("utf-8", "replace")) | st.binary(max_size=40)
FEW_LETTERS = st.text("abé", max_size=40)
STOPS = st.lists(st.text("abé", min_size=1, max_size=6), max_size=16)


@given(raw=RAW, at=st.lists(st.integers(0, 200), max_size=20))
@example(raw="👨‍👩‍👧".encode(), at=list(range(18)))
@example(raw=b"\xf0\x9f\x98", at=[1, 2])
@example(raw=b"\xe2\x82\xff\x80", at=[1, 2, 3])
def test_pushes_and_flush_are_the_decoded_text(raw: bytes, at: list[int]) -> None:
    pieces = split(raw, at)
    pushed, rest, stopped = stream(pieces)
    assert "".join(pushed) + rest == raw.decode("utf-8", "replace") == tokens_of(pieces).decode(range(len(pieces)))
    assert stopped is None


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_half_a_character_is_never_sent(text: str) -> None:
    tokenizer = ByteTokenizer()
    decoded = Detokenizer(tokenizer)
    pushed = [decoded.push(token_id) for token_id in tokenizer.encode(text)]
    assert [each for each in pushed if each] == list(text)
    assert decoded.flush() == ""


@given(text=FEW_LETTERS, stops=STOPS, at=st.lists(st.integers(0, 200), max_size=30))
@example(text="abab", stops=["b", "aba"], at=[])
@example(text="aab", stops=["ab"], at=[1])
@example(text="aé", stops=["é"], at=[2])
def test_stop_strings_cut_the_text_wherever_tokens_end(text: str, stops: list[str], at: list[int]) -> None:
    pushed, rest, stopped = stream(split(text.encode(), at), stops)
    assert ("".join(pushed) + rest, stopped) == cut(text, stops)
    if stopped is not None:
        assert rest == ""


@given(text=FEW_LETTERS, stops=STOPS)
def test_exactly_the_possible_beginnings_of_stop_strings_are_held_back(text: str, stops: list[str]) -> None:
    seen = Detokenizer(ByteTokenizer(), stops)
    sent, so_far = "", b""
    for byte in text.encode():
        sent += seen.push(byte)
        so_far += bytes([byte])
        known = so_far.decode("utf-8", "ignore")
        if seen.stopped is not None:
            return
        held = max((n for stop in stops for n in range(len(stop)) if known.endswith(stop[:n])), default=0)
        assert sent == known[: len(known) - held]


def test_a_stop_string_inside_one_token() -> None:
    assert stream([b"one STOP two"], ["STOP"]) == (["one "], "", "STOP")


def test_a_stop_string_over_many_tokens() -> None:
    assert stream([b"x", b"\n\n", b"Us", b"er", b":", b" y"], ["\nUser:"]) == (
        ["x", "\n", "", "", "", ""],
        "",
        "\nUser:",
    )


def test_a_false_beginning_is_sent_after_all() -> None:
    assert stream([b"a<", b"|im", b"_start"], ["<|im_end|>"]) == (["a", "", "<|im_start"], "", None)
    assert stream([b"a<", b"|im"], ["<|im_end|>"]) == (["a", ""], "<|im", None)


def test_an_incomplete_character_at_the_end_can_complete_a_stop_string() -> None:
    assert stream([b"a", b"\xe2\x82"], ["\ufffd"]) == (["a", ""], "", "\ufffd")


def test_special_tokens_are_left_out_or_named() -> None:
    tokenizer = tokens_of([b"a", b"b"])
    assert [Detokenizer(tokenizer).push(token_id) for token_id in range(4)] == ["a", "b", "", ""]
    shown = {token_id: name.encode() for name, token_id in tokenizer.special_tokens.items()}
    named = Detokenizer(tokenizer, ["<b>"], shown)
    assert [named.push(token_id) for token_id in range(4)] == ["a", "b", "<é>", ""]
    assert named.stopped == "<b>"


def test_too_long_stop_strings_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_STOP_CHARACTERS}") as caught:
        Detokenizer(ByteTokenizer(), ["x" * MAX_STOP_CHARACTERS, "y"])
    assert caught.value.param == "stop"


@pytest.mark.model
def test_the_real_vocabulary_streams_what_it_decodes() -> None:
    tokenizer = load_tokenizer(GGUFModel.open(resolve("smollm2")))
    ids = list(range(0, tokenizer.vocab_size, 7))
    special = {token_id: name.encode() for name, token_id in tokenizer.special_tokens.items()}
    for shown in ({}, special):
        text = Detokenizer(tokenizer, shown=shown)
        sent = [text.push(token_id) for token_id in ids]
        assert "".join(sent) + text.flush() == tokenizer.decode(ids, skip_special=not shown)

"""Answers on a terminal: where lines break, while the text still comes."""

from __future__ import annotations

import os
import pty
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.cli.chat.output import WordWrapper
from cllm.cli.options import print_status
from terminal_kit import set_columns

END = "\0"
ESCAPE = re.compile(r"\x1b\[(\d*)([A-Z])")


def screen(written: str, columns: int) -> list[str]:
    """What a terminal shows of it; nothing may pass its edge."""
    lines, at = [""], 0
    position = 0
    while position < len(written):
        if found := ESCAPE.match(written, position):
            position = found.end()
            if found[2] == "D":
                at -= int(found[1])
                assert at >= 0
            else:
                assert found[2] == "K"
                lines[-1] = lines[-1][:at]
            continue
        character = written[position]
        position += 1
        if character == "\n":
            lines.append("")
            at = 0
        elif character != "\r":
            lines[-1] = lines[-1][:at] + character
            at += 1
            assert at < columns, "the last column stays free"
    return lines


@pytest.fixture
def terminal() -> Iterator[tuple[TextIO, int]]:
    number, other = pty.openpty()
    with os.fdopen(other, "w", encoding="utf-8") as stream:
        yield stream, number
    os.close(number)


def show(terminal: tuple[TextIO, int], pieces: list[str], columns: int) -> list[str]:
    stream, number = terminal
    set_columns(stream.fileno(), columns)
    wrapper = WordWrapper(stream)
    for piece in pieces:
        wrapper.write(piece)
    wrapper.end()
    print(end=END, file=stream, flush=True)
    written = ""
    while not written.endswith(END):  # the system hands it over in parts
        written += os.read(number, 65536).decode()
    return [line.rstrip() for line in screen(written.removesuffix(END), columns)[:-1]]


def test_words_are_not_broken(terminal: tuple[TextIO, int]) -> None:
    pieces = ["The qu", "ick bro", "wn fox ju", "mps over", " the lazy", " dog.\n\nAnd", " more"]
    assert show(terminal, pieces, 16) == ["The quick brown", "fox jumps over", "the lazy dog.", "", "And more"]


def test_a_word_longer_than_a_line_is(terminal: tuple[TextIO, int]) -> None:
    assert show(terminal, ["see ", "abcdefgh", "ijklmnopqrst", " end"], 12) == [
        "see",
        "abcdefghijk",
        "lmnopqrst",
        "end",
    ]


def test_scripts_without_blanks_break_anywhere(terminal: tuple[TextIO, int]) -> None:
    stream, number = terminal
    set_columns(stream.fileno(), 12)
    wrapper = WordWrapper(stream)
    wrapper.write("日本語の文章です")
    stream.flush()
    assert os.read(number, 65536).decode() == "日本語の文\r\n章です"


def test_a_model_does_not_rule_the_terminal(terminal: tuple[TextIO, int]) -> None:
    assert show(terminal, ["a\x1b]0;mine\x07b\x08\x7f"], 40) == ["a␛]0;mine␇b␈␡"]


@given(
    words=st.lists(st.text("abcxyz", min_size=1, max_size=7), min_size=1, max_size=40),
    columns=st.integers(9, 30),
    size=st.integers(1, 9),
)
def test_whatever_the_pieces(words: list[str], columns: int, size: int) -> None:
    text = " ".join(words)
    number, other = pty.openpty()
    with os.fdopen(other, "w", encoding="utf-8") as stream:
        shown = show((stream, number), [text[at : at + size] for at in range(0, len(text), size)], columns)
    os.close(number)
    assert " ".join(shown).split() == words
    for line, following in pairwise(shown):
        assert len(f"{line} {following.split()[0]}") >= columns, "there was room for the next word"


def test_status_lines_break_between_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "fileno", lambda: 2)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((24, 10)))
    print_status("cannot read /a/very/long/path/without-an-end: no such file\n\nnext")
    shown = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().err)
    assert shown == "cannot read\n/a/very/long/path/without-an-end:\nno such file\n\nnext\n"

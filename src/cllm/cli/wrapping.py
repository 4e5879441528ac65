"""Text that comes in pieces, on a terminal: lines break between words, at the width the terminal has by then."""

from __future__ import annotations

import os
from typing import TextIO

from prompt_toolkit.utils import get_cwidth

_ORDINARY_COLUMNS = 80
_LEAST_COLUMNS = 8
_TAB = 8
_CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
"""What a model writes must not move the cursor or name the window."""


class WordWrapper:
    """Every piece is shown at once. A word that turns out to pass the edge is taken back and begins the next line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._began = False
        self._column = 0
        self._word = ""
        self._word_columns = 0

    def write(self, piece: str) -> None:
        self._began = True
        # The last column stays free: a cursor there is at the edge or beyond it, and terminals differ in which.
        most = max(_columns(self._stream) - 1, _LEAST_COLUMNS)
        shown = "".join(self._place(character, most) for character in piece.translate(_CONTROL_PICTURES))
        self._stream.write(shown)
        self._stream.flush()

    def end(self) -> None:
        """Of an answer: what comes next begins a line."""
        if self._began:
            self._stream.write(self._break())
            self._stream.flush()

    def _place(self, character: str, most: int) -> str:
        if character == "\n":
            return self._break()
        if character in " \t":
            return self._space(character, most)
        columns = get_cwidth(character)
        before = ""
        if columns > 1:  # such scripts break anywhere
            self._begin_word()
        if self._column + columns > most:
            before = self._carry_word() if self._word_columns < self._column else self._break()
        self._column += columns
        self._word += character
        self._word_columns += columns
        if columns > 1:
            self._begin_word()
        return before + character

    def _space(self, character: str, most: int) -> str:
        columns = 1 if character == " " else _TAB - self._column % _TAB
        self._begin_word()
        if self._column + columns > most:
            return self._break()
        self._column += columns
        return " " * columns

    def _carry_word(self) -> str:
        """Take the unfinished word back, and write it at the beginning of the next line."""
        back = f"\x1b[{self._word_columns}D\x1b[K" if self._word else ""
        self._column = self._word_columns
        return f"{back}\n{self._word}"

    def _break(self) -> str:
        self._column = 0
        self._begin_word()
        return "\n"

    def _begin_word(self) -> None:
        self._word, self._word_columns = "", 0


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _ORDINARY_COLUMNS
    except OSError:
        return _ORDINARY_COLUMNS

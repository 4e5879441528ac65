"""Writes answers as they stream in: wrapped between words at a terminal, unchanged elsewhere."""

from __future__ import annotations

import os
from typing import TextIO

from prompt_toolkit.utils import get_cwidth

_ORDINARY_COLUMNS = 80
_LEAST_COLUMNS = 8
_TAB = 8
_CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
"""A model's output must not move the cursor or rename the window."""


class WordWrapper:
    """Shows every piece at once. A word that turns out too long for the line is erased and moved to the next one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._began = False
        self._column = 0
        self._word = ""
        self._word_columns = 0

    def write(self, piece: str) -> None:
        self._began = True
        # Leave the last column free: terminals differ in where the cursor is after writing there.
        most = max(_columns(self._stream) - 1, _LEAST_COLUMNS)
        shown = "".join(self._place(character, most) for character in piece.translate(_CONTROL_PICTURES))
        self._stream.write(shown)
        self._stream.flush()

    def end(self) -> None:
        """End the answer: what comes next starts a new line."""
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
        if columns > 1:  # scripts with wide characters break anywhere
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
        """Erase the unfinished word and write it on the next line."""
        back = f"\x1b[{self._word_columns}D\x1b[K" if self._word else ""
        self._column = self._word_columns
        return f"{back}\n{self._word}"

    def _break(self) -> str:
        self._column = 0
        self._begin_word()
        return "\n"

    def _begin_word(self) -> None:
        self._word, self._word_columns = "", 0


class PlainWriter:
    """Writes to a file or a pipe."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._began = False

    def write(self, piece: str) -> None:
        self._began = True
        print(piece, end="", file=self._out, flush=True)

    def end(self) -> None:
        if self._began:
            print(file=self._out, flush=True)


def open_writer(out: TextIO) -> PlainWriter | WordWrapper:
    return WordWrapper(out) if out.isatty() else PlainWriter(out)


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _ORDINARY_COLUMNS
    except OSError:
        return _ORDINARY_COLUMNS

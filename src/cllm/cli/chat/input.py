"""Reads questions: with a line editor at a terminal, or line by line from a pipe. In both, three quotes start and end a
question of several lines."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from cllm.cli.options import print_status
from cllm.errors import InvalidRequestError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

QUOTES = '"""'
SYSTEM = "/system"
"""The command that takes a text, which may be in quotes."""
PROMPT = "> "
MORE = "… "
_MAX_HISTORY_BYTES = 1 << 20


class QuestionReader(Protocol):
    def read(self) -> str | None:
        """The next question or command; None at the end. Raises `KeyboardInterrupt` on Ctrl-C."""

    def read_result(self, prompt: str) -> str | None:
        """The result of a tool, which may have several lines; None if the user gives none."""

    def read_line(self, prompt: str) -> str | None:
        """One line; None if nobody is there to ask."""


def is_open(text: str) -> bool:
    """Whether a text in quotes is not closed yet."""
    said = text.strip().removeprefix(SYSTEM).lstrip()
    return said.startswith(QUOTES) and (len(said) < 2 * len(QUOTES) or not said.endswith(QUOTES))


def without_quotes(text: str) -> str:
    said = text.strip()
    return said.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n") if said.startswith(QUOTES) else text


class PipeReader:
    """Without a terminal, every line is a question."""

    def read(self) -> str | None:
        lines: list[str] = []
        while True:
            try:
                line = input()
            except EOFError:
                return "\n".join(lines) if lines else None
            except UnicodeDecodeError as error:
                raise InvalidRequestError(f"stdin is not UTF-8 text: {error}", "messages") from error
            lines.append(line)
            if not is_open("\n".join(lines)):
                return "\n".join(lines)

    def read_result(self, prompt: str) -> str | None:
        return self.read()

    def read_line(self, prompt: str) -> str | None:
        return None


class TerminalReader:
    """A line editor: pasted text stays one question, and the arrow keys bring back earlier questions."""

    def __init__(self, out: TextIO, history_file: Path) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import InMemoryHistory
        from prompt_toolkit.output.defaults import create_output

        output = create_output(stdout=out)
        self._questions: PromptSession[str] = PromptSession(
            history=_history(history_file), output=output, multiline=True, key_bindings=_bindings()
        )
        self._results: PromptSession[str] = PromptSession(
            history=InMemoryHistory(), output=output, multiline=True, key_bindings=_bindings()
        )
        self._answers: PromptSession[str] = PromptSession(history=InMemoryHistory(), output=output)

    def read(self) -> str | None:
        try:
            return self._questions.prompt(PROMPT, prompt_continuation=MORE)
        except EOFError:
            return None

    def read_result(self, prompt: str) -> str | None:
        try:
            return self._results.prompt(prompt, prompt_continuation=MORE)
        except (EOFError, KeyboardInterrupt):
            return None

    def read_line(self, prompt: str) -> str | None:
        try:
            return self._answers.prompt(prompt)
        except (EOFError, KeyboardInterrupt):
            return None


def _bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _history(file: Path) -> History:
    """In a file that only its owner can read; in memory if that file cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class LenientHistory(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):  # a full disk must not end the conversation
                super().store_string(string)

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        _shorten(file)
    except OSError as error:
        print_status(f"cannot save the input history: {file}: {error.strerror}")
        return InMemoryHistory()
    return LenientHistory(str(file))


def _shorten(file: Path) -> None:
    """Keep the newer half of a long history."""
    if file.stat().st_size <= _MAX_HISTORY_BYTES:
        return
    kept = file.read_bytes()[-_MAX_HISTORY_BYTES // 2 :]
    file.write_bytes(kept[kept.find(b"\n# ") + 1 :])  # an entry starts with a line that holds its time


def open_reader(out: TextIO, history_file: Path) -> QuestionReader:
    """A line editor if stdin and `out` are a terminal."""
    return TerminalReader(out, history_file) if sys.stdin.isatty() and out.isatty() else PipeReader()

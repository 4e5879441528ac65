"""The list of commands in a help text."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class CommandList(TyperGroup):
    """A group of commands that shows the first sentence about each one whole; click would cut it to one line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_sentence(command.help or "")) for name, command in found if command])


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.partition("\n\n")[0].split())
    sentence, end, _ = paragraph.partition(". ")
    return sentence + end.strip()

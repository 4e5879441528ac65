"""What is asked: texts of our own, in which the answer repeats much of the question, some of it, or nothing.

A model of 135 million weights does not follow instructions to edit or to quote, but it goes on with an edit or a
quotation that has begun. So the prompts hold the text and the beginning of the answer, as an editor that completes
would send it.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import NamedTuple

EDIT, QUOTE, FORM, CHAT = "edit", "quote", "form", "chat"
KINDS = (EDIT, QUOTE, FORM, CHAT)

BEGUN_LINES = 12
BEGUN_WORDS = 12


class Task(NamedTuple):
    kind: str
    text: str
    is_chat: bool
    """Whether the text is a user's message, instead of what the model is to go on with."""


def tasks(kind: str) -> list[Task]:
    parts = files(__package__).joinpath(_FILES[kind]).read_text(encoding="utf-8").split("\n%%\n")
    return [Task(kind, text, kind == CHAT) for text in _MAKERS[kind](parts)]


def _edits(parts: list[str]) -> list[str]:
    """A piece of code, and its beginning with a name changed."""
    return [
        _edit(code.strip("\n"), *change.strip().split(" -> ")) for code, change in zip(*[iter(parts)] * 2, strict=True)
    ]


def _edit(code: str, old: str, new: str) -> str:
    changed = re.sub(rf"\b{old}\b", new, code).split("\n")
    begun = "\n".join(changed[:BEGUN_LINES])
    return f"# Before:\n\n{code}\n\n\n# After {old} was renamed to {new}, with everything else as it was:\n\n{begun}"


def _quotations(parts: list[str]) -> list[str]:
    """A text, and its beginning once more."""
    return [_quotation(re.sub(r"(?<!\n)\n(?!\n)", " ", part.strip())) for part in parts]


def _quotation(text: str) -> str:
    return f"{text}\n\nThe same text once more, word for word:\n\n{' '.join(text.split()[:BEGUN_WORDS])}"


def _as_they_are(parts: list[str]) -> list[str]:
    return [part.strip("\n") for part in parts]


_FILES = {EDIT: "code.txt", QUOTE: "prose.txt", FORM: "form.txt", CHAT: "chat.txt"}
_MAKERS = {EDIT: _edits, QUOTE: _quotations, FORM: _as_they_are, CHAT: _as_they_are}

"""Taking out of system prompts what changes with every request, so that the prefix stays the same for the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cllm.config.patterns import Pattern

HEAD_MESSAGES = 8
HEAD_CHARACTERS = 4096
"""Messages that come later, and lines that begin later in one, are left alone."""
LINE_CHARACTERS = 1024
"""So much of a line a pattern sees: what it costs does not grow with the prompt."""

_ROLES = ("system", "developer")


class VolatileHeads:
    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [Pattern(pattern) for pattern in patterns]

    def strip(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The messages without it; the same ones if there is none. What is wrong with them is for others to say."""
        if not self._patterns:
            return messages
        return [*map(self._strip_message, messages[:HEAD_MESSAGES]), *messages[HEAD_MESSAGES:]]

    def _strip_message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            return message
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": self._strip_text(content)}
        if isinstance(content, Sequence) and not isinstance(content, bytes):
            return {**message, "content": self._strip_parts(content)}
        return message

    def _strip_parts(self, parts: Sequence[Any]) -> list[Any]:
        """A part of which nothing is left goes: it would be an empty line."""
        kept: list[Any] = []
        for part in parts:
            text = part.get("text") if isinstance(part, Mapping) else None
            if not isinstance(text, str):
                kept.append(part)
            elif (left := self._strip_text(text)) or not text:
                kept.append({**part, "text": left})
        return kept

    def _strip_text(self, text: str) -> str:
        """Line by line; a line of which nothing is left goes with its end."""
        kept: list[str] = []
        position = 0
        while position < min(len(text), HEAD_CHARACTERS):
            end = text.find("\n", position)
            after = len(text) if end < 0 else end + 1
            line_end = len(text) if end < 0 else end
            start = self._skip(text, position, min(line_end, position + LINE_CHARACTERS))
            if start == position or text[start:line_end].strip():
                kept.append(text[start:after])
            position = after
        kept.append(text[position:])
        return "".join(kept)

    def _skip(self, text: str, position: int, end: int) -> int:
        """Where what none of the patterns matches begins."""
        for pattern in self._patterns:
            position = pattern.match(text, position, end) or position
        return position

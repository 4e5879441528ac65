"""Removes text that changes with every request from system prompts, so that the prefix stays cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cllm.config.line_pattern import LinePattern

HEAD_MESSAGES = 8
HEAD_CHARACTERS = 4096
"""Later messages, and lines that begin later in a message, are not changed."""
LINE_CHARACTERS = 1024
"""Patterns see only this much of a line, so that the cost does not grow with the prompt."""

_ROLES = ("system", "developer")


class VolatilePatterns:
    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [LinePattern(pattern) for pattern in patterns]

    def strip(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The messages without matching text. Invalid messages are passed through; others validate them."""
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
        """Remove parts that become empty: they would be an empty line."""
        kept: list[Any] = []
        for part in parts:
            text = part.get("text") if isinstance(part, Mapping) else None
            if not isinstance(text, str):
                kept.append(part)
            elif (left := self._strip_text(text)) or not text:
                kept.append({**part, "text": left})
        return kept

    def _strip_text(self, text: str) -> str:
        """Line by line; a line that becomes empty is removed with its line break."""
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
        """The position after everything that the patterns match."""
        for pattern in self._patterns:
            position += pattern.match(text[position:end]) or 0
        return position

"""Scans JSON character by character and knows at every point whether the text so far can become a value."""

from __future__ import annotations

from collections.abc import Mapping

_SPACE = frozenset(" \t\n\r")
_DIGITS = frozenset("0123456789")
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = frozenset('"\\/bfnrt')
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_AFTER: Mapping[str, Mapping[str, str]] = {
    "-": {"0": "0", **dict.fromkeys("123456789", "int")},
    "0": {".": ".", "e": "e", "E": "e"},
    "int": {**dict.fromkeys("0123456789", "int"), ".": ".", "e": "e", "E": "e"},
    ".": dict.fromkeys("0123456789", "frac"),
    "frac": {**dict.fromkeys("0123456789", "frac"), "e": "e", "E": "e"},
    "e": {**dict.fromkeys("0123456789", "exp"), "+": "e+", "-": "e+"},
    "e+": dict.fromkeys("0123456789", "exp"),
    "exp": dict.fromkeys("0123456789", "exp"),
}
"""States of a number after its next character."""
_WHOLE_NUMBERS = frozenset({"0", "int", "frac", "exp"})
MOST_NESTED = 128


class JsonScanner:
    """One object or list. Control characters within strings, which models write and JSON forbids, are let through:
    `repaired` is what JSON wants instead."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        """The brackets that are open."""
        self.done = False
        self.in_string = False
        self.is_key = False
        """Whether the string is a key."""
        self._wants = "value"
        self._escape = 0
        """Characters of an escape still to come: 5 is the one that says which."""
        self._number = ""
        self._literal = ""

    def feed(self, char: str) -> bool:
        """False: this can no longer become JSON."""
        if self.done:
            return False
        if self.in_string:
            return self._feed_string(char)
        if self._literal:
            fits = char == self._literal[0]
            self._literal = self._literal[1:]
            if not self._literal:
                self._end_value()
            return fits
        if self._number:
            following = _AFTER[self._number].get(char)
            if following is not None:
                self._number = following
                return True
            if self._number not in _WHOLE_NUMBERS:
                return False
            self._number = ""
            self._end_value()
        return char in _SPACE or self._feed_mark(char)

    def _feed_string(self, char: str) -> bool:
        if self._escape == 5:
            self._escape = 4 if char == "u" else 0
            return char == "u" or char in _ESCAPES
        if self._escape:
            self._escape -= 1
            return char in _HEX
        if char == "\\":
            self._escape = 5
        elif char == '"':
            self.in_string = False
            if self.is_key:
                self._wants = ":"
            else:
                self._end_value()
        return True

    def _feed_mark(self, char: str) -> bool:
        wants = self._wants
        if wants in ("value", "value or ]"):
            if char == "]" and wants == "value or ]":
                return self._close("[")
            return self._begin_value(char)
        if wants in ("key", "key or }"):
            if char == "}" and wants == "key or }":
                return self._close("{")
            self.in_string = self.is_key = char == '"'
            return self.in_string
        if wants == ":":
            self._wants = "value"
            return char == ":"
        if char == ",":
            self._wants = "key" if self.stack[-1] == "{" else "value"
            return True
        return char in "]}" and self._close("[" if char == "]" else "{")

    def _begin_value(self, char: str) -> bool:
        if char in "{[":
            self.stack.append(char)
            self._wants = "key or }" if char == "{" else "value or ]"
            return len(self.stack) <= MOST_NESTED
        if not self.stack:
            return False
        if char == '"':
            self.in_string, self.is_key = True, False
        elif char in _LITERALS:
            self._literal = _LITERALS[char][1:]
        elif char == "-" or char in _DIGITS:
            self._number = "-" if char == "-" else "0" if char == "0" else "int"
        else:
            return False
        return True

    def _close(self, bracket: str) -> bool:
        if self.stack[-1] != bracket:
            return False
        self.stack.pop()
        self._end_value()
        return True

    def _end_value(self) -> None:
        self._wants = ", or end"
        self.done = not self.stack


def repaired(char: str) -> str:
    """A character of a string as JSON wants it."""
    return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char) or (f"\\u{ord(char):04x}" if char < " " else char)

"""Regular expressions for `prompt.volatile_patterns`, on RE2: clients choose the text, and Python's `re` backtracks."""

from __future__ import annotations

import re

_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{,\d*\}|(?:[*+?]|\{\d+(?:,\d*)?\})\?", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_UNICODE = {"d": r"\p{Nd}", "w": r"\p{L}\p{N}_", "s": r"\s\x0b\x1c-\x1f\x85\p{Z}"}


class PatternError(ValueError):
    """An invalid pattern; the message completes "PATTERN ..."."""


class LinePattern:
    """Raises `PatternError`. Thread-safe."""

    def __init__(self, pattern: str) -> None:
        import re2  # takes milliseconds to import

        options = re2.Options()
        options.longest_match = options.never_capture = True
        options.log_errors = False
        try:
            self._regex = re2.compile(_PART.sub(_as_in_python, pattern).encode(errors="replace"), options)
        except re2.error as error:
            raise PatternError(f"is invalid ({error.args[0].decode(errors='replace')})") from None
        if self.match("") is not None:
            raise PatternError("matches the empty string")

    def match(self, text: str) -> int | None:
        """The length of the longest match at the beginning; None if there is no match."""
        encoded = text.encode(errors="replace")  # lone surrogates, one character each
        found = self._regex.match(encoded)
        return None if found is None else len(encoded[: found.end()].decode(errors="replace"))


def pattern_error(pattern: str) -> str | None:
    """Why a pattern is invalid; None if it is valid."""
    try:
        LinePattern(pattern)
    except PatternError as error:
        return str(error)
    return None


def _as_in_python(part: re.Match[str]) -> str:
    r"""RE2 knows ASCII's \d, \w and \s only, takes {,2} literally, and would ignore that a repetition is lazy."""
    source = part[0]
    if source[0] == "[":
        return _ESCAPE.sub(lambda escape: _UNICODE.get(escape[1], escape[0]), source)
    if source[0] == "{" and source[1] == ",":
        return "{0" + source[1:]
    if source[0] != "\\":
        raise PatternError(f"uses {source}, which is not supported here: the longest match counts")
    members = _UNICODE.get(source[1].lower())
    return source if members is None else f"[{'^' if source[1].isupper() else ''}{members}]"

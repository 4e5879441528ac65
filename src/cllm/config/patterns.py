"""Regular expressions of the configuration: which of them can be trusted with a line that somebody else writes.

Python's expressions try every way to match before they give up, and nothing can interrupt them. A repetition inside a
repetition, with something behind it that may fail, has more ways than anybody can wait for.
"""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

FEW = 16
"""Repetitions that are counted up to this are no danger."""

MOST_WIDE = 3
"""Repetitions of almost any character, such as .*, in one pattern: each multiplies the ways by the length of a line."""

_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def what_is_wrong(pattern: str) -> str | None:
    """Why a pattern cannot be taken; None: it can."""
    try:
        matches_nothing = re.compile(pattern).match("")
        if matches_nothing:
            return "also matches nothing"
        ways = _Ways()
        ways.follow(_parser.parse(pattern), can_fail=False)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is none ({error})"
    if ways.nested:
        return "repeats what repeats or has alternatives itself, and may take for ever on a line that almost matches"
    if ways.wide > MOST_WIDE:
        return f"has {ways.wide} repetitions of almost any character, and may take very long; {MOST_WIDE} are the most"
    return None


class _Ways:
    """What of a pattern multiplies the ways to match, where something behind it makes them be tried."""

    def __init__(self) -> None:
        self.nested = False
        self.wide = 0

    def follow(self, items: Any, *, can_fail: bool) -> bool:
        """From the end to the beginning. `can_fail`: whether what follows the items may. Whether they may, or that."""
        for operation, argument in reversed(list(items)):
            can_fail = self._one(str(operation), argument, can_fail) or can_fail
        return can_fail

    def _one(self, operation: str, argument: Any, can_fail: bool) -> bool:
        """Look at one item; whether it may fail."""
        if operation in _REPEATS:
            least, most, body = argument
            if most > FEW and can_fail and operation != "POSSESSIVE_REPEAT":
                self.nested = self.nested or _varies(body)
                self.wide += _is_wide(body)
            return self.follow(body, can_fail=can_fail) and least > 0
        if operation == "SUBPATTERN":
            return self.follow(argument[-1], can_fail=can_fail)
        if operation == "BRANCH":
            return self._any(argument[1], can_fail)
        if operation == "ATOMIC_GROUP":
            return self.follow(argument, can_fail=False)
        if operation in ("ASSERT", "ASSERT_NOT"):
            self.follow(argument[1], can_fail=operation == "ASSERT_NOT")
        if operation == "GROUPREF_EXISTS":
            return self._any([part for part in argument[1:] if part is not None], can_fail)
        return True

    def _any(self, branches: Any, can_fail: bool) -> bool:
        """Whether one of them may fail; all are looked at."""
        return sum(self.follow(branch, can_fail=can_fail) for branch in branches) > 0


def _varies(items: Any) -> bool:
    """Whether there are several ways to match the same with these."""
    for operation, argument in items:
        name = str(operation)
        if name in _REPEATS:
            least, most, body = argument
            if least != most or _varies(body):
                return True
        elif name in ("BRANCH", "GROUPREF_EXISTS") or (name == "SUBPATTERN" and _varies(argument[-1])):
            return True
    return False


def _is_wide(items: Any) -> bool:
    operation, argument = next(iter(items))
    name = str(operation)
    if name == "SUBPATTERN":
        return _is_wide(argument[-1]) if len(argument[-1]) else False
    return name in ("ANY", "NOT_LITERAL") or (name == "IN" and str(argument[0][0]) == "NEGATE")

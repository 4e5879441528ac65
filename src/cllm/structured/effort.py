"""What llguidance would work on for too long, and has no limit for: counted before it is given to it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from decimal import Decimal
from typing import Any

MOST_REMAINDERS = 100_000
"""Of `multipleOf`: a state each."""
MOST_PATTERN_PAIRS = 10_000
"""`patternProperties` of one object are compared with each other."""
SMALL_REMAINDERS = 2_000
SMALL_PATTERN_PAIRS = 100
SMALL_EXPRESSION = 512
MOST_EXPRESSION = 4096
"""Characters of a regular expression, and of several so many that their squares are no more than those of three: time
grows faster than that."""
_JOINING = frozenset({"allOf", "patternProperties", "dependencies", "dependentSchemas"})
_JOINED = frozenset(
    {"anyOf", "oneOf", "$ref", "multipleOf", "properties", "additionalProperties", "items", "prefixItems"}
)
"""Two of these at the same place hold for the same numbers."""


_only_small: ContextVar[bool] = ContextVar("_only_small", default=False)


class NotSmallError(Exception):
    """This may take longer than what others wait for should."""


@contextmanager
def only_small() -> Iterator[None]:
    """Checks raise `NotSmallError` for what takes more than a few milliseconds."""
    token = _only_small.set(True)
    try:
        yield
    finally:
        _only_small.reset(token)


def _check_small(count: int, most: int) -> None:
    if count > most and _only_small.get():
        raise NotSmallError


def check_expressions(expressions: Iterable[str]) -> None:
    """Raises `ValueError` if these regular expressions are too long."""
    squares = 0
    for each in expressions:
        if len(each) > MOST_EXPRESSION:
            raise ValueError(f"has a regular expression of {len(each)} characters; at most {MOST_EXPRESSION} are read")
        squares += len(each) ** 2
    if squares > 3 * MOST_EXPRESSION**2:
        raise ValueError("has regular expressions that are too long together")
    _check_small(squares, 3 * SMALL_EXPRESSION**2)


class Effort:
    """Of one schema."""

    def __init__(self) -> None:
        self._remainders: list[int] = []
        self._pairs = 0
        self._expressions: list[str] = []
        self._joins = False

    def count(self, schema: Mapping[str, Any]) -> None:
        """One of the schemas in it."""
        step = schema.get("multipleOf")
        if step and (type(step) is int or (type(step) is float and math.isfinite(step))):
            digits = Decimal(repr(step)).normalize().as_tuple()
            value = int("".join(map(str, digits.digits)))
            exponent = digits.exponent if isinstance(digits.exponent, int) else 0
            self._remainders.append(value * 10 ** min(max(exponent, 0), 9))
        if isinstance(patterns := schema.get("patternProperties"), Mapping):
            self._pairs += len(patterns) ** 2
            self._expressions += patterns
        if isinstance(pattern := schema.get("pattern"), str):
            self._expressions.append(pattern)
        self._joins = self._joins or not _JOINING.isdisjoint(schema) or _joined(schema)

    def check(self) -> None:
        """Raises `ValueError`."""
        check_expressions(self._expressions)
        if self._states() > MOST_REMAINDERS:
            raise ValueError("has values of multipleOf that are too large, or have too many digits, to be enforced")
        if self._pairs > MOST_PATTERN_PAIRS:
            raise ValueError(f"has more than {math.isqrt(MOST_PATTERN_PAIRS)} patternProperties")
        _check_small(self._states(), SMALL_REMAINDERS)
        _check_small(self._pairs, SMALL_PATTERN_PAIRS)

    def _states(self) -> int:
        """Or a number beyond the limit."""
        if not self._joins:
            return sum(each for each in self._remainders if each > 1000)
        together = 1
        for each in self._remainders:
            if together <= MOST_REMAINDERS:
                together = math.lcm(together, each)
        return together


def _joined(schema: Mapping[str, Any]) -> bool:
    found = _JOINED.intersection(schema)
    return len(found) > 1 and not found.isdisjoint(("anyOf", "oneOf", "$ref"))

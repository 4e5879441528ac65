"""What llguidance would work on for too long, and has no limit for: counted before it is given to it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from decimal import Decimal
from typing import Any

from cllm.structured.nodes import by_name

MOST_REMAINDERS = 100_000
"""The most remainders of `multipleOf`: a state each."""
MOST_PATTERN_PAIRS = 10_000
"""`patternProperties` of one object are compared with each other."""
SMALL_REMAINDERS = 2_000
SMALL_PATTERN_PAIRS = 100
SMALL_EXPRESSION = 512
MOST_EXPRESSION = 4096
"""Characters of a regular expression, and of several so many that their squares are no more than those of three: time
grows faster than that."""
_JOINING = frozenset({"allOf", "patternProperties", "dependencies", "dependentSchemas"})
_CHOICES = frozenset({"anyOf", "oneOf", "$ref"})
_JOINED = _CHOICES | {"multipleOf", "properties", "additionalProperties", "items", "prefixItems"}
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
    """What all schemas in one document take."""

    def __init__(self) -> None:
        self._remainders: list[int] = []
        self._pairs = 0
        self._expressions: list[str] = []
        self._joins = False

    def count(self, schema: Mapping[str, Any]) -> None:
        """One of the schemas in it."""
        step = schema.get("multipleOf")
        if step and (type(step) is int or (type(step) is float and math.isfinite(step))):
            _, digits, exponent = Decimal(repr(step)).normalize().as_tuple()
            assert isinstance(exponent, int)
            self._remainders.append(int("".join(map(str, digits))) * 10 ** min(max(exponent, 0), 9))
        patterns = by_name(schema, "patternProperties")
        self._pairs += len(patterns) ** 2
        self._expressions += patterns
        if isinstance(pattern := schema.get("pattern"), str):
            self._expressions.append(pattern)
        together = _JOINED.intersection(schema)
        self._joins |= not _JOINING.isdisjoint(schema) or (len(together) > 1 and not together.isdisjoint(_CHOICES))

    def check(self) -> None:
        """Raises `ValueError`."""
        check_expressions(self._expressions)
        if (states := self._states()) > MOST_REMAINDERS:
            raise ValueError("has values of multipleOf that are too large, or have too many digits, to be enforced")
        if self._pairs > MOST_PATTERN_PAIRS:
            raise ValueError(f"has more than {math.isqrt(MOST_PATTERN_PAIRS)} patternProperties")
        _check_small(states, SMALL_REMAINDERS)
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

"""Numbers of a JSON schema that llguidance would not take as they are.

It computes with doubles, reads long fractions inexactly, and overflows at the ends of 64-bit integers. So bounds are
moved inwards to numbers that it takes exactly, and values that are not among those are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, TypeGuard

LARGEST = 2**53
"""Whole numbers up to this one are exact."""
DIGITS = 15
"""Digits of a fraction that is read exactly."""
_LARGEST_EXPONENT = 22
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_NUMERIC = frozenset({"multipleOf", "const", "enum", *_LOWER, *_UPPER})


def keep_numbers_exact(node: dict[str, Any], *, lenient: bool) -> None:
    """Change a schema, or raise `ValueError`. If lenient, what cannot be said is left out."""
    if _NUMERIC.isdisjoint(node):
        return
    step = node.get("multipleOf")
    if _is_number(step) and step <= 0:
        raise ValueError(f"has multipleOf: {step}, which must be above 0")
    for key, reason in [*_without_a_bound(node), *_inexact(node)]:
        if not lenient:
            raise ValueError(reason)
        del node[key]


def _without_a_bound(node: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Move bounds inwards. What cannot be moved is named, with the reason."""
    for key in (*_LOWER, *_UPPER):
        if _is_number(given := node.get(key)):
            node[key] = _inwards(given, lower=key in _LOWER)
            if node[key] is None:
                yield key, f"has {key}: {given}, and nothing beyond 2^53 can be enforced"


def _inexact(node: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in ("const", "enum"):
        inexact = next((each for each in _numbers_in(node.get(key)) if not _is_exact(each)), None)
        if inexact is not None:
            yield key, f"has {inexact} in {key}, which has too many digits to be enforced exactly"


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _inwards(bound: float, *, lower: bool) -> float | None:
    """The next number inwards that is exact; None: there is none."""
    if not math.isfinite(bound):
        return None
    if abs(bound) > LARGEST:
        inwards = -LARGEST if lower else LARGEST
        return inwards if (bound < 0) == lower else None
    if _is_exact(bound):
        return bound
    return float(Context(prec=DIGITS, rounding=ROUND_CEILING if lower else ROUND_FLOOR).create_decimal(repr(bound)))


def _is_exact(value: float) -> bool:
    if isinstance(value, int):
        return abs(value) <= LARGEST
    if not math.isfinite(value) or abs(value) > LARGEST:
        return False
    digits = Decimal(repr(value)).normalize().as_tuple()
    return len(digits.digits) <= DIGITS and isinstance(digits.exponent, int) and digits.exponent >= -_LARGEST_EXPONENT


def _numbers_in(value: Any) -> Iterator[float]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if _is_number(each):
            yield each
        elif isinstance(each, (list, dict)):
            waiting += each if isinstance(each, list) else each.values()

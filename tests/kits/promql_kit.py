"""Parses the part of PromQL that the boards use, and tells which metrics and labels a query needs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

TOKEN = re.compile(
    r"""\s*(?:
    (?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)(?![\w:])
    |(?P<range>\[[^\]]*\])
    |(?P<string>"[^"\\]*")
    |(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
    |(?P<sign>=~|!~|!=|==|>=|<=|[-+*/<>=(){},])
    )""",
    re.VERBOSE,
)
AGGREGATIONS = {"sum", "avg", "max", "min", "count"}
FUNCTIONS = {"rate": ("range",), "histogram_quantile": ("number", "vector")}
"""What each takes."""
BINARY = {"+", "-", "*", "/", ">", "<", ">=", "<=", "==", "!="}
MATCHERS = {"=", "!=", "=~", "!~"}
RANGE = re.compile(r"\[(\$__rate_interval|\d+[smhd])\]")


@dataclass
class Selector:
    """A metric in a query."""

    name: str
    matchers: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Operator and value, by label."""
    grouped: set[str] = field(default_factory=set)
    """Labels by which it is aggregated."""
    rated: bool = False
    range: str | None = None


@dataclass
class Value:
    kind: str
    """number, vector or range"""
    selectors: list[Selector]


class InvalidQueryError(AssertionError):
    pass


def selectors_of(query: str) -> list[Selector]:
    """Raises if the query is not valid."""
    parser = _Parser(query)
    value = parser.expression()
    parser.expect_end()
    if value.kind == "range":
        raise InvalidQueryError(f"{query}: a range, not a vector")
    return value.selectors


class _Parser:
    def __init__(self, query: str) -> None:
        self._query = query
        self._tokens = list(_tokens(query))
        self._at = 0

    def expression(self) -> Value:
        value = self._term()
        while self._peek() in BINARY:
            self._next()
            other = self._term()
            if "range" in (value.kind, other.kind):
                self._fail("an operation on a range")
            kind = "vector" if "vector" in (value.kind, other.kind) else "number"
            value = Value(kind, value.selectors + other.selectors)
        return value

    def expect_end(self) -> None:
        if self._at != len(self._tokens):
            self._fail(f"unexpected {self._peek()!r}")

    def _term(self) -> Value:
        kind, text = self._next()
        if text == "(":
            value = self.expression()
            self._expect(")")
            return value
        if kind == "number":
            return Value("number", [])
        if kind != "name":
            self._fail(f"unexpected {text!r}")
        if text in AGGREGATIONS:
            return self._aggregation()
        return self._call(text) if self._peek() == "(" else self._selector(text)

    def _aggregation(self) -> Value:
        labels: set[str] = set()
        if self._peek() == "by":
            self._next()
            labels = set(self._labels())
        self._expect("(")
        value = self.expression()
        self._expect(")")
        if value.kind != "vector":
            self._fail(f"an aggregation of a {value.kind}")
        for selector in value.selectors:
            selector.grouped |= labels
        return value

    def _labels(self) -> Iterator[str]:
        self._expect("(")
        while self._peek() != ")":
            kind, text = self._next()
            if kind != "name":
                self._fail(f"{text!r} is no label")
            yield text
            if self._peek() == ",":
                self._next()
        self._expect(")")

    def _call(self, function: str) -> Value:
        if function not in FUNCTIONS:
            self._fail(f"unknown function {function}")
        self._expect("(")
        values = [self.expression()]
        while self._peek() == ",":
            self._next()
            values.append(self.expression())
        self._expect(")")
        if tuple(value.kind for value in values) != FUNCTIONS[function]:
            self._fail(f"{function} takes {FUNCTIONS[function]}")
        selectors = [selector for value in values for selector in value.selectors]
        for selector in selectors if function == "rate" else ():
            selector.rated = True
        return Value("vector", selectors)

    def _selector(self, name: str) -> Value:
        selector = Selector(name)
        if self._peek() == "{":
            self._next()
            while self._peek() != "}":
                (kind, label), (_, operator), (value_kind, value) = self._next(), self._next(), self._next()
                if (kind, value_kind) != ("name", "string") or operator not in MATCHERS:
                    self._fail(f"{label}{operator}{value} matches nothing")
                selector.matchers[label] = (operator, value[1:-1])
                if self._peek() == ",":
                    self._next()
            self._expect("}")
        if self._peek_kind() == "range":
            selector.range = self._next()[1]
            if not RANGE.fullmatch(selector.range):
                self._fail(f"{selector.range} is no range")
        return Value("vector" if selector.range is None else "range", [selector])

    def _peek(self) -> str | None:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else None

    def _peek_kind(self) -> str | None:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else None

    def _next(self) -> tuple[str, str]:
        if self._at == len(self._tokens):
            self._fail("it ends too early")
        self._at += 1
        return self._tokens[self._at - 1]

    def _expect(self, text: str) -> None:
        found = self._next()[1]
        if found != text:
            self._fail(f"{found!r} instead of {text!r}")

    def _fail(self, why: str) -> None:
        raise InvalidQueryError(f"{self._query}: {why}")


def _tokens(query: str) -> Iterator[tuple[str, str]]:
    at = 0
    while query[at:].strip():
        found = TOKEN.match(query, at)
        if found is None or found.lastgroup is None:
            raise InvalidQueryError(f"{query}: cannot read {query[at:]!r}")
        yield found.lastgroup, found[found.lastgroup]
        at = found.end()

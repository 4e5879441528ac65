"""Traces in files: one JSON object per line.

    {"timestamp": 0, "input_length": 6755, "output_length": 500, "hash_ids": [0, 1, 2, ...]}      Mooncake's format
    {"arrival": 0.25, "tokens": [1, 15, 8, ...], "output_tokens": [7, 2, ...]}                    every token known

`timestamp` is in milliseconds, `arrival` in seconds. A hash stands for the same tokens wherever it occurs (512 of them
unless said otherwise; the last one of a prompt for what is left). Without hashes or tokens nothing is shared.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cllm.errors import CLLMError
from cllm_bench.simulate.traces import TOKEN_IDS, Span, Text, TokenSource, TracedRequest

MOONCAKE_BLOCK = 512


class TraceError(CLLMError):
    """A trace that cannot be read; the message names the line and what is wrong with it."""


class FileTrace:
    """All lines are checked before the first is used. `rate` stretches time to so many requests a second."""

    def __init__(
        self,
        path: Path,
        *,
        requests: int | None = None,
        rate: float | None = None,
        hash_tokens: int = MOONCAKE_BLOCK,
    ) -> None:
        self.name = path.name
        self._path = path
        self._limit = math.inf if requests is None else requests
        self._hash_tokens = hash_tokens
        self._stretch = 1.0
        self.requests = 0
        first: float | None = None
        for request in self:
            self.requests += 1
            last = request.arrival
            first = last if first is None else first
        if first is None:
            raise TraceError(f"{path} holds no requests")
        if rate is not None and last > first:
            self._stretch = self.requests / (last - first) / rate

    def __iter__(self) -> Iterator[TracedRequest]:
        reader = _Reader(self._hash_tokens)
        given = 0
        before = 0.0
        try:
            with self._path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if given >= self._limit:
                        return
                    if not line.strip():
                        continue
                    try:
                        request = reader.read(line)
                        if request.arrival < before:
                            raise TraceError(
                                f"it arrives at {request.arrival:g} s, before the one above: sort the file"
                            )
                    except TraceError as error:
                        raise TraceError(f"{self._path} line {number}: {error}") from error
                    before = request.arrival
                    request.arrival *= self._stretch
                    given += 1
                    yield request
        except OSError as error:
            raise TraceError(f"{self._path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise TraceError(f"{self._path} cannot be read: {error}") from error


class _Reader:
    """Reads lines. Hashes become spans of tokens as they are seen for the first time."""

    def __init__(self, hash_tokens: int) -> None:
        self._hash_tokens = hash_tokens
        self._source = TokenSource()
        self._spans: dict[int, Span] = {}

    def read(self, line: str) -> TracedRequest:
        try:
            fields = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise TraceError(f"it is not JSON ({error})") from error
        if not isinstance(fields, dict):
            raise TraceError("it is not a JSON object")
        return TracedRequest(_arrival(fields), self._prompt(fields), self._answer(fields))

    def _prompt(self, fields: dict[str, Any]) -> Text:
        if "tokens" in fields:
            return _tokens(fields, "tokens")
        count = _count(fields, "input_length")
        if "hash_ids" not in fields:
            return (self._source.take(count),)
        hashes = fields["hash_ids"]
        needed = -(-count // self._hash_tokens)
        if not isinstance(hashes, list) or not all(type(value) is int for value in hashes):
            raise TraceError("hash_ids must be a list of whole numbers")
        if len(hashes) != needed:
            raise TraceError(
                f"hash_ids has {len(hashes)} hashes, but an input_length of {count} makes {needed} blocks of "
                f"{self._hash_tokens} tokens"
            )
        spans = [self._span(value) for value in hashes]
        left = count - (needed - 1) * self._hash_tokens
        spans[-1] = (spans[-1][0], left)
        return tuple(spans)

    def _span(self, value: int) -> Span:
        span = self._spans.get(value)
        if span is None:
            span = self._spans[value] = self._source.take(self._hash_tokens)
        return span

    def _answer(self, fields: dict[str, Any]) -> Text:
        if "output_tokens" in fields:
            return _tokens(fields, "output_tokens")
        return (self._source.take(_count(fields, "output_length")),)


def _arrival(fields: dict[str, Any]) -> float:
    name, unit = ("timestamp", 1e-3) if "timestamp" in fields else ("arrival", 1.0)
    value = fields.get(name)
    if value is None:
        raise TraceError("it has neither timestamp (milliseconds) nor arrival (seconds)")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise TraceError(f"{name} is {value!r}; it must be a number of at least 0")
    return value * unit


def _count(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 1 <= value < TOKEN_IDS:
        raise TraceError(f"{name} is {value!r}; it must be a whole number of at least 1")
    return value


def _tokens(fields: dict[str, Any], name: str) -> array[int]:
    value = fields[name]
    if not isinstance(value, list) or not value:
        raise TraceError(f"{name} must be a list of token ids that is not empty")
    try:
        return array("i", value)
    except (TypeError, OverflowError) as error:
        raise TraceError(f"{name} must be a list of token ids: {error}") from error

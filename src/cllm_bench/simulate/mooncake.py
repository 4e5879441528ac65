"""Synthetic traces as files in Mooncake's format, which `simulate/files.py` reads, and other tools, too.

A file has fixed times. So whoever follows in a file does so as if every answer had taken `TOKEN_S` a token.
"""

from __future__ import annotations

import heapq
import json
from array import array
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from cllm.errors import CLLMError
from cllm_bench.simulate.traces import Text, Trace, TracedRequest

TOKEN_S = 0.02


def write_trace(trace: Trace, file: Path, hash_tokens: int) -> str:
    """Write all requests; a sentence that says what they are like."""
    known: set[int] = set()
    requests = prompts = answers = repeated = 0
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w", encoding="utf-8") as lines:
            for record in records(trace, hash_tokens):
                lines.write(json.dumps(record) + "\n")
                requests += 1
                prompts += record["input_length"]
                answers += record["output_length"]
                again = sum(number in known for number in record["hash_ids"])
                repeated += min(again * hash_tokens, record["input_length"])
                known.update(record["hash_ids"])
    except OSError as error:
        raise CLLMError(f"cannot write {file}: {error.strerror or error}") from error
    return (
        f"{file}: {requests:,} requests; mean prompt {prompts / requests:,.0f} tokens, mean answer "
        f"{answers / requests:,.0f}; {100 * repeated / prompts:.1f} % of all prompt tokens came before"
    )


def records(trace: Trace, hash_tokens: int) -> Iterator[dict[str, Any]]:
    blocks = _BlockIds(hash_tokens)
    for arrival, request in _in_order(trace):
        yield {
            "timestamp": round(1000 * arrival),
            "input_length": request.prompt_length,
            "output_length": request.answer_length,
            "hash_ids": blocks.of(request.prompt),
        }


def _in_order(trace: Trace) -> Iterator[tuple[float, TracedRequest]]:
    """All requests by their time, those that follow others among them."""
    coming: list[tuple[float, int, TracedRequest]] = []
    numbers = count()

    def sent(arrival: float, request: TracedRequest) -> tuple[float, TracedRequest]:
        answered = arrival + request.answer_length * TOKEN_S
        for follower in request.followers:
            heapq.heappush(coming, (answered + follower.arrival, next(numbers), follower))
        return arrival, request

    for request in trace:
        while coming and coming[0][0] < request.arrival:
            arrival, _, follower = heapq.heappop(coming)
            yield sent(arrival, follower)
        yield sent(request.arrival, request)
    while coming:
        arrival, _, follower = heapq.heappop(coming)
        yield sent(arrival, follower)


class _BlockIds:
    """An id for every block of text that follows the same text; a last block that is not full has one, too."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._ids: dict[tuple[int, ...], int] = {}

    def of(self, text: Text) -> list[int]:
        assert not isinstance(text, array), "synthetic traces consist of spans"
        ids: list[int] = []
        pieces: list[int] = []
        room = self._block_tokens
        for first, tokens in text:
            start, end = first, first + tokens
            while start < end:
                taken = min(room, end - start)
                pieces += (start, taken)
                start += taken
                room -= taken
                if room == 0:
                    ids.append(self._id(ids, pieces))
                    pieces, room = [], self._block_tokens
        if pieces:
            ids.append(self._id(ids, pieces))
        return ids

    def _id(self, before: list[int], pieces: list[int]) -> int:
        key = (before[-1] if before else -1, *pieces)
        return self._ids.setdefault(key, len(self._ids))

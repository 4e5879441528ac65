"""What the engine shows of its inside while somebody looks on: the cache as a picture, and every request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from cllm.engine.request import Request
from cllm.engine.roster import Roster
from cllm.kv.view import KVView

INTERVAL_S = 0.25
LONGEST_S = 1.0
MOST_SHARE = 0.005
"""Of the engine's time that pictures should take: where they take long they come less often, down to `LONGEST_S`."""
MOST_REQUESTS = 100
"""Requests in a picture: those that run, then those that have waited longest."""


class RequestView(NamedTuple):
    id: str
    running: bool
    prompt_tokens: int
    computed: int
    """Prompt tokens that are in memory, those from the cache included."""
    cached: int
    generated: int
    answers: int
    rate: float
    """Tokens a second since it was admitted, of its prompt; since its first token, of its answers."""
    age_s: float


class Picture(NamedTuple):
    """One moment of the engine, immutable once it is published."""

    number: int
    kv: KVView
    requests: tuple[RequestView, ...]
    requests_in_all: int


class Watch:
    """Pictures are made on the engine's thread, between steps, and only while there are watchers.

    Watchers come and go on one other thread, and read the latest picture without waiting.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.picture: Picture | None = None
        self._clock = clock
        self._watchers = 0
        self._made = 0
        self._next_at = 0.0
        self._late = False
        """Whether something may have happened that the latest picture does not show."""

    def join(self) -> None:
        self._watchers += 1

    def leave(self) -> None:
        self._watchers -= 1
        if self._watchers == 0:
            self.picture = None

    @property
    def due_at(self) -> float | None:
        """When the engine should come by again, though it may have nothing to do."""
        return self._next_at if self._late and self._watchers else None

    def look(self, roster: Roster) -> None:
        """A turn of the engine is over: publish a picture of it, unless the last one is too recent."""
        if not self._watchers:
            return
        now = self._clock()
        self._late = now < self._next_at and self.picture is not None
        if self._late:
            return
        self._made += 1
        self._next_at = now + INTERVAL_S
        requests = _in_order(roster)
        shown = tuple(view_of(request, now) for request in islice(requests, MOST_REQUESTS))
        self.picture = Picture(self._made, roster.kv.view(), shown, len(roster.requests))
        took_s = self._clock() - now
        self._next_at = now + max(INTERVAL_S, min(took_s / MOST_SHARE, LONGEST_S))


def _in_order(roster: Roster) -> Iterable[Request]:
    running = dict.fromkeys(sequence.request for sequence in roster.running)
    return *running, *(request for request in roster.requests.values() if request not in running)


def view_of(request: Request, now: float) -> RequestView:
    first = request.sequences[0]
    generated = request.generated
    computed = request.computed
    if request.first_token_at is not None and request.last_token_at is not None:
        tokens, seconds = generated - request.params.n, request.last_token_at - request.first_token_at
    elif request.admitted_at is not None:
        tokens, seconds = computed - request.cached_tokens, now - request.admitted_at
    else:
        tokens, seconds = 0, 0.0
    return RequestView(
        request.id,
        any(sequence.running for sequence in request.sequences),
        first.n_prompt,
        computed,
        request.cached_tokens,
        generated,
        request.params.n,
        max(0, tokens) / seconds if seconds > 0 else 0.0,
        now - request.arrival,
    )

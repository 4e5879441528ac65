"""What the engine publishes of itself, as immutable values, so that readers never wait: statistics after every step,
and views for the web page while somebody watches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import NamedTuple

from cllm.backends.base import Backend
from cllm.engine.request import Request
from cllm.engine.requests import Requests
from cllm.engine.scheduler import Scheduler
from cllm.kv.manager import KVManager
from cllm.kv.usage import KVUsage
from cllm.kv.view import KVView


class EngineSnapshot(NamedTuple):
    kv: KVUsage
    running: int
    waiting: int
    steps: int
    preemptions: int
    rebuilds: int
    position_mismatches: int
    batch_splits: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    dropped_tokens: int
    """Computed tokens that rolling windows dropped."""
    drafted_tokens: int
    """Drafted tokens that were computed."""
    accepted_drafts: int
    """Drafted tokens that became tokens of answers."""
    finished: Mapping[str, int]
    """Finish reason -> requests."""
    uptime_s: float
    last_step_s: float
    step_token_budget: int


def take_snapshot(
    scheduler: Scheduler, backend: Backend, *, steps: int, rebuilds: int, uptime_s: float, last_step_s: float
) -> EngineSnapshot:
    return EngineSnapshot(
        kv=scheduler.kv.usage(),
        running=len(scheduler.requests.running),
        waiting=len(scheduler.requests.waiting),
        steps=steps,
        preemptions=scheduler.requests.preemptions,
        rebuilds=rebuilds,
        position_mismatches=scheduler.faults.position_mismatches,
        batch_splits=backend.batch_splits,
        prompt_tokens=scheduler.requests.prompt_tokens,
        cached_tokens=scheduler.requests.cached_tokens,
        generated_tokens=scheduler.requests.generated_tokens,
        dropped_tokens=scheduler.kv.dropped_tokens,
        drafted_tokens=scheduler.requests.drafted_tokens,
        accepted_drafts=scheduler.requests.accepted_drafts,
        finished=dict(scheduler.requests.finished),
        uptime_s=uptime_s,
        last_step_s=last_step_s,
        step_token_budget=scheduler.budget.chunk_tokens(len(scheduler.requests.running)),
    )


INTERVAL_S = 0.25
LONGEST_S = 1.0
MOST_SHARE = 0.005
"""The share of the engine's time that views may take: slow ones come less often, at least every `LONGEST_S`."""
MOST_REQUESTS = 100
"""Requests in a view: the running ones, then those that have waited longest."""


class RequestView(NamedTuple):
    id: str
    running: bool
    prompt_tokens: int
    computed: int
    """Prompt tokens in memory, including those from the cache."""
    cached: int
    generated: int
    answers: int
    rate: float
    """Tokens a second: of its answers since the first token, before that of its prompt since admission."""
    age_s: float


class EngineView(NamedTuple):
    """One moment of the engine, immutable once it is published."""

    number: int
    kv: KVView
    requests: tuple[RequestView, ...]
    requests_in_all: int


class ViewPublisher:
    """Makes views on the engine's thread, between steps, while there are watchers.

    Watchers are added and removed on one other thread, and read the latest view without waiting.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.latest: EngineView | None = None
        self._clock = clock
        self._watchers = 0
        self._made = 0
        self._next_at = 0.0
        self._late = False
        """Whether the latest view may be out of date."""

    def add_watcher(self) -> None:
        self._watchers += 1

    def remove_watcher(self) -> None:
        self._watchers -= 1
        if self._watchers == 0:
            self.latest = None

    @property
    def due_at(self) -> float | None:
        """When the engine should call `publish` again, though it may have nothing to do."""
        return self._next_at if self._late and self._watchers else None

    def publish(self, requests: Requests, kv: KVManager) -> None:
        """After a turn of the engine: make a view, unless the last one is too recent."""
        if not self._watchers:
            return
        now = self._clock()
        self._late = now < self._next_at and self.latest is not None
        if self._late:
            return
        self._made += 1
        self._next_at = now + INTERVAL_S
        shown = tuple(view_of(request, now) for request in islice(_in_order(requests), MOST_REQUESTS))
        self.latest = EngineView(self._made, kv.view(), shown, len(requests.by_id))
        took_s = self._clock() - now
        self._next_at = now + max(INTERVAL_S, min(took_s / MOST_SHARE, LONGEST_S))


def _in_order(requests: Requests) -> Iterable[Request]:
    running = dict.fromkeys(sequence.request for sequence in requests.running)
    return *running, *(request for request in requests.by_id.values() if request not in running)


def view_of(request: Request, now: float) -> RequestView:
    generated = request.generated
    computed = request.computed
    if request.first_token_at is not None and request.last_token_at is not None:
        tokens, seconds = generated - request.params.n, request.last_token_at - request.first_token_at
    elif request.admitted_at is not None:
        tokens, seconds = computed - request.hit.tokens, now - request.admitted_at
    else:
        tokens, seconds = 0, 0.0
    return RequestView(
        request.id,
        any(sequence.running for sequence in request.sequences),
        len(request.prompt),
        computed,
        request.hit.tokens,
        generated,
        request.params.n,
        max(0, tokens) / seconds if seconds > 0 else 0.0,
        now - request.arrival,
    )

"""Requests of an ingress on their way through replicas. Each ends exactly once, whatever happens to its replica.

    send ──► accepted ──► outputs … ──► ended
      ▲         │            │
      └─────────┴────────────┴── the replica refuses, dies, hangs or drains: sent again, with the tokens so far

The ingress keeps every token it has passed on, and the seed. So another replica continues where the last one stopped,
and computes what that one would have.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cllm.cluster.messages import ENDS_ALL, Accepted, Cancel, Ended, Refusal, ReplicaJob, ReplicaProgress, Route
from cllm.cluster.peers import Peer
from cllm.cluster.routing_view import RoutingView
from cllm.engine.observer import Observers, record_of
from cllm.engine.request import NO_HIT, FinishReason, Output, Request, RequestState
from cllm.engine.resuming import Generated
from cllm.errors import (
    BackendError,
    ModelUnavailableError,
    OverloadedError,
    RequestTimeoutError,
    ShuttingDownError,
    describe,
)
from cllm.observe.router_metrics import RouterMetrics

log = logging.getLogger("cllm.cluster")

_REFUSED_S = 0.1
"""How long to wait when every replica has refused a request."""


class _Running:
    """A request that has not ended."""

    def __init__(self, request: Request) -> None:
        self.request = request
        loop = asyncio.get_running_loop()
        self.accepted: asyncio.Future[None] = loop.create_future()
        """Done when a replica has accepted it for the first time, or when it has failed before."""
        self.changed = asyncio.Event()
        """Something has happened to the job under way."""
        self.job: ReplicaJob | None = None
        """The one under way."""
        self.peer: Peer | None = None
        """The replica that has accepted it."""
        self.lost = False
        """Whether the job under way will bring nothing more."""
        self.ended = False
        self.drained = False
        """Whether its last replica was stopped on purpose, rather than lost."""
        self.sends = 0
        """Jobs that were lost with their replicas."""
        self.tried: set[str] = set()
        self.waits_since = time.monotonic()
        """Since when no replica works on it."""
        self.stopped: dict[int, FinishReason] = {}
        """Answers that were cancelled alone."""
        self.task: asyncio.Task[None] | None = None

    @property
    def waits(self) -> bool:
        """Whether no replica was found for it yet."""
        return self.peer is None and (self.job is None or self.job.route is None or self.job.route.chosen is None)

    @property
    def name(self) -> str:
        """The name of the job under way."""
        return "" if self.job is None else self.job.name

    def is_with(self, peer: Peer) -> bool:
        """Whether this replica works on it, or was chosen to."""
        if self.peer is not None:
            return self.peer is peer
        return self.job is not None and self.job.route is not None and self.job.route.chosen == peer.name

    @property
    def generated(self) -> Generated | None:
        sequences = self.request.sequences
        if not any(len(each.tokens) > each.n_prompt or each.ended for each in sequences):
            return None
        return [None if each.ended else list(each.tokens[each.n_prompt :]) for each in sequences]


class Dispatcher:
    def __init__(
        self,
        ingress: str,
        replicas: Any,
        view: RoutingView,
        deliver: Callable[[list[Output]], None],
        observers: Observers,
        metrics: RouterMetrics,
        *,
        weights: str,
        silence_s: float,
        wait_s: float,
        max_sends: int,
    ) -> None:
        """`replicas`: Ray Serve's handle. `wait_s`: how long a request waits while no replica can take it. `max_sends`:
        a request that this many replicas did not finish fails: it may be what breaks them."""
        self._ingress = ingress
        self._replicas = replicas
        self._view = view
        self._deliver = deliver
        self._observers = observers
        self._metrics = metrics
        self._weights = weights
        self._silence_s = silence_s
        self._wait_s = wait_s
        self._max_sends = max_sends
        self._numbers = itertools.count(1)
        self._running: dict[str, _Running] = {}
        self._jobs: dict[str, _Running] = {}

    @property
    def streams(self) -> int:
        """Requests that have not ended."""
        return len(self._running)

    @property
    def requests(self) -> list[Request]:
        return [running.request for running in self._running.values()]

    # -- what the ingress asks ---------------------------------------------------------------------------------

    def start(self, request: Request) -> None:
        running = self._running[request.id] = _Running(request)
        # Not in the context of the HTTP request: behind Ray Serve's proxy, it would give all jobs of it one id.
        running.task = contextvars.Context().run(asyncio.create_task, self._carry(running))

    async def accepted(self, request_id: str) -> None:
        """Wait until a replica has accepted it, or it has ended."""
        running = self._running.get(request_id)
        if running is not None:
            await asyncio.wait([running.accepted])

    def cancel(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        running = self._running.get(request_id)
        if running is None:
            return
        if index is None:
            self._stop_job(running, reason)
            self._end(running, reason, None)
            return
        _end_answer(running.request, index)
        running.stopped[index] = reason
        if running.peer is not None:
            running.peer.link.send(Cancel(running.name, index, reason))

    def fail_all(self, error: Exception) -> None:
        for running in list(self._running.values()):
            self._stop_job(running, FinishReason.CANCELLED)
            self._fail(running, error)

    # -- one request -------------------------------------------------------------------------------------------

    async def _carry(self, running: _Running) -> None:
        try:
            while not running.ended:
                if running.request.unfinished == 0:  # all answers were stopped here, while no replica had them
                    self._end(running, FinishReason.STOP, None)
                else:
                    await self._send(running)
        except Exception as error:
            log.exception("request %s failed in the ingress", running.request.id)
            self._fail(running, BackendError(describe(error)))

    async def _send(self, running: _Running) -> None:
        """Have a replica work on it until it ends, or the replica does."""
        job = running.job = self._job(running)
        self._jobs[job.name] = running
        try:
            await self._follow(running, job)
        finally:
            self._jobs.pop(job.name, None)

    def _job(self, running: _Running) -> ReplicaJob:
        request, asked = running.request, running.request.submission
        running.peer, running.lost, running.drained = None, False, False
        running.changed.clear()
        submission = replace(
            asked,
            request_id=f"{request.id}~{next(self._numbers)}",
            params=asked.params if asked.params.seed is not None else replace(asked.params, seed=request.seed),
            timeout_s=max(0.0, request.deadline - time.monotonic()),
            generated=running.generated,
            grammar=None,  # the replica compiles its own
            shown=None,
        )
        route = Route(
            self._view.names(request.prompt.tobytes(), asked.tenant.space),
            len(request.prompt),
            asked.session,
            self._weights,
            _longest(request),
            running.tried,
            asked.replica,
        )
        return ReplicaJob(self._ingress, submission, route)

    async def _follow(self, running: _Running, job: ReplicaJob) -> None:
        response = self._replicas.run.remote(job)
        call = asyncio.ensure_future(_result(response))
        changed = asyncio.ensure_future(running.changed.wait())
        try:
            while not (call.done() or changed.done()):
                left_s = running.request.deadline - time.monotonic()
                if running.waits:
                    left_s = min(left_s, running.waits_since + self._wait_s - time.monotonic())
                done, _ = await asyncio.wait((call, changed), timeout=max(0.0, left_s), return_when="FIRST_COMPLETED")
                if not done and self._out_of_time(running):
                    return
            if call.done():
                await self._on_result(running, call)
            elif running.lost:
                self._send_again(running)
        finally:
            changed.cancel()
            call.add_done_callback(_ignore_result)
            if not call.done() and (running.lost or running.peer is None):
                with suppress(Exception):
                    response.cancel()

    def _out_of_time(self, running: _Running) -> bool:
        if time.monotonic() >= running.request.deadline:
            # A replica ends it itself, with whatever it has; it may hang, though.
            self._stop_job(running, FinishReason.TIMEOUT)
            self._fail(running, _timed_out(running.request), FinishReason.TIMEOUT)
            return True
        if running.waits and time.monotonic() >= running.waits_since + self._wait_s:
            self._fail(running, _no_replica())
            return True
        return False

    async def _on_result(self, running: _Running, call: asyncio.Future[Refusal | None]) -> None:
        if running.ended:
            return
        try:
            refusal = call.result()
        except (Exception, asyncio.CancelledError) as error:  # of Ray: the replica died, or the call was not made
            log.info("request %s: %s", running.request.id, type(error).__name__)
            if running.waits:
                await self._wait(running, _no_replica())
            else:
                running.drained = running.peer is not None and running.peer.draining
                self._stop_job(running, FinishReason.CANCELLED)  # the replica may be alive
                self._send_again(running)
            return
        if refusal is None:
            # Its last messages may still be on the way.
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(running.changed.wait(), self._silence_s)
            if not running.ended:
                self._send_again(running)
        elif refusal.elsewhere:
            await self._on_refused(running, refusal)
        else:
            self._fail(running, refusal.error)

    async def _on_refused(self, running: _Running, refusal: Refusal) -> None:
        """It may be taken elsewhere, or later."""
        if running.request.first_token_at is None and refusal.replica not in running.tried:
            self._metrics.retried("refused")
        running.tried.add(refusal.replica)
        if running.job is None or running.job.route is None or not running.job.route.last:
            return
        # What was accepted once is not refused later, only because its replica is gone and the others are busy.
        if isinstance(refusal.error, OverloadedError) and not running.accepted.done():
            self._fail(running, refusal.error)
        else:
            await self._wait(running, refusal.error)

    async def _wait(self, running: _Running, error: Exception) -> None:
        """A moment, while no replica can take it; after `wait_s` it fails."""
        if time.monotonic() > running.waits_since + self._wait_s:
            self._fail(running, error)
        else:
            await asyncio.sleep(_REFUSED_S)

    def _send_again(self, running: _Running) -> None:
        """Its replica was lost, or drains."""
        why = "draining" if running.drained else "lost"
        running.sends += why == "lost"
        running.waits_since = time.monotonic()
        if running.job is not None and running.job.route is not None and running.job.route.chosen is not None:
            running.tried.add(running.job.route.chosen)
        if (only := running.request.submission.replica) is not None:
            self._fail(running, ModelUnavailableError(f"the replica {only} is gone"))
            return
        if running.sends >= self._max_sends:
            message = f"{running.sends} replicas were lost while they worked on this request"
            self._fail(running, BackendError(message))
            return
        if running.request.first_token_at is None:
            self._metrics.retried(why)
        else:
            self._metrics.resumed()
        log.info("request %s is sent again: its replica was %s", running.request.id, why)

    def _stop_job(self, running: _Running, reason: FinishReason) -> None:
        if running.peer is not None:
            running.peer.link.send(Cancel(running.name, None, reason))

    # -- what replicas say -------------------------------------------------------------------------------------

    def _of(self, peer: Peer, job: str) -> _Running | None:
        """None: the request has ended, or is with another replica by now."""
        running = self._jobs.get(job)
        return running if running is not None and running.name == job and running.peer in (None, peer) else None

    def on_accepted(self, peer: Peer, message: Accepted) -> None:
        running = self._of(peer, message.job)
        if running is None:
            peer.link.send(Cancel(message.job, None, FinishReason.CANCELLED))
            return
        running.peer = peer
        if running.job is not None and (route := running.job.route) is not None:
            self._metrics.routed(peer.name, route.seconds, route.expected, route.tokens)
        running.request.state = RequestState.PROCESSING
        if not running.accepted.done():
            running.accepted.set_result(None)
        for index, reason in running.stopped.items():
            peer.link.send(Cancel(message.job, index, reason))

    def on_output(self, peer: Peer, output: Output) -> None:
        """From a replica, where the request has the name of its job."""
        running = self._of(peer, output.request_id)
        if running is None or running.ended:
            return
        error = output.error
        if isinstance(error, ShuttingDownError) or (isinstance(error, BackendError) and error.fatal):
            running.lost = True
            running.drained = isinstance(error, ShuttingDownError)
            running.changed.set()
            return
        request = running.request
        ends_all = output.reason in ENDS_ALL and running.stopped.get(output.answer) is not output.reason
        output = output._replace(
            request_id=request.id,
            answer=_open_answer(request) if ends_all else output.answer,
            error=_timed_out(request) if isinstance(error, RequestTimeoutError) else error,
        )
        _mirror(request, output, time.monotonic())
        self._deliver([output])
        if output.reason is not None and (request.unfinished == 0 or ends_all):
            self._end(running, output.reason, output.error)

    def on_progress(self, peer: Peer, message: ReplicaProgress) -> None:
        running = self._of(peer, message.job)
        if running is not None and not running.ended and running.request.first_token_at is None:
            first = running.request.sequences[0]
            first.num_computed = min(message.computed, first.n_prompt)
            if message.computed and not first.running:
                first.running = True
                running.request.admitted_at = time.monotonic()
            running.request.hit = message.hit

    def on_ended(self, peer: Peer, message: Ended) -> None:
        running = self._of(peer, message.job)
        if running is None:
            return
        for mark, done in zip(running.request.submission.pins, message.pins, strict=True):
            mark.pin_id, mark.pinned_tokens = done.pin_id, done.pinned_tokens
            mark.left_s, mark.refusal = done.left_s, done.refusal
        running.changed.set()

    def on_lost(self, peer: Peer) -> None:
        self._metrics.forget(peer.name)
        for running in list(self._jobs.values()):
            if running.is_with(peer) and not running.ended:
                running.lost = True
                running.drained = peer.draining
                running.changed.set()

    # -- ends --------------------------------------------------------------------------------------------------

    def _fail(self, running: _Running, error: Exception, reason: FinishReason = FinishReason.ERROR) -> None:
        if running.ended:
            return
        if isinstance(error, BackendError | ModelUnavailableError):
            self._metrics.failed()
        answer = _open_answer(running.request)
        self._end(running, reason, error)
        self._deliver([Output(running.request.id, answer, None, None, reason, None, error, NO_HIT)])

    def _end(self, running: _Running, reason: FinishReason, error: Exception | None) -> None:
        if running.ended:
            return
        running.ended = True
        request = running.request
        request.reason, request.state = reason, reason.state
        self._running.pop(request.id, None)
        if not running.accepted.done():
            running.accepted.set_result(None)
        running.changed.set()
        self._observers.finished(record_of(request, time.monotonic(), error))
        request.close()


def _longest(request: Request) -> int:
    """How many tokens of it a replica's memory must be able to hold."""
    sequence = request.sequences[0]
    return sequence.max_length if sequence.window is None else sequence.window.capacity


def _open_answer(request: Request) -> int:
    """One that has not ended: what ends all answers is told with it, because nobody listens to one that has."""
    return next((sequence.index for sequence in request.sequences if not sequence.ended), 0)


def _timed_out(request: Request) -> RequestTimeoutError:
    """As the engine says it, which has another id for the request and gets only what is left of its time."""
    limit_s = round(request.deadline - request.arrival, 3)
    return RequestTimeoutError(f"request {request.id} did not finish within {limit_s:g} s")


def _no_replica() -> ModelUnavailableError:
    return ModelUnavailableError("no replica is available; try again later")


def _ignore_result(call: asyncio.Future[Any]) -> None:
    """Keep asyncio from reporting an error that nobody asked for."""
    if not call.cancelled():
        call.exception()


async def _result(response: Any) -> Refusal | None:
    result: Refusal | None = await response
    return result


def _mirror(request: Request, output: Output, now: float) -> None:
    """Keep the request as its engine would."""
    sequence = request.sequences[output.answer]
    if request.first_token_at is None and output.token_id is not None:
        request.hit = output.hit
        request.admitted_at = request.admitted_at or request.arrival
        request.first_token_at = now
        sequence.num_computed = sequence.n_prompt
    elif output.token_id is not None and request.last_token_at is not None:
        request.gaps.append(now - request.last_token_at)
    if output.token_id is not None:
        request.last_token_at = now
        sequence.running = True
        if output.stop_token is None:
            sequence.append(output.token_id)
    if output.reason is not None:
        _end_answer(request, output.answer)


def _end_answer(request: Request, index: int) -> None:
    sequence = request.sequences[index]
    if not sequence.ended:
        sequence.ended, sequence.running = True, False
        request.unfinished -= 1

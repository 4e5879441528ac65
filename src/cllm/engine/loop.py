"""The engine: one thread that owns scheduler, cache and backend, so that none of them needs a lock.

Other threads talk to it through an inbox and read what it publishes. `Stepper` has the steps: schedule, compute, apply.

No failure outlives its turn. A fault of one sequence is handled where it happens; after any other, the memory may be
wrong, and there is one remedy: `_rebuild`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from cllm.backends.base import Backend
from cllm.engine.observer import ATTEMPTS, Deliver, Outbox
from cllm.engine.plan import StepPlan
from cllm.engine.request import FinishReason, Output, Request, RequestState
from cllm.engine.scheduler import Scheduler
from cllm.engine.stats import EngineSnapshot, ViewPublisher, take_snapshot
from cllm.engine.stepper import Stepper
from cllm.engine.time_sharing import TimeShare
from cllm.errors import BackendError, OverloadedError, ShuttingDownError, describe

log = logging.getLogger("cllm.engine")
T = TypeVar("T")

SNAPSHOT_INTERVAL_S = 0.05
"""While the same requests run: snapshots would be a sixth of the engine's own work on the steps of one sequence."""

DETAILS_INTERVAL_S = 0.25
CHECK_INTERVAL_S = 10.0
IDLE_SLICE_S = 0.005
"""How long idle upkeep of the cache may run before the engine checks its inbox."""

LONGEST_WAIT_S = 3600.0
"""A thread cannot wait for arbitrarily many seconds, whatever a setting says."""

WIND_UP_S = 2.0
"""How long closing may take to hand K/V over to other tiers."""

REBUILD_ATTEMPTS = 3
"""Attempts to make a new context before the engine gives up."""

MAX_FRUITLESS_REBUILDS = 3
"""The engine gives up after more rebuilds than this without a step or a finished request in between."""


class Engine:
    """`deliver` gets every step's outputs in one call, on the engine's thread."""

    on_rebuilt: Callable[[], None] | None = None
    """Called on the engine's thread after all memory was lost and replaced."""

    def __init__(
        self,
        backend: Backend,
        scheduler: Scheduler,
        deliver: Deliver,
        *,
        max_queue: int = 256,
        upkeep_share: float = 0.03,
        time_share: TimeShare | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`upkeep_share`: how long the cache's upkeep between steps may take, as a share of a step. `time_share`: this
        engine's turns on the CPU, if other models compute there, too."""
        self.backend = backend
        self.scheduler = scheduler
        self.rebuilds = 0
        self._outbox = Outbox(deliver)
        self._max_queue = max_queue
        self._clock = clock
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._arrived = False
        """Whether `wake` was called since the last turn began: something a sequence waits for may have arrived."""
        scheduler.kv.on_arrival = self.wake
        self._submit_lock = threading.Lock()
        self._submitted = 0
        self._received = 0
        """Submitted requests that the engine's thread has taken from the inbox."""
        self._accepting = False
        self._stop_at: float | None = None
        self._failure: BackendError | None = None
        """Why the engine gave up."""
        self._progress = (0, 0)
        self._fruitless_rebuilds = 0
        # Cancellations that arrive during a step take effect before its tokens count.
        self._stepper = Stepper(
            backend,
            scheduler,
            timer=clock,
            on_planned=self._on_planned,
            on_computed=lambda plan: self._drain_inbox(),
            upkeep_share=upkeep_share,
            time_share=time_share,
        )
        self._time_share = time_share
        self._started_at = clock()
        self._checked_at = clock()
        self._details_at = 0.0
        self.details: dict[str, Any] = {}
        self.views = ViewPublisher(clock)
        self._published = (self._take_snapshot(), 0)
        """The latest snapshot, and how many submitted requests are in it."""
        self._published_at = self._started_at
        self._published_counts = self._counts()
        self._thread = threading.Thread(target=self._run, name="cllm-engine", daemon=True)

    # -- any thread --------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._accepting = True
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def accepting(self) -> bool:
        return self._accepting

    @property
    def snapshot(self) -> EngineSnapshot:
        """As of now: what runs and waits is published before a step begins, and what has come since waits, too."""
        snapshot, received = self._published
        waiting = snapshot.waiting + self._submitted - received
        return snapshot._replace(waiting=waiting, uptime_s=self._clock() - self._started_at)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises at once if it cannot be taken."""
        with self._submit_lock:
            if not self.accepting:
                raise ShuttingDownError("the server is shutting down and accepts no more requests")
            queued = self._submitted - self.scheduler.requests.dequeued
            if queued >= self._max_queue:
                raise OverloadedError(
                    f"the queue is full: {queued} requests are waiting (scheduler.max_queue is {self._max_queue})",
                    retry_after_s=self._retry_after(),
                )
            self._submitted += 1
            self._inbox.append(lambda: self._receive(request))
        self._wake.set()

    def cancel(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request, or one of its answers; unknown or finished ones are ignored."""
        self._inbox.append(lambda: self._on_cancel(request_id, index, reason))
        self._wake.set()
        if request_id in self._stepper.in_step:
            self._abort()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call a function on the engine's thread, between two steps."""
        result: Future[T] = Future()

        def work() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                result.set_result(function())
            except Exception as error:
                result.set_exception(error)

        with self._submit_lock:
            if not self.accepting:
                raise ShuttingDownError("the server is shutting down")
            self._inbox.append(work)
        self._wake.set()
        return result

    def stop(self, grace_s: float) -> None:
        """Accept no more requests, refuse waiting ones, let running ones finish within `grace_s`; then join."""
        self.begin_stop(grace_s)
        if grace_s <= 0:
            self._abort()
        # Joining before the deadline and aborting after it bounds the wait by one abort, not by one step.
        self._thread.join(max(grace_s, 0.0) + 0.05)
        while self._thread.is_alive():
            self._abort()
            self._thread.join(0.1)

    def begin_stop(self, grace_s: float) -> None:
        """The first part of `stop`: from now on the engine's turns work towards the end."""
        with self._submit_lock:
            self._accepting = False
            self._stop_at = self._clock() + grace_s
        self._wake.set()

    def wake(self) -> None:
        """Have a turn now, with all that it publishes, even in the middle of idle upkeep."""
        self._arrived = True
        self._wake.set()

    def _abort(self) -> None:
        try:
            self.backend.abort()
        except Exception:
            log.exception("the step could not be interrupted")

    def _retry_after(self) -> float:
        """About the time until a running request finishes."""
        snapshot = self.snapshot
        done = sum(snapshot.finished.values())
        return max(1.0, min(60.0, snapshot.uptime_s / done)) if done else 1.0

    # -- the engine's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self.should_stop:
                # The turn may have emptied the inbox, the last reason not to stop: nobody would wake the engine.
                if not self.turn() and not self.should_stop:
                    self._wait()
        finally:
            self.close_down()

    def turn(self) -> bool:
        """One iteration, whatever fails in it. False if there is nothing to do but wait."""
        try:
            busy = self._advance() or self._tidy()
        except BackendError as error:
            self._rebuild(error)
            busy = True
        except Exception as error:
            log.exception("unexpected error in the engine; recomputing all running requests")
            self._rebuild(BackendError(describe(error), fatal=True))
            busy = True
        outputs = self.scheduler.requests.take_outputs()
        self._publish(force=not busy or (bool(outputs) and not self.scheduler.requests.has_work))
        return self._send(outputs) or busy

    def _advance(self) -> bool:
        """Take a step. False if there is nothing to compute."""
        scheduler = self.scheduler
        self._arrived = False
        self._drain_inbox()
        scheduler.requests.expire()
        if self._stop_at is not None:
            self._refuse_waiting()
        scheduler.doubt.raise_if_any()
        if not (scheduler.requests.has_work or self._stepper.under_way):
            scheduler.kv.nobody_waits()
            if self._time_share is not None:
                self._time_share.rest()
            return False
        # If the only sequences left wait for the disk, or for memory of other models, no turn is needed until that
        # arrives and wakes the engine.
        kv = scheduler.kv
        advanced = self._stepper.advance()
        if (warning := scheduler.budget.take_warning()) is not None:
            log.warning("%s", warning)
        return advanced or not (kv.loading or kv.awaits_memory)

    def _rebuild(self, cause: BackendError) -> None:
        """Last resort: a new context. Running sequences are recomputed from their tokens."""
        self.rebuilds += 1
        log.error("rebuilding the backend's context: %s", cause)
        self._stepper.forget()
        self.scheduler.faults.preempt_all(cause)
        progress = (self._stepper.steps, sum(self.scheduler.requests.finished.values()))
        self._fruitless_rebuilds = self._fruitless_rebuilds + 1 if progress == self._progress else 0
        self._progress = progress
        if self._fruitless_rebuilds > MAX_FRUITLESS_REBUILDS:
            self._give_up(BackendError(f"the engine cannot recover: {cause}", fatal=True))
            return
        failure: Exception | None = None
        for _ in range(REBUILD_ATTEMPTS):
            try:
                self.backend.rebuild()
                self.scheduler.kv.reset()
            except Exception as error:  # noqa: PERF203 - a new attempt may succeed
                log.exception("the backend's context could not be rebuilt")
                failure = error
            else:
                if self.on_rebuilt is not None:
                    self.on_rebuilt()
                return
        message = f"the model's context was lost and could not be rebuilt: {failure} (it was lost because: {cause})"
        self._give_up(BackendError(message, fatal=True))

    def _give_up(self, failure: BackendError) -> None:
        """There is no memory to compute in: all requests end with this error, and no more are accepted."""
        log.critical("the engine is stopping: %s", failure)
        self._failure = failure

    def _tidy(self) -> bool:
        """Nothing to compute: do the cache's upkeep and checks, in slices, until there is something to do."""
        kv = self.scheduler.kv
        while not self._interrupted and kv.maintain(IDLE_SLICE_S):
            pass
        now = self._clock()
        if now - self._checked_at >= CHECK_INTERVAL_S:
            self._checked_at = now
            for _ in kv.check_in_slices():
                if self._interrupted:
                    break
        return False

    @property
    def _interrupted(self) -> bool:
        """Whether there is something more urgent than upkeep."""
        return bool(self._inbox) or self._arrived or self._stop_at is not None

    def _wait(self) -> None:
        """Until something arrives, or the next deadline, upkeep or view is due."""
        moments = (
            self.scheduler.requests.next_deadline(),
            self.scheduler.kv.upkeep_at(),
            self._stop_at,
            self.views.due_at,
        )
        deadlines = [d for d in moments if d is not None]
        timeout = min(max(0.0, min(deadlines) - self._clock()), LONGEST_WAIT_S) if deadlines else None
        if not self._inbox:
            self._wake.wait(timeout)
        self._wake.clear()

    @property
    def should_stop(self) -> bool:
        if self._failure is not None:
            return True
        if self._stop_at is None:
            return False
        return self._clock() >= self._stop_at or not (self.scheduler.requests.has_work or self._inbox)

    def close_down(self) -> None:
        """The last thing the engine does: end all requests and release everything."""
        with self._submit_lock:
            self._accepting = False
        if self._time_share is not None:
            self._time_share.leave()
        scheduler = self.scheduler
        self._drain_inbox()
        self._stepper.abandon()
        error: Exception = ShuttingDownError("the server shut down before the request finished")
        reason = FinishReason.CANCELLED
        if self._failure is not None:
            error, reason = self._failure, FinishReason.ERROR
        for request in list(scheduler.requests.by_id.values()):
            scheduler.requests.finish(request, None, reason, error)
        try:
            scheduler.doubt.raise_if_any()
            if self._failure is not None:
                scheduler.kv.reset()
            self._wind_up(WIND_UP_S)
        except Exception:
            log.exception("the cache may be inconsistent; resetting it")
            self._reset_cache()
            self._wind_up(0.0)  # nothing is kept, but other users of the same disk store need to know
        self._publish(force=True)
        for _ in range(ATTEMPTS):
            self._outbox.send(scheduler.requests.take_outputs())

    def _wind_up(self, seconds: float) -> None:
        try:
            self.scheduler.kv.drain(seconds)
        except Exception:
            log.exception("the cache could not be saved")
            self._reset_cache()

    def _reset_cache(self) -> None:
        try:
            self.scheduler.kv.reset()
        except Exception:
            log.exception("the cache could not be reset")

    def _refuse_waiting(self) -> None:
        error = ShuttingDownError("the server is shutting down; the request was still waiting in the queue")
        for sequence in list(self.scheduler.requests.waiting):
            request = sequence.request
            # One answer of a resumed request may run while another waits.
            if request.first_token_at is None and request.state is RequestState.PENDING:
                self.scheduler.requests.finish(request, None, FinishReason.CANCELLED, error)

    # -- inbox -------------------------------------------------------------------------------------------------

    def _drain_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _receive(self, request: Request) -> None:
        self._received += 1
        self.scheduler.requests.add(request)

    def _on_cancel(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        request = self.scheduler.requests.by_id.get(request_id)
        if request is not None:
            self.scheduler.requests.finish(request, index, reason)

    # -- publishing --------------------------------------------------------------------------------------------

    def _send(self, outputs: list[Output]) -> bool:
        """True if something is left to deliver in the next turn."""
        lost = self._outbox.send(outputs)
        for request_id in lost:
            if request := self.scheduler.requests.by_id.get(request_id):
                error = BackendError("tokens of the answer could not be delivered")
                self.scheduler.requests.finish(request, None, FinishReason.ERROR, error)
        return bool(lost) or self._outbox.waiting

    def _on_planned(self, plan: StepPlan) -> None:
        """A step with other sequences than the last one, or a long one, is about to begin: what is published must not
        be older than that."""
        changed = self._published_counts != self._counts()
        if changed or plan.prompt_tokens:
            self._publish(force=changed)

    def _counts(self) -> tuple[int, ...]:
        """What is published at once when it changes."""
        requests = self.scheduler.requests
        return len(requests.running), len(requests.waiting), len(requests.by_id), requests.dequeued, self.rebuilds

    def _publish(self, *, force: bool) -> None:
        try:
            now, counts = self._clock(), self._counts()
            if force or counts != self._published_counts or now - self._published_at >= SNAPSHOT_INTERVAL_S:
                self._published = (self._take_snapshot(), self._received)
                self._published_at, self._published_counts = now, counts
            if force or now - self._details_at >= DETAILS_INTERVAL_S:
                self._details_at = now
                self.details = self.scheduler.kv.details()
            self.views.publish(self.scheduler.requests, self.scheduler.kv)
        except Exception:
            log.exception("the engine's statistics could not be published; the previous ones stay")

    def _take_snapshot(self) -> EngineSnapshot:
        return take_snapshot(
            self.scheduler,
            self.backend,
            steps=self._stepper.steps,
            rebuilds=self.rebuilds,
            uptime_s=self._clock() - self._started_at,
            last_step_s=self._stepper.last_step_s,
        )

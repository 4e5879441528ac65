"""The engine: one thread that owns scheduler, cache and backend, so that none of them needs a lock.

Other threads talk to it through an inbox and read what it publishes. The steps are `Stepper`'s: schedule, compute,
apply.

Whatever fails in a turn ends in that turn. A fault of one sequence is dealt with where it happens; anything else means
that the memory is in doubt, and there is one answer to that: `_rebuild`.
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
from cllm.engine.outbox import ATTEMPTS, Deliver, Outbox
from cllm.engine.request import FinishReason, Output, Request
from cllm.engine.scheduler import Scheduler
from cllm.engine.stats import EngineSnapshot, take_snapshot
from cllm.engine.stepper import Stepper
from cllm.engine.turns import Turn
from cllm.engine.watch import Watch
from cllm.errors import BackendError, OverloadedError, ShuttingDownError, describe

log = logging.getLogger("cllm.engine")
T = TypeVar("T")

DETAILS_INTERVAL_S = 0.25
CHECK_INTERVAL_S = 10.0
IDLE_SLICE_S = 0.005
"""How long the cache may tidy up while idle before the engine looks whether somebody has come."""

LONGEST_WAIT_S = 3600.0
"""A thread cannot wait for any number of seconds that a setting may have."""

WIND_UP_S = 2.0
"""At the end, for handing over what is to be kept."""

REBUILD_ATTEMPTS = 3
"""Times that a new context is asked for before the engine gives up."""

MAX_FRUITLESS_REBUILDS = 3
"""Rebuilds in a row after which no step was computed and no request ended; with one more the engine gives up."""


class Engine:
    """`deliver` gets every step's outputs in one call, on the engine's thread."""

    on_rebuilt: Callable[[], None] | None = None
    """Called on the engine's thread when all memory was lost and there is new one."""

    def __init__(
        self,
        backend: Backend,
        scheduler: Scheduler,
        deliver: Deliver,
        *,
        max_queue: int = 256,
        upkeep_share: float = 0.03,
        turn: Turn | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`upkeep_share`: what the cache's upkeep between steps may take, as a share of a step. `turn`: this engine's
        place among those of other models."""
        self.backend = backend
        self.scheduler = scheduler
        self.rebuilds = 0
        self._outbox = Outbox(deliver)
        self._max_queue = max_queue
        self._clock = clock
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._arrived = False
        """Whether somebody called, since the last turn began, because something came that a sequence may wait for."""
        scheduler.kv.on_arrival = self.wake
        self._submit_lock = threading.Lock()
        self._submitted = 0
        self._accepting = False
        self._stop_at: float | None = None
        self._failure: BackendError | None = None
        """Why the engine gave up."""
        self._progress = (0, 0)
        self._fruitless_rebuilds = 0
        # Cancellations that arrived during a step are honoured before its tokens count.
        self._stepper = Stepper(
            backend,
            scheduler,
            timer=clock,
            on_computed=lambda plan: self._drain_inbox(),
            upkeep_share=upkeep_share,
            turn=turn,
        )
        self._turn = turn
        self._started_at = clock()
        self._checked_at = clock()
        self._details_at = 0.0
        self.details: dict[str, Any] = {}
        self.watch = Watch(clock)
        self.snapshot = self._take_snapshot()
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

    def submit(self, request: Request) -> None:
        """Queue a request. Raises at once if it cannot be taken."""
        with self._submit_lock:
            if not self.accepting:
                raise ShuttingDownError("the server is shutting down and takes no more requests")
            queued = self._submitted - self.scheduler.dequeued
            if queued >= self._max_queue:
                raise OverloadedError(
                    f"{queued} requests are waiting, the queue holds {self._max_queue} (scheduler.max_queue)",
                    retry_after_s=self._retry_after(),
                )
            self._submitted += 1
            self._inbox.append(lambda: self.scheduler.add(request))
        self._wake.set()

    def cancel(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request, or one of its answers; unknown or finished ones are ignored."""
        self._inbox.append(lambda: self._on_cancel(request_id, index, reason))
        self._wake.set()
        if request_id in self._stepper.in_step:
            self._abort()

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Have something done on the engine's thread, between two steps, and its answer."""
        answer: Future[T] = Future()

        def work() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

        with self._submit_lock:
            if not self.accepting:
                raise ShuttingDownError("the server is shutting down and answers no more questions")
            self._inbox.append(work)
        self._wake.set()
        return answer

    def stop(self, grace_s: float) -> None:
        """Take no more requests, refuse those that wait, let running ones end within `grace_s`; then join."""
        self.begin_stop(grace_s)
        if grace_s <= 0:
            self._abort()
        # Joining before the deadline and aborting after it bounds the wait by one abort, not by one step.
        self._thread.join(max(grace_s, 0.0) + 0.05)
        while self._thread.is_alive():
            self._abort()
            self._thread.join(0.1)

    def begin_stop(self, grace_s: float) -> None:
        """What `stop` does first: from now on the engine's turns work towards the end."""
        with self._submit_lock:
            self._accepting = False
            self._stop_at = self._clock() + grace_s
        self._wake.set()

    def wake(self) -> None:
        """Have a turn now, and whatever is published with it; tidying up goes on after it."""
        self._arrived = True
        self._wake.set()

    def _abort(self) -> None:
        try:
            self.backend.abort()
        except Exception:
            log.exception("the step could not be interrupted")

    def _retry_after(self) -> float:
        """About the time one running request needs to make room."""
        snapshot = self.snapshot
        done = sum(snapshot.finished.values())
        return max(1.0, min(60.0, snapshot.uptime_s / done)) if done else 1.0

    # -- the engine's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self.should_stop:
                if not self.turn():
                    self._wait()
        finally:
            self.close_down()

    def turn(self) -> bool:
        """One round, whatever fails in it; False if there is nothing to do but wait."""
        try:
            busy = self._advance() or self._tidy()
        except BackendError as error:
            self._rebuild(error)
            busy = True
        except Exception as error:
            log.exception("unexpected error in the engine; what ran is recomputed")
            self._rebuild(BackendError(describe(error), fatal=True))
            busy = True
        outputs = self.scheduler.take_outputs()
        self._publish(force=not busy or (bool(outputs) and not self.scheduler.has_work))
        return self._send(outputs) or busy

    def _advance(self) -> bool:
        """A step, if there is anything to compute; False: there is not."""
        scheduler = self.scheduler
        self._arrived = False
        self._drain_inbox()
        scheduler.expire()
        if self._stop_at is not None:
            self._refuse_waiting()
        scheduler.raise_doubt()
        if not (scheduler.has_work or self._stepper.under_way):
            scheduler.kv.awaits_memory = False  # who waited is gone
            if self._turn is not None:
                self._turn.rest()
            return False
        # Who waits for the disk, or for memory of other models, with nobody else to compute for, needs no turns until
        # there is an answer: that wakes the engine.
        kv = scheduler.kv
        advanced = self._stepper.advance()
        if (unmet := scheduler.budget.take_unmet()) is not None:
            log.warning("%s", unmet)
        return advanced or not (kv.loading or kv.awaits_memory)

    def _rebuild(self, cause: BackendError) -> None:
        """Last resort: a new context. What ran is recomputed from its tokens."""
        self.rebuilds += 1
        log.error("the backend's context is rebuilt: %s", cause)
        self._stepper.forget()
        self.scheduler.preempt_all(cause)
        progress = (self._stepper.steps, sum(self.scheduler.finished.values()))
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
        message = f"the model's context was lost and could not be rebuilt: {failure} (it was lost by: {cause})"
        self._give_up(BackendError(message, fatal=True))

    def _give_up(self, failure: BackendError) -> None:
        """There is no memory to compute in: all end with this error, and nobody is taken any more."""
        log.critical("the engine stops: %s", failure)
        self._failure = failure

    def _tidy(self) -> bool:
        """Nothing to compute: tidy up and check the cache, piece by piece, until somebody comes."""
        kv = self.scheduler.kv
        while not self._called and kv.maintain(IDLE_SLICE_S):
            pass
        now = self._clock()
        if now - self._checked_at >= CHECK_INTERVAL_S:
            self._checked_at = now
            for _ in kv.check_in_slices():
                if self._called:
                    break
        return False

    @property
    def _called(self) -> bool:
        """Whether there is something else to do than to tidy up."""
        return bool(self._inbox) or self._arrived or self._stop_at is not None

    def _wait(self) -> None:
        """Until someone comes, or for a deadline, or until the cache wants to tidy up or watchers want a picture."""
        moments = (self.scheduler.next_deadline(), self.scheduler.kv.upkeep_at(), self._stop_at, self.watch.due_at)
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
        return self._clock() >= self._stop_at or not (self.scheduler.has_work or self._inbox)

    def close_down(self) -> None:
        """The last thing the engine does: everybody who is still here is told, and nothing is held any more."""
        with self._submit_lock:
            self._accepting = False
        if self._turn is not None:
            self._turn.leave()
        scheduler = self.scheduler
        self._drain_inbox()
        self._stepper.abandon()
        error: Exception = ShuttingDownError("the server shut down before the request was done")
        reason = FinishReason.CANCELLED
        if self._failure is not None:
            error, reason = self._failure, FinishReason.ERROR
        for request in list(scheduler.requests.values()):
            scheduler.finish(request, None, reason, error)
        try:
            scheduler.raise_doubt()
            if self._failure is not None:
                scheduler.kv.reset()
            self._wind_up(WIND_UP_S)
        except Exception:
            log.exception("the cache was left in doubt")
            self._reset_cache()
            self._wind_up(0.0)  # nothing is kept of it, but others who share a disk with it need to know
        self._publish(force=True)
        for _ in range(ATTEMPTS):
            self._outbox.send(scheduler.take_outputs())

    def _wind_up(self, seconds: float) -> None:
        try:
            self.scheduler.kv.wind_up(seconds)
        except Exception:
            log.exception("what was to be kept could not be handed over")
            self._reset_cache()

    def _reset_cache(self) -> None:
        try:
            self.scheduler.kv.reset()
        except Exception:
            log.exception("the cache could not be reset")

    def _refuse_waiting(self) -> None:
        error = ShuttingDownError("the server is shutting down; the request was waiting and was not started")
        for sequence in list(self.scheduler.waiting):
            if sequence.request.first_token_at is None:
                self.scheduler.finish(sequence.request, None, FinishReason.CANCELLED, error)

    # -- inbox -------------------------------------------------------------------------------------------------

    def _drain_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _on_cancel(self, request_id: str, index: int | None, reason: FinishReason) -> None:
        request = self.scheduler.requests.get(request_id)
        if request is not None:
            self.scheduler.finish(request, index, reason)

    # -- publishing --------------------------------------------------------------------------------------------

    def _send(self, outputs: list[Output]) -> bool:
        """Deliver. True: there is something left to deliver, in the next turn."""
        lost = self._outbox.send(outputs)
        for request_id in lost:
            if request := self.scheduler.requests.get(request_id):
                error = BackendError("tokens of the answer could not be delivered")
                self.scheduler.finish(request, None, FinishReason.ERROR, error)
        return bool(lost) or self._outbox.waiting

    def _publish(self, *, force: bool = False) -> None:
        try:
            self.snapshot = self._take_snapshot()
            now = self._clock()
            if force or now - self._details_at >= DETAILS_INTERVAL_S:
                self._details_at = now
                self.details = self.scheduler.kv.details()
            self.watch.look(self.scheduler)
        except Exception:
            log.exception("the engine's numbers could not be published; the last ones stand")

    def _take_snapshot(self) -> EngineSnapshot:
        return take_snapshot(
            self.scheduler,
            self.backend,
            steps=self._stepper.steps,
            rebuilds=self.rebuilds,
            uptime_s=self._clock() - self._started_at,
            last_step_s=self._stepper.last_step_s,
        )

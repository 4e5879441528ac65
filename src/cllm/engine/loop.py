"""The engine: one thread that owns scheduler, cache and backend, so that none of them needs a lock.

Other threads talk to it through an inbox and read what it publishes. A step is three lines: schedule, compute, apply.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from cllm.backends.base import Backend
from cllm.engine.request import FinishReason, Output, Request
from cllm.engine.scheduler import Plan, Scheduler
from cllm.engine.stats import EngineSnapshot
from cllm.errors import BackendError, OverloadedError, ShuttingDownError, StepAbortedError

log = logging.getLogger("cllm.engine")

Deliver = Callable[[list[Output]], None]

DETAILS_INTERVAL_S = 0.25
CHECK_INTERVAL_S = 10.0
ABORT_CHUNK_TOKENS = 32
"""A cancelled request interrupts the step it is in if its chunk is at least this long."""


class Engine:
    """`deliver` gets every step's outputs in one call, on the engine's thread."""

    def __init__(
        self,
        backend: Backend,
        scheduler: Scheduler,
        deliver: Deliver,
        *,
        max_queue: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.backend = backend
        self.scheduler = scheduler
        self.rebuilds = 0
        self.steps = 0
        self._deliver = deliver
        self._max_queue = max_queue
        self._clock = clock
        self._inbox: deque[Callable[[], list[Output]]] = deque()
        self._wake = threading.Event()
        self._submit_lock = threading.Lock()
        self._submitted = 0
        self._accepting = False
        self._stop_at: float | None = None
        self._in_step: frozenset[str] = frozenset()
        self._started_at = clock()
        self._last_step_s = 0.0
        self._checked_at = clock()
        self._details_at = 0.0
        self.details: dict[str, Any] = {}
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
        return self._accepting and self._thread.is_alive()

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
            self._inbox.append(lambda: self._on_submit(request))
        self._wake.set()

    def cancel(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request, or one of its answers; unknown or finished ones are ignored."""
        self._inbox.append(lambda: self._on_cancel(request_id, index, reason))
        self._wake.set()
        if request_id in self._in_step:
            self.backend.abort()

    def stop(self, grace_s: float) -> None:
        """Take no more requests, refuse those that wait, let running ones end within `grace_s`; then join."""
        with self._submit_lock:
            self._accepting = False
            self._stop_at = self._clock() + grace_s
        self._wake.set()
        if grace_s <= 0:
            self.backend.abort()
        # Joining before the deadline and aborting after it bounds the wait by one abort, not by one step.
        self._thread.join(max(grace_s, 0.0) + 0.05)
        while self._thread.is_alive():
            self.backend.abort()
            self._thread.join(0.1)

    def _retry_after(self) -> float:
        """About the time one running request needs to make room."""
        snapshot = self.snapshot
        done = sum(snapshot.finished.values())
        return max(1.0, min(60.0, snapshot.uptime_s / done)) if done else 1.0

    # -- the engine's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._should_stop():
            try:
                if not self._turn():
                    self._rest()
            except Exception as error:  # noqa: PERF203 - the loop outlives any bug: requests suffer, the server goes on
                log.exception("unexpected error in the engine; what ran is recomputed")
                if not self._survive(error):
                    break
        self._accepting = False
        self._finish_all()
        self._publish(force=True)

    def _survive(self, error: Exception) -> bool:
        try:
            self._deliver_all(self._rebuild(BackendError(f"internal error: {error}", fatal=True)))
        except Exception:
            log.critical("the engine could not recover and stops", exc_info=True)
            return False
        return True

    def _turn(self) -> bool:
        """One round; False if there was nothing to do."""
        outputs = self._drain_inbox()
        outputs += self.scheduler.expire()
        if self._stop_at is not None:
            outputs += self._refuse_waiting()
        plan = self.scheduler.schedule() if self.scheduler.has_work else Plan()
        if plan.chunks:
            outputs += self._step(plan)
            self.scheduler.kv.maintain(idle=False)
        elif len(self.scheduler.waiting) and not self.scheduler.running:
            outputs += self._fail_unplaceable()
        self._publish(force=bool(outputs) and not self.scheduler.has_work)
        self._deliver_all(outputs)
        return bool(plan.chunks)

    def _step(self, plan: Plan) -> list[Output]:
        self._in_step = frozenset(
            sequence.request.id
            for sequence, chunk in zip(plan.sequences, plan.chunks, strict=True)
            if len(chunk.tokens) >= ABORT_CHUNK_TOKENS
        )
        started = self._clock()
        try:
            logits = self.backend.step(plan.chunks)
        except StepAbortedError:
            self.scheduler.rewind(plan)
            return []
        except BackendError as error:
            return self._recover(plan, error)
        finally:
            self._in_step = frozenset()
        self._last_step_s = self._clock() - started
        self.steps += 1
        self.scheduler.budget.observe(plan.prompt_tokens, plan.decode_rows, self._last_step_s)
        # Cancellations that arrived during the step are honoured before its tokens count.
        outputs = self._drain_inbox()
        outputs += self.scheduler.apply(plan, logits)
        if self.scheduler.take_suspicion():
            outputs += self._rebuild(BackendError("positions were wrong twice for one request"))
        for observer in self.scheduler.observers:
            observer.on_step(self._last_step_s, plan.prompt_tokens, plan.decode_rows)
        return outputs

    def _recover(self, plan: Plan, error: BackendError) -> list[Output]:
        """A step failed: find the sequence that cannot be computed, so that the others finish."""
        log.error("a step of %d sequences failed: %s", len(plan.sequences), error)
        if error.fatal:
            return self._rebuild(error)
        self.scheduler.rewind(plan)
        outputs: list[Output] = []
        for sequence, chunk in zip(plan.sequences, plan.chunks, strict=True):
            alone = Plan([sequence], [chunk])
            try:
                logits = self.backend.step(alone.chunks)
            except BackendError as own_error:
                if own_error.fatal:
                    return outputs + self._rebuild(own_error)
                outputs += self.scheduler.blame(sequence, own_error)
            else:
                outputs += self.scheduler.apply(alone, logits)
        return outputs

    def _rebuild(self, cause: BackendError) -> list[Output]:
        """Last resort: a new context. What ran is recomputed from its tokens."""
        self.rebuilds += 1
        log.error("the backend's context is rebuilt: %s", cause)
        outputs = self.scheduler.preempt_all(cause)
        try:
            self.backend.rebuild()
        except Exception as error:
            log.exception("the backend's context could not be rebuilt")
            failure = BackendError(f"the model's context was lost and could not be rebuilt: {error}", fatal=True)
            for request in list(self.scheduler.requests.values()):
                outputs += self.scheduler.finish(request, None, FinishReason.ERROR, failure)
        self.scheduler.kv.reset()
        return outputs

    def _rest(self) -> None:
        """Nothing to compute: tidy up, then wait for someone to come, or for a deadline."""
        kv = self.scheduler.kv
        if not self.scheduler.running:
            kv.maintain(idle=True)
            now = self._clock()
            if now - self._checked_at >= CHECK_INTERVAL_S:
                self._checked_at = now
                kv.check()
        self._publish(force=True)
        deadlines = [d for d in (self.scheduler.next_deadline(), self._stop_at) if d is not None]
        timeout = max(0.0, min(deadlines) - self._clock()) if deadlines else None
        if not self._inbox:
            self._wake.wait(timeout)
        self._wake.clear()

    def _should_stop(self) -> bool:
        if self._stop_at is None:
            return False
        return self._clock() >= self._stop_at or not (self.scheduler.has_work or self._inbox)

    def _finish_all(self) -> None:
        outputs = self._drain_inbox()
        error = ShuttingDownError("the server shut down before the request was done")
        for request in list(self.scheduler.requests.values()):
            outputs += self.scheduler.finish(request, None, FinishReason.CANCELLED, error)
        self._deliver_all(outputs)

    def _refuse_waiting(self) -> list[Output]:
        error = ShuttingDownError("the server is shutting down; the request was waiting and was not started")
        outputs: list[Output] = []
        for sequence in list(self.scheduler.waiting):
            if sequence.request.first_token_at is None:
                outputs += self.scheduler.finish(sequence.request, None, FinishReason.CANCELLED, error)
        return outputs

    def _fail_unplaceable(self) -> list[Output]:
        """Nothing runs, yet the first in the queue finds no room: it never will."""
        sequence = self.scheduler.waiting.pop()
        if sequence is None:
            return []
        self.scheduler.waiting.push(sequence)
        error = BackendError(f"there is no room in the KV cache for {len(sequence.tokens)} tokens")
        return self.scheduler.finish(sequence.request, None, FinishReason.ERROR, error)

    # -- inbox -------------------------------------------------------------------------------------------------

    def _drain_inbox(self) -> list[Output]:
        outputs: list[Output] = []
        while self._inbox:
            outputs += self._inbox.popleft()()
        return outputs

    def _on_submit(self, request: Request) -> list[Output]:
        self.scheduler.add(request)
        return []

    def _on_cancel(self, request_id: str, index: int | None, reason: FinishReason) -> list[Output]:
        request = self.scheduler.requests.get(request_id)
        return self.scheduler.finish(request, index, reason) if request is not None else []

    # -- publishing --------------------------------------------------------------------------------------------

    def _deliver_all(self, outputs: list[Output]) -> None:
        if outputs:
            self._deliver(outputs)

    def _publish(self, *, force: bool = False) -> None:
        self.snapshot = self._take_snapshot()
        now = self._clock()
        if force or now - self._details_at >= DETAILS_INTERVAL_S:
            self._details_at = now
            self.details = self.scheduler.kv.details()

    def _take_snapshot(self) -> EngineSnapshot:
        scheduler = self.scheduler
        return EngineSnapshot(
            kv=scheduler.kv.usage(),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            steps=self.steps,
            preemptions=scheduler.preemptions,
            rebuilds=self.rebuilds,
            position_mismatches=scheduler.position_mismatches,
            batch_splits=self.backend.batch_splits,
            prompt_tokens=scheduler.prompt_tokens,
            cached_tokens=scheduler.cached_tokens,
            generated_tokens=scheduler.generated_tokens,
            finished=dict(scheduler.finished),
            uptime_s=self._clock() - self._started_at,
            last_step_s=self._last_step_s,
            step_token_budget=scheduler.budget.chunk_tokens(len(scheduler.running)),
        )

"""One turn of the engine without its thread: plan, submit, collect, apply, tidy up.

With a backend of depth 1 a step is submitted and collected at once. With more, step N + 1 is planned and submitted
while N is computed:

    depth 2    plan A, submit A │ plan B, submit B, collect A, apply A │ plan C, submit C, collect B, apply B │ …

The engine, the simulator, the micro benchmark and the tests all step through this class.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from cllm.backends.base import Backend, StepResult
from cllm.engine.plan import StepPlan
from cllm.engine.scheduler import Scheduler
from cllm.engine.time_sharing import TimeShare
from cllm.errors import BackendError, StepAbortedError, describe

log = logging.getLogger("cllm.engine")

ABORT_CHUNK_TOKENS = 32
"""A cancelled request interrupts the step it is in if its chunk is at least this long."""

MAX_ABORTED_STEPS = 8
"""Aborted steps in a row. Cancellations cause at most one, so a backend that keeps aborting is broken."""


class InFlightStep(NamedTuple):
    """A step that was submitted and not collected."""

    plan: StepPlan
    ticket: Any
    started: float


class Stepper:
    """`timer` measures steps; `on_planned` is called before one begins, `on_computed` when it is done, before its
    tokens count."""

    def __init__(
        self,
        backend: Backend,
        scheduler: Scheduler,
        *,
        timer: Callable[[], float],
        on_planned: Callable[[StepPlan], None] = lambda plan: None,
        on_computed: Callable[[StepPlan], None] = lambda plan: None,
        upkeep_share: float = 0.0,
        time_share: TimeShare | None = None,
    ) -> None:
        """`upkeep_share`: how long the cache's upkeep between steps may take, as a share of a step. `time_share`: this
        engine's turns on the CPU, if other models compute there, too."""
        self.steps = 0
        self.last_step_s = 0.0
        self.in_step: frozenset[str] = frozenset()
        """Requests whose cancellation is worth aborting the step. Any thread may read it."""
        self._backend = backend
        self._scheduler = scheduler
        self._timer = timer
        self._on_planned = on_planned
        self._on_computed = on_computed
        self._upkeep_share = upkeep_share
        self._in_flight: deque[InFlightStep] = deque()
        self._aborted_steps = 0
        self._finished_at = 0.0
        self._goes_on = False
        """Sequences were still running when the last step was done, so the time between steps is a gap for them."""
        self._time_share = time_share

    @property
    def under_way(self) -> bool:
        return bool(self._in_flight)

    def advance(self) -> bool:
        """Plan and submit a step, if there is anything to compute, and collect the oldest one if it is due. False if
        there was neither."""
        if self._time_share is not None:
            return self._advance_in_turn(self._time_share)
        return self._compute_step(self._plan())

    def _advance_in_turn(self, time_share: TimeShare) -> bool:
        self._scheduler.budget.share(*time_share.begin())
        plan = self._plan()
        if not plan.chunks:
            time_share.rest()
            return self._compute_step(plan)
        time_share.answering = plan.decode_rows > 0
        with time_share:
            return self._compute_step(plan)

    def _plan(self) -> StepPlan:
        plan = self._scheduler.schedule()
        self._scheduler.doubt.raise_if_any()
        if self._goes_on and plan.chunks and not self._in_flight:
            self._scheduler.budget.costs.observe_host(self._timer() - self._finished_at)
        self._goes_on = False
        return plan

    def _compute_step(self, plan: StepPlan) -> bool:
        scheduler = self._scheduler
        if plan.chunks:
            self._on_planned(plan)
            self._submit(plan)
        if self._in_flight and (len(self._in_flight) >= self._backend.traits.depth or not plan.chunks):
            self._finish(self._in_flight.popleft())
            scheduler.doubt.raise_if_any()
            scheduler.kv.maintain(self._upkeep_share * self.last_step_s)
            return True
        return bool(plan.chunks)

    def _submit(self, plan: StepPlan) -> None:
        if self._backend.traits.depth > 1:
            self._scheduler.planner.launch(plan)
        # No two steps in a row are aborted, so that others advance however many requests are cancelled. Nor is one that
        # another step was planned on.
        elif self._aborted_steps == 0 and plan.prompt_tokens >= ABORT_CHUNK_TOKENS:
            self.in_step = frozenset(
                sequence.request.id
                for sequence, chunk in zip(plan.sequences, plan.chunks, strict=True)
                if len(chunk.tokens) >= ABORT_CHUNK_TOKENS
            )
        started = self._timer()
        try:
            ticket = self._backend.submit(plan.chunks)
        except StepAbortedError as error:
            self._aborted(plan, error)
            self._finish_all()
        except BackendError as error:
            self._failed(plan, error)
            self._finish_all()
            self._scheduler.faults.try_alone(plan, self._compute, self._scheduler.apply)
        else:
            self._in_flight.append(InFlightStep(plan, ticket, started))

    def _finish_all(self) -> None:
        """A step was not submitted; those before it are fine. The next one must not follow tokens that only the backend
        knows, because it may have gone on to those of the lost step."""
        while self._in_flight:
            self._finish(self._in_flight.popleft())

    def _finish(self, step: InFlightStep) -> None:
        plan = step.plan
        try:
            result = self._backend.collect(step.ticket)
        except StepAbortedError as error:
            self._aborted(plan, error)
            self._drop()
            return
        except BackendError as error:
            self._failed(plan, error)
            self._drop()
            self._scheduler.faults.try_alone(plan, self._compute, self._scheduler.apply)
            return
        finally:
            self.in_step = frozenset()
        now = self._timer()
        # Steps overlap: only the time since the previous one counts.
        self.last_step_s = now - max(step.started, self._finished_at)
        self._finished_at = now
        self.steps += 1
        self._aborted_steps = 0
        scheduler = self._scheduler
        scheduler.budget.observe(plan.prompt_cost, plan.decode_rows, self.last_step_s, plan.pairs, plan.beside_rows)
        if scheduler.drafting is not None and not plan.forced:
            scheduler.drafting.observe_step(plan.decode_rows, plan.drafted, self.last_step_s, plan.prompt_tokens)
        self._on_computed(plan)
        scheduler.apply(plan, result)
        scheduler.requests.observers.step(self.last_step_s, plan.prompt_tokens, plan.rows)
        self._goes_on = bool(scheduler.requests.running)

    # -- faults ------------------------------------------------------------------------------------------------

    def _aborted(self, plan: StepPlan, error: StepAbortedError) -> None:
        self._aborted_steps += 1
        if self._aborted_steps > MAX_ABORTED_STEPS:
            raise error
        log.debug("%s", error)
        self._scheduler.faults.rewind(plan)

    def _failed(self, plan: StepPlan, error: BackendError) -> None:
        log.error("a step of %d sequences failed: %s", len(plan.sequences), error)
        if error.fatal:
            raise error
        self._scheduler.faults.rewind(plan)

    def _drop(self) -> None:
        """Drop the steps that were planned on one that failed."""
        while self._in_flight:
            step = self._in_flight.popleft()
            try:
                self._backend.collect(step.ticket)
            except BackendError as error:
                if error.fatal:
                    raise
            self._scheduler.faults.rewind(step.plan)

    def _compute(self, plan: StepPlan) -> StepResult:
        """One step, submitted and collected at once."""
        if self._backend.traits.depth > 1:
            self._scheduler.planner.launch(plan)
        return self._backend.collect(self._backend.submit(plan.chunks))

    def abandon(self) -> None:
        """Collect and drop what is in flight, so that the backend is done with it."""
        while self._in_flight:
            step = self._in_flight.popleft()
            try:
                self._backend.collect(step.ticket)
            except Exception as error:
                log.debug("an abandoned step failed: %s", describe(error))

    def forget(self) -> None:
        """The backend's context is lost, and with it what was in flight."""
        self._in_flight.clear()
        self._goes_on = False

"""One turn of the engine without its thread: plan, submit, collect, apply, tidy up.

With a backend of depth 1 a step is submitted and collected at once. With more, step N + 1 is planned and submitted
while N is computed:

    depth 2    plan A, submit A │ plan B, submit B, collect A, apply A │ plan C, submit C, collect B, apply B │ …

Whoever needs turns (the engine, the simulator, benchmarks, tests) takes them from here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from cllm.backends.base import Backend, StepResult
from cllm.engine.plan import Plan
from cllm.engine.scheduler import Scheduler
from cllm.engine.turns import Turn
from cllm.errors import BackendError, StepAbortedError, describe

log = logging.getLogger("cllm.engine")

ABORT_CHUNK_TOKENS = 32
"""A cancelled request interrupts the step it is in if its chunk is at least this long."""

MAX_ABORTED_STEPS = 8
"""Interrupted steps in a row; cancellations cause one at most, so a backend that does not stop aborting is broken."""


class Flight(NamedTuple):
    """A step under way."""

    plan: Plan
    ticket: Any
    started: float


class Stepper:
    """`timer` tells how long steps take; `on_computed` is called when one is done, before its tokens count."""

    def __init__(
        self,
        backend: Backend,
        scheduler: Scheduler,
        *,
        timer: Callable[[], float],
        on_computed: Callable[[Plan], None] = lambda plan: None,
        upkeep_share: float = 0.0,
        turn: Turn | None = None,
    ) -> None:
        """`upkeep_share`: what the cache's upkeep between steps may take, as a share of a step. `turn`: this engine's
        place among those that compute in turns, if there are others."""
        self.steps = 0
        self.last_step_s = 0.0
        self.in_step: frozenset[str] = frozenset()
        """Requests whose cancellation is worth an interruption. Any thread may look."""
        self._backend = backend
        self._scheduler = scheduler
        self._timer = timer
        self._on_computed = on_computed
        self._upkeep_share = upkeep_share
        self._flights: deque[Flight] = deque()
        self._aborted_steps = 0
        self._landed_at = 0.0
        self._goes_on = False
        """Somebody ran on when the step before this one was done, and so waits for what passes in between."""
        self._turn = turn

    @property
    def under_way(self) -> bool:
        return bool(self._flights)

    def advance(self) -> bool:
        """Plan and submit a step, if there is anything to compute; take in the oldest one's result, if it is time.
        False: there was neither."""
        if self._turn is not None:
            return self._advance_in_turn(self._turn)
        return self._compute_step(self._plan())

    def _advance_in_turn(self, turn: Turn) -> bool:
        self._scheduler.budget.share(*turn.begin())
        plan = self._plan()
        if not plan.chunks:
            turn.rest()
            return self._compute_step(plan)
        turn.answering = plan.decode_rows > 0
        with turn:
            return self._compute_step(plan)

    def _plan(self) -> Plan:
        plan = self._scheduler.schedule()
        self._scheduler.raise_doubt()
        if self._goes_on and plan.chunks and not self._flights:
            self._scheduler.budget.costs.observe_host(self._timer() - self._landed_at)
        self._goes_on = False
        return plan

    def _compute_step(self, plan: Plan) -> bool:
        scheduler = self._scheduler
        if plan.chunks:
            self._submit(plan)
        if self._flights and (len(self._flights) >= self._backend.depth or not plan.chunks):
            self._land(self._flights.popleft())
            scheduler.raise_doubt()
            scheduler.kv.maintain(self._upkeep_share * self.last_step_s)
            return True
        return bool(plan.chunks)

    def _submit(self, plan: Plan) -> None:
        if self._backend.depth > 1:
            self._scheduler.launch(plan)
        # No two steps in a row are interrupted, so that others advance however many cancel. Nor is one that another
        # one was planned on top of.
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
        except BackendError as error:
            self._failed(plan, error)
            while self._flights:  # those before it are not to blame
                self._land(self._flights.popleft())
            self._scheduler.try_alone(plan, self._compute)
        else:
            self._flights.append(Flight(plan, ticket, started))

    def _land(self, flight: Flight) -> None:
        plan = flight.plan
        try:
            result = self._backend.collect(flight.ticket)
        except StepAbortedError as error:
            self._aborted(plan, error)
            self._drop()
            return
        except BackendError as error:
            self._failed(plan, error)
            self._drop()
            self._scheduler.try_alone(plan, self._compute)
            return
        finally:
            self.in_step = frozenset()
        now = self._timer()
        # Of steps that overlap, only the time after the one before counts.
        self.last_step_s = now - max(flight.started, self._landed_at)
        self._landed_at = now
        self.steps += 1
        self._aborted_steps = 0
        scheduler = self._scheduler
        scheduler.budget.observe(plan.prompt_cost, plan.decode_rows, self.last_step_s, plan.pairs, plan.beside_rows)
        if scheduler.drafting is not None and not plan.forced:
            scheduler.drafting.took(plan.decode_rows, plan.drafted, self.last_step_s, plan.prompt_tokens)
        self._on_computed(plan)
        scheduler.apply(plan, result)
        scheduler.observers.step(self.last_step_s, plan.prompt_tokens, plan.rows)
        self._goes_on = bool(scheduler.running)

    # -- faults ------------------------------------------------------------------------------------------------

    def _aborted(self, plan: Plan, error: StepAbortedError) -> None:
        self._aborted_steps += 1
        if self._aborted_steps > MAX_ABORTED_STEPS:
            raise error
        log.debug("%s", error)
        self._scheduler.rewind(plan)

    def _failed(self, plan: Plan, error: BackendError) -> None:
        log.error("a step of %d sequences failed: %s", len(plan.sequences), error)
        if error.fatal:
            raise error
        self._scheduler.rewind(plan)

    def _drop(self) -> None:
        """What was planned on top of a step that did not happen does not happen either."""
        while self._flights:
            flight = self._flights.popleft()
            try:
                self._backend.collect(flight.ticket)
            except BackendError as error:
                if error.fatal:
                    raise
            self._scheduler.rewind(flight.plan)

    def _compute(self, plan: Plan) -> StepResult:
        """A step by itself."""
        if self._backend.depth > 1:
            self._scheduler.launch(plan)
        return self._backend.collect(self._backend.submit(plan.chunks))

    def abandon(self) -> None:
        """Nobody waits for what is under way: have the backend done with it."""
        while self._flights:
            flight = self._flights.popleft()
            try:
                self._backend.collect(flight.ticket)
            except Exception as error:
                log.debug("a step that nobody waited for failed: %s", describe(error))

    def forget(self) -> None:
        """The backend's context is lost, and with it what was under way."""
        self._flights.clear()
        self._goes_on = False

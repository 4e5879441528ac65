"""One simulated server: the engine's loop with a clock that jumps by what each step would have taken.

Steps are the engine's own (`engine/stepper.py`): plan, compute, learn, apply, tidy up.
"""

from __future__ import annotations

from collections.abc import Callable

from cllm.engine.budget import StepBudget
from cllm.engine.observer import RequestRecord
from cllm.engine.params import SamplingParams
from cllm.engine.plan import Plan
from cllm.engine.request import Request, Sequence
from cllm.engine.scheduler import Scheduler
from cllm.engine.stepper import Stepper
from cllm.routing.policy import ReplicaStats
from cllm_bench.simulate.backend import SimulatedBackend, TracedAnswer
from cllm_bench.simulate.cost import CostModel
from cllm_bench.simulate.forward import forward
from cllm_bench.simulate.managers import Refusals
from cllm_bench.simulate.policies import make_manager, window_of
from cllm_bench.simulate.settings import Settings
from cllm_bench.simulate.tally import Tally
from cllm_bench.simulate.traces import TracedRequest, length, spell

FOREVER = 1e12
"""Seconds. Finite, so that deadlines stand in the order of arrival, and the scheduler drops those of ended requests."""

IDLE = ReplicaStats(0, 0)

_PARAMS = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)

OnEnd = Callable[[TracedRequest, float], None]
"""Called with a request that others follow, and the moment at which it was answered."""


class SimulatedServer:
    def __init__(
        self, settings: Settings, cost: CostModel, tally: Tally, on_end: OnEnd, *, fast_forward: bool = True
    ) -> None:
        self.now = 0.0
        self.cost = cost
        self._least_token_s = (cost.step_s + cost.overhead(1)) * (1 - 1e-9)
        """No token takes less; a little less than that, because times are rounded."""
        self.window = window_of(settings)
        self.backend = SimulatedBackend(cost, window=self.window)
        self.kv = make_manager(settings, self.backend)
        self.scheduler = Scheduler(
            self.kv,
            StepBudget(
                inter_token_s=settings.token_ms / 1000,
                max_gap_s=settings.gap_ms / 1000,
                prompt_only_s=settings.prefill_ms / 1000,
                max_tokens=settings.step_tokens,
                chunk_gap_s=settings.chunk_ms / 1000,
            ),
            max_running=settings.max_running,
            ageing_s=settings.ageing_s,
            clock=lambda: self.now,
        )
        self.scheduler.observers.append(self)
        self._stepper = Stepper(
            self.backend, self.scheduler, timer=lambda: self.backend.total_s, on_computed=self._computed
        )
        self._before = Refusals(0, 0), 0, 0
        """Refusals, sequences that run and preemptions before the step."""
        self.max_running = settings.max_running
        self.tally = tally
        self.refusal: Refusals | None = None
        """What the last step refused, if the next one will refuse exactly the same."""
        self._timeout_s = settings.timeout_s or FOREVER
        self._queue = settings.queue
        self._on_end = on_end
        self._fast_forward = fast_forward and self.kv.forwards
        self._live: dict[str, tuple[Request, TracedRequest]] = {}
        self._numbers = 0
        self._moved_bytes = 0
        self._someone_follows = False

    # -- requests ----------------------------------------------------------------------------------------------

    def submit(self, traced: TracedRequest, arrival: float) -> int | None:
        """A request arrives; the clock has reached that moment, or there is nothing to do until then. Its number, or
        None if it is not taken."""
        if not self.scheduler.has_work:
            self._idle_until(arrival)
        if length(traced.prompt) + traced.answer_length > self.kv.max_tokens:
            self.tally.too_large += 1
            return None
        if self._queue and len(self.scheduler.waiting) >= self._queue:
            self.tally.turned_away += 1
            return None
        self._numbers += 1
        number = self._numbers
        request = Request(
            str(number), spell(traced.prompt), _PARAMS, arrival=arrival, deadline=arrival + self._timeout_s
        )
        limit = len(request.prompt) + traced.answer_length
        answer = TracedAnswer(traced.answer)
        request.sequences.append(Sequence(request, 0, answer, limit))  # type: ignore[arg-type]
        self._live[request.id] = (request, traced)
        self.refusal = None
        self.scheduler.add(request)
        return number

    def earliest_end(self, number: int) -> float | None:
        """A request cannot be answered before this; None if it has ended."""
        live = self._live.get(str(number))
        if live is None:
            return None
        (sequence,) = live[0].sequences
        return self.now + (sequence.max_length - len(sequence.tokens)) * self._least_token_s

    def reach(self, moment: float) -> None:
        """Compute until the clock reaches a moment, before which nobody else can arrive."""
        while self.now < moment and self.scheduler.has_work:
            self.advance(moment)

    def advance(self, until: float) -> None:
        """Compute until the clock reaches `until`, nothing is left to do, or somebody follows, who may be sooner."""
        scheduler = self.scheduler
        self._someone_follows = False
        while self.now < until and scheduler.has_work and not self._someone_follows:
            scheduler.expire()
            if scheduler.take_outputs():
                self.refusal = None
            elif not (self._fast_forward and forward(self, until)):
                self._step()

    # -- steps -------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._before = self.kv.refusals, len(self.scheduler.running), self.scheduler.preemptions
        self._stepper.advance()
        self.scheduler.take_outputs()

    def _computed(self, plan: Plan) -> None:
        """The clock goes on by what the step took, before its tokens count."""
        tally, refused = self.tally, self._before[0]
        self.refusal = self._steady_refusal(plan, *self._before)
        tally.steps += 1
        tally.batch_splits += self.kv.refusals.fragmented > refused.fragmented
        chosen = sum(chunk.wanted_logits for chunk in plan.chunks)
        self.now += self.backend.seconds + self.move_seconds() + self.cost.overhead(chosen)
        tally.computed_tokens += plan.prompt_tokens + plan.decode_rows

    def _steady_refusal(self, plan: Plan, before: Refusals, running: int, preempted: int) -> Refusals | None:
        """If somebody waits although another one may run, there was no room; nor will there be while nothing ends."""
        scheduler = self.scheduler
        nothing_changed = len(scheduler.running) == running and scheduler.preemptions == preempted
        if not (nothing_changed and self.kv.refuses_steadily and len(plan.chunks) == plan.decode_rows == running):
            return None
        after = self.kv.refusals
        return Refusals(after.total - before.total, after.fragmented - before.fragmented)

    def move_seconds(self) -> float:
        """Time for the bytes that were moved since the last step."""
        moved, self._moved_bytes = self.kv.moved_bytes - self._moved_bytes, self.kv.moved_bytes
        return moved / self.cost.move_bytes_per_s

    def _idle_until(self, moment: float) -> None:
        """The engine tidies up as far as the cache asks for; here in bounded pieces, which come to the same."""
        if moment <= self.now:
            return
        self.now = moment
        free = -1
        while (now_free := self.kv.usage().free) != free:
            free = now_free
            self.kv.maintain(0.0)

    def stats(self) -> ReplicaStats:
        """What a router is told about this server."""
        if not self.scheduler.has_work:
            return IDLE
        running, waiting = self.scheduler.running, self.scheduler.waiting
        queued = sum(len(sequence.tokens) for sequence in waiting)
        queued += sum(len(sequence.tokens) - sequence.num_computed for sequence in running)
        return ReplicaStats(queued, len(running) + len(waiting))

    # -- observing ---------------------------------------------------------------------------------------------

    def on_step(self, seconds: float, prompt_tokens: int, decode_tokens: int) -> None:
        """Counted when a step is computed."""

    def on_eviction(self, count: int, seconds: float) -> None:
        """Read from the manager at the end."""

    def on_finished(self, record: RequestRecord) -> None:
        self.refusal = None
        self.tally.take(record, self)
        _, traced = self._live.pop(record.request_id)
        if traced.followers and record.error is None:
            self._someone_follows = True
            self._on_end(traced, self.now)

"""One simulated server: the engine's loop with a clock that jumps by what each step would have taken.

Steps are the engine's own (`engine/stepper.py`): plan, compute, learn, apply, tidy up.
"""

from __future__ import annotations

from collections.abc import Callable

from cllm.engine.budget import StepBudget
from cllm.engine.observer import RequestRecord
from cllm.engine.params import SamplingParams
from cllm.engine.plan import StepPlan
from cllm.engine.request import Request, Sequence
from cllm.engine.scheduler import Scheduler
from cllm.engine.stepper import Stepper
from cllm.engine.submission import Submission
from cllm.kv.ops import BlockGeometry
from cllm.kv.paged.local import LocalShape
from cllm.kv.paged.manager import PagedKVManager
from cllm.routing.policy import ReplicaStats
from cllm_bench.simulate.backend import SimulatedBackend, TracedAnswer
from cllm_bench.simulate.cost import CostModel
from cllm_bench.simulate.settings import Settings
from cllm_bench.simulate.tally import Tally
from cllm_bench.simulate.traces import MESSAGE_END, TracedRequest, length, spell

FOREVER = 1e12
"""Seconds. Finite, so that deadlines stand in the order of arrival, and the scheduler drops those of ended requests."""

IDLE = ReplicaStats(0, 0)

_END_IDS = frozenset(MESSAGE_END[:1])
_PARAMS = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)

OnEnd = Callable[[TracedRequest, float], None]
"""Called with a request that others follow, and the moment at which it was answered."""


def budget_of(settings: Settings) -> StepBudget:
    return StepBudget(
        inter_token_s=settings.token_ms / 1000,
        max_gap_s=settings.gap_ms / 1000,
        prompt_only_s=settings.prefill_ms / 1000,
        max_tokens=settings.step_tokens,
    )


def local_shape(settings: Settings, cost: CostModel) -> LocalShape | None:
    if not cost.window and not cost.state_bytes:
        return None
    state = -(-cost.state_bytes // (cost.kv_bytes_per_token * settings.block_size))
    window = -(-cost.window_bytes_per_token // cost.kv_bytes_per_token) if cost.window else 0
    return LocalShape(cost.window, window, settings.step_tokens, state)


class SimulatedServer:
    def __init__(self, settings: Settings, cost: CostModel, tally: Tally, on_end: OnEnd) -> None:
        self.now = 0.0
        self.cost = cost
        self.backend = SimulatedBackend(cost)
        # The clock stands still: it would only time evictions, and have free spans counted, which takes longer the more
        # blocks there are.
        self.kv = PagedKVManager(
            self.backend.ops,
            BlockGeometry(settings.blocks, settings.block_size),
            local_shape(settings, cost),
            bytes_per_token=cost.kv_bytes_per_token,
            eviction_threshold=settings.threshold,
            eviction_policy=settings.eviction,
            watermark=settings.watermark,
            clock=lambda: 0.0,
        )
        self.scheduler = Scheduler(
            self.kv,
            budget_of(settings),
            max_running=settings.max_running,
            ageing_s=settings.ageing_s,
            clock=lambda: self.now,
        )
        self.scheduler.requests.observers.append(self)
        self.tally = tally
        self.submitted = 0
        self._stepper = Stepper(
            self.backend, self.scheduler, timer=lambda: self.backend.total_s, on_computed=self._computed
        )
        self._timeout_s = settings.timeout_s or FOREVER
        self._queue = settings.queue
        self._on_end = on_end
        self._live: dict[str, TracedRequest] = {}

    @property
    def busy(self) -> bool:
        return self.scheduler.requests.has_work

    def submit(self, traced: TracedRequest, arrival: float) -> None:
        """A request arrives; the clock has reached that moment, or there is nothing to do until then."""
        if not self.busy:
            self._idle_until(arrival)
        if length(traced.prompt) + traced.answer_length > self.kv.max_tokens:
            self.tally.too_large += 1
            return
        if self._queue and len(self.scheduler.requests.waiting) >= self._queue:
            self.tally.turned_away += 1
            return
        self.submitted += 1
        key = str(self.submitted)
        submission = Submission(spell(traced.prompt), _PARAMS, key)
        request = Request(submission, arrival=arrival, deadline=arrival + self._timeout_s, end_ids=_END_IDS)
        limit = len(request.prompt) + traced.answer_length
        request.sequences.append(Sequence(request, 0, TracedAnswer(traced.answer), limit))  # type: ignore[arg-type]
        self._live[key] = traced
        self.scheduler.requests.add(request)

    def step(self) -> None:
        """The next step, or what ends because its time is over."""
        self.scheduler.requests.expire()
        if not self.scheduler.requests.take_outputs():
            self._stepper.advance()
            self.scheduler.requests.take_outputs()

    def stats(self) -> ReplicaStats:
        """What a router is told about this server."""
        if not self.busy:
            return IDLE
        running, waiting = self.scheduler.requests.running, self.scheduler.requests.waiting
        queued = sum(len(sequence.tokens) for sequence in waiting)
        queued += sum(len(sequence.tokens) - sequence.num_computed for sequence in running)
        return ReplicaStats(queued, len(running) + len(waiting))

    def _computed(self, plan: StepPlan) -> None:
        """The clock goes on by what the step took, before its tokens count."""
        self.tally.steps += 1
        self.tally.computed_tokens += plan.prompt_tokens + plan.decode_rows
        chosen = sum(chunk.wanted_logits for chunk in plan.chunks)
        self.now += self.backend.seconds + self.cost.overhead(chosen)

    def _idle_until(self, moment: float) -> None:
        """The engine tidies up as far as the cache asks for; here in bounded pieces, which come to the same."""
        if moment <= self.now:
            return
        self.now = moment
        free = -1
        while (now_free := self.kv.usage().free) != free:
            free = now_free
            self.kv.maintain(0.0)

    # -- observing ---------------------------------------------------------------------------------------------

    def on_step(self, seconds: float, prompt_tokens: int, decode_tokens: int) -> None:
        """Counted when a step is computed."""

    def on_eviction(self, count: int, seconds: float) -> None:
        """Read from the manager at the end."""

    def on_finished(self, record: RequestRecord) -> None:
        self.tally.take(record, self)
        traced = self._live.pop(record.request_id)
        if traced.followers and record.error is None:
            self._on_end(traced, self.now)

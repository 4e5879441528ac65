"""The real engine on conversations whose turns follow one another, every step of it timed."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cllm.backends.base import Backend, Chunk, StepResult
from cllm.engine.loop import Engine
from cllm.engine.params import SamplingParams
from cllm.engine.request import Output, Terms, build_request
from cllm.engine.scheduler import Scheduler
from cllm.engine.submission import Submission
from cllm.errors import BackendError, CLLMError
from cllm.kv.manager import KVManager
from cllm.kv.ops import BlockOps, Geometry, SlotOps
from cllm_bench.simulate.backend import work_of
from cllm_bench.simulate.cost import StepWork
from cllm_bench.simulate.fit import StepRecord
from cllm_bench.simulate.server import budget_of
from cllm_bench.simulate.settings import Settings
from cllm_bench.simulate.traces import ListTrace, TracedRequest

Clock = Callable[[], float]


@dataclass(frozen=True)
class Turn:
    message: array[int]
    answer: int
    """Tokens to generate."""
    extends: bool = True
    """The prompt is all that was said before and the message, not the message alone."""


@dataclass(frozen=True)
class Workload:
    """Conversations that all begin at once; each goes on when its last turn was answered."""

    name: str
    conversations: Sequence[Sequence[Turn]]


@dataclass(frozen=True)
class Measured:
    workload: str
    seconds: float
    answer_tokens: int
    hit_rate: float
    ttft_p50_s: float
    steps: Sequence[StepRecord]
    trace: ListTrace
    """What was really said, for the simulation to repeat."""

    @property
    def tokens_per_s(self) -> float:
        return self.answer_tokens / self.seconds


class _PendingStep(NamedTuple):
    inner: Any
    started: float
    work: StepWork
    chosen: int


class RecordingBackend(Backend):
    """Another backend, with every step timed. The first one waits until all requests are there."""

    def __init__(self, inner: Backend, clock: Clock) -> None:
        self.traits, self.shape = inner.traits, inner.shape
        self.steps: list[StepRecord] = []
        self.gate = threading.Event()
        self._inner = inner
        self._clock = clock

    def allocate(self, geometry: Geometry) -> None:
        raise BackendError("the memory was allocated before")

    @property
    def kv_bytes(self) -> int:
        return self._inner.kv_bytes

    @property
    def ops(self) -> SlotOps | BlockOps:
        return self._inner.ops

    def submit(self, chunks: Sequence[Chunk]) -> _PendingStep:
        self.gate.wait()
        work, chosen = work_of(chunks), sum(chunk.wanted_logits for chunk in chunks)
        started = self._clock()
        return _PendingStep(self._inner.submit(chunks), started, work, chosen)

    def collect(self, ticket: _PendingStep) -> StepResult:
        """If steps overlap, only the time after the one before counts."""
        result = self._inner.collect(ticket.inner)
        started = max(ticket.started, self.steps[-1].ended) if self.steps else ticket.started
        self.steps.append(StepRecord(started, self._clock(), ticket.work, ticket.chosen))
        return result

    def abort(self) -> None:
        self._inner.abort()

    def rebuild(self) -> None:
        self._inner.rebuild()

    def close(self) -> None:
        """The backend's owner closes it."""


@dataclass
class _Conversation:
    turns: Sequence[Turn]
    prompts: list[array[int]] = field(default_factory=list)
    answers: list[array[int]] = field(default_factory=list)

    def next_prompt(self) -> array[int]:
        """What to send now; an answer begins to be collected."""
        turn = self.turns[len(self.prompts)]
        prompt = array("i", turn.message)
        if self.prompts and turn.extends:
            prompt = self.prompts[-1] + self.answers[-1] + prompt
        self.prompts.append(prompt)
        self.answers.append(array("i"))
        return prompt

    def traced(self) -> TracedRequest:
        """The first turn, each followed by the next at once."""
        followers: tuple[TracedRequest, ...] = ()
        for prompt, answer in zip(reversed(self.prompts), reversed(self.answers), strict=True):
            followers = (TracedRequest(0.0, prompt, answer, followers),)
        return followers[0]


class LiveRun:
    """One workload on a backend and a cache that are empty at the start."""

    def __init__(self, backend: Backend, kv: KVManager, settings: Settings, clock: Clock = time.perf_counter) -> None:
        backend.rebuild()
        kv.reset()
        self._clock = clock
        self._recorder = RecordingBackend(backend, clock)
        self._scheduler = Scheduler(
            kv, budget_of(settings), max_running=settings.max_running, ageing_s=settings.ageing_s, clock=clock
        )
        self._engine = Engine(self._recorder, self._scheduler, self._take, max_queue=1 << 20, clock=clock)
        self._conversations: dict[str, _Conversation] = {}
        self._sent: dict[str, float] = {}
        self._ttft: list[float] = []
        self._unfinished = 0
        self._error: Exception | None = None
        self._done = threading.Event()

    def run(self, workload: Workload) -> Measured:
        self._conversations = {str(n): _Conversation(turns) for n, turns in enumerate(workload.conversations)}
        self._unfinished = len(self._conversations)
        self._engine.start()
        try:
            started = self._clock()
            for key in self._conversations:
                self._send(key)
            self._recorder.gate.set()
            self._done.wait()
        finally:
            self._recorder.gate.set()
            self._engine.stop(0)
        if self._error is not None:
            raise CLLMError(f"{workload.name}: a request failed: {self._error}")
        ended = self._recorder.steps[-1].ended
        conversations = self._conversations.values()
        scheduler = self._scheduler
        return Measured(
            workload=workload.name,
            seconds=ended - started,
            answer_tokens=sum(len(answer) for conversation in conversations for answer in conversation.answers),
            hit_rate=scheduler.requests.cached_tokens / scheduler.requests.prompt_tokens,
            ttft_p50_s=sorted(self._ttft)[len(self._ttft) // 2],
            steps=self._recorder.steps,
            trace=ListTrace(workload.name, tuple(conversation.traced() for conversation in conversations)),
        )

    def _send(self, key: str) -> None:
        conversation = self._conversations[key]
        prompt = conversation.next_prompt()
        turn = conversation.turns[len(conversation.prompts) - 1]
        self._sent[key] = self._clock()
        params = SamplingParams(max_tokens=turn.answer, temperature=0.0)
        self._engine.submit(
            build_request(
                Submission(prompt, params, key),
                Terms(1 << 30, self._recorder.shape.n_vocab),  # the length is given, so no token ends an answer
                arrival=self._sent[key],
            )
        )

    def _take(self, outputs: list[Output]) -> None:
        """On the engine's thread: collect tokens, go on with what was answered."""
        for output in outputs:
            conversation = self._conversations[output.request_id]
            if output.error is not None:
                self._error = output.error
                self._done.set()
            if output.token_id is not None:
                if not conversation.answers[-1]:
                    self._ttft.append(self._clock() - self._sent[output.request_id])
                conversation.answers[-1].append(output.token_id)
            if output.reason is not None and output.error is None:
                if len(conversation.prompts) < len(conversation.turns):
                    self._send(output.request_id)
                else:
                    self._unfinished -= 1
                    if self._unfinished == 0:
                        self._done.set()

"""Costs: files, fitting, and the real engine beside its simulation where the truth is known."""

from __future__ import annotations

import json
import random
import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from cllm.backends.base import Chunk, StepResult
from cllm.backends.fake import FakeBackend
from cllm.engine.loop import Engine
from cllm.engine.params import SamplingParams
from cllm.engine.request import Output, Terms, build_request
from cllm.engine.scheduler import Scheduler
from cllm.engine.submission import Submission
from cllm.errors import CLLMError, ConfigError
from cllm.kv.ops import BlockGeometry, BlockOps
from cllm.kv.paged.manager import PagedKVManager
from cllm_bench.simulate.backend import SimulatedBackend, work_of
from cllm_bench.simulate.cluster import simulate
from cllm_bench.simulate.cost import CostModel, StepWork, built_in_costs, load_cost, parse_cost
from cllm_bench.simulate.fit import StepRecord, fit_cost, median_error
from cllm_bench.simulate.measure import RecordingBackend, calibration_prompts, timed_steps
from cllm_bench.simulate.server import budget_of
from cllm_bench.simulate.settings import Settings
from cllm_bench.simulate.traces import TracedRequest
from simulate_kit import COST, ListTrace
from step_of import rows_of

# -- files ---------------------------------------------------------------------------------------------------------


def test_a_model_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "cost.json"
    COST.save(file)
    assert load_cost(str(file)) == COST


def test_those_that_come_with_cllm_are_sound() -> None:
    assert "smollm2" in built_in_costs()
    for name in built_in_costs():
        cost = load_cost(name)
        assert cost.name == name and len(cost.description) > 40


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"row_s": -1.0}, r"row_s is -1\.0: Input should be greater than or equal to 0"),
        ({"row_s": float("nan")}, "row_s is nan: Input should be a finite number"),
        ({"row_s": True}, "row_s is True: Input should be a valid number"),
        ({"row_s": "1"}, "row_s is '1': Input should be a valid number"),
        ({"kv_bytes_per_token": 1.5}, "kv_bytes_per_token is 1.5: Input should be a valid integer"),
        ({"name": 3}, "name is 3: Input should be a valid string"),
        ({"speed": 3}, "speed is 3: Unexpected"),
    ],
)
def test_wrong_values_are_named(change: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_cost(json.dumps({**asdict(COST), **change}), "x.json")


def test_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x\.json: chunk_s: Field required"):
        parse_cost(json.dumps({k: v for k, v in asdict(COST).items() if k != "chunk_s"}), "x.json")
    for text in ("{", "[]"):
        with pytest.raises(ConfigError, match=r"cost model x\.json: "):
            parse_cost(text, "x.json")
    with pytest.raises(ConfigError, match=r"give a file, or one of: .*smollm2"):
        load_cost(str(tmp_path / "absent.json"))


# -- what a step is ------------------------------------------------------------------------------------------------


def chunk(start: int, count: int, wants: bool = True) -> Chunk:
    return Chunk(array("i", range(count)), start, wants)


def test_a_step_is_rows_and_prompts() -> None:
    chunks = [chunk(100, 1), chunk(7, 1), chunk(10, 4)]
    assert work_of(chunks) == StepWork(2, 107, 1, 4, 10 + 11 + 12 + 13)
    backend = SimulatedBackend(COST)
    assert len(rows_of(backend, chunks)) == 3
    expected = 0.004 + 2 * 0.002 + 107e-6 + 0.003 + 4 * 0.0007 + 46e-7
    assert backend.seconds == pytest.approx(expected)


# -- fitting -------------------------------------------------------------------------------------------------------


def records(cost: CostModel, count: int, noise: float = 0.0) -> list[StepRecord]:
    rng = np.random.default_rng(1)
    now = 0.0
    steps = []
    for _ in range(count):
        rows, chunks = int(rng.integers(0, 20)), int(rng.integers(0, 3))
        tokens = int(rng.integers(2, 300)) * chunks
        work = StepWork(rows, rows * int(rng.integers(10, 900)), chunks, tokens, tokens * int(rng.integers(1, 500)))
        seconds = cost.compute(work) * (1 + noise * rng.standard_normal())
        steps.append(StepRecord(now, now + seconds, work, rows + chunks))
        now += seconds + cost.overhead(rows + chunks)
    return steps


def fitted(steps: Sequence[StepRecord]) -> CostModel:
    return fit_cost("test", "round numbers", [steps], kv_bytes_per_token=1000)


def test_prices_are_found_again() -> None:
    cost = fitted(records(COST, 300))
    for name, price in asdict(COST).items():
        if isinstance(price, float):
            assert getattr(cost, name) == pytest.approx(price, rel=1e-3), name


def test_noise_and_disturbed_steps_do_little() -> None:
    steps = records(COST, 600, noise=0.05)
    disturbed = [step._replace(ended=step.ended + 5.0) if n % 50 == 0 else step for n, step in enumerate(steps)]
    cost = fitted(disturbed)
    assert median_error(cost, steps) < 0.06
    assert cost.prompt_token_s == pytest.approx(COST.prompt_token_s, rel=0.1)


def test_too_few_steps_are_no_measurement() -> None:
    with pytest.raises(CLLMError, match="at least 20 measured steps, there are 3"):
        fitted(records(COST, 3))


# -- the real engine beside its simulation -------------------------------------------------------------------------


class VirtualTime:
    """A clock that only a backend turns, so that nothing depends on the machine."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TimedFake(FakeBackend):
    """A fake backend whose steps take what a cost model says, in virtual time."""

    def __init__(self, cost: CostModel, clock: VirtualTime) -> None:
        super().__init__(vocab_size=1000)
        self._cost = cost
        self._clock = clock

    def collect(self, chunks: Sequence[Chunk]) -> StepResult:
        self._clock.now += self._cost.compute(work_of(chunks))
        return super().collect(chunks)


TRUTH = replace(COST, overhead_s=0.0, overhead_row_s=0.0, kv_bytes_per_token=20)
"""No time passes between the steps of virtual time, and nothing is moved."""


def paged(backend: FakeBackend, tokens: int) -> PagedKVManager:
    geometry = BlockGeometry(tokens // 16, 16)
    backend.allocate(geometry)
    assert isinstance(backend.ops, BlockOps)
    return PagedKVManager(backend.ops, geometry, bytes_per_token=8, eviction_threshold=0.8, watermark=0.02)


class Turn(NamedTuple):
    message: array[int]
    answer: int
    """Tokens to generate."""


@dataclass
class Conversation:
    """Each turn's prompt is all that was said before and its message."""

    turns: Sequence[Turn]
    prompts: list[array[int]] = field(default_factory=list)
    answers: list[array[int]] = field(default_factory=list)

    def next_prompt(self) -> array[int]:
        said = self.prompts[-1] + self.answers[-1] if self.prompts else array("i")
        self.prompts.append(said + self.turns[len(self.prompts)].message)
        self.answers.append(array("i"))
        return self.prompts[-1]

    def traced(self) -> TracedRequest:
        """The first turn, each followed by the next at once."""
        followers: tuple[TracedRequest, ...] = ()
        for prompt, answer in zip(reversed(self.prompts), reversed(self.answers), strict=True):
            followers = (TracedRequest(0.0, prompt, answer, followers),)
        return followers[0]


class Measured(NamedTuple):
    tokens_per_s: float
    hit_rate: float
    trace: ListTrace
    """What was really said, for the simulation to repeat."""


class LiveRun:
    """The real engine on conversations that all begin at once; each goes on when its last turn was answered."""

    def __init__(self, tokens: int, settings: Settings) -> None:
        self._clock = VirtualTime()
        backend = TimedFake(TRUTH, self._clock)
        kv = paged(backend, tokens)
        self._recorder = RecordingBackend(backend, self._clock)
        self._scheduler = Scheduler(kv, budget_of(settings), max_running=settings.max_running, clock=self._clock)
        self._engine = Engine(self._recorder, self._scheduler, self._take, max_queue=1 << 20, clock=self._clock)
        self._conversations: dict[str, Conversation] = {}
        self._unfinished = 0
        self._done = threading.Event()

    def run(self, conversations: Sequence[Sequence[Turn]]) -> Measured:
        self._conversations = {str(number): Conversation(turns) for number, turns in enumerate(conversations)}
        self._unfinished = len(conversations)
        self._engine.start()
        started = self._clock()
        for key in self._conversations:
            self._send(key)
        self._recorder.gate.set()
        assert self._done.wait(60)
        self._engine.stop(0)
        found, requests = self._conversations.values(), self._scheduler.requests
        answer_tokens = sum(len(answer) for conversation in found for answer in conversation.answers)
        return Measured(
            answer_tokens / (self._recorder.steps[-1].ended - started),
            requests.cached_tokens / requests.prompt_tokens,
            ListTrace("live", tuple(conversation.traced() for conversation in found)),
        )

    def _send(self, key: str) -> None:
        conversation = self._conversations[key]
        prompt = conversation.next_prompt()
        params = SamplingParams(max_tokens=conversation.turns[len(conversation.prompts) - 1].answer, temperature=0.0)
        self._engine.submit(build_request(Submission(prompt, params, key), Terms(1 << 30, 1000), arrival=self._clock()))

    def _take(self, outputs: list[Output]) -> None:
        for output in outputs:
            conversation = self._conversations[output.request_id]
            assert output.error is None
            if output.token_id is not None:
                conversation.answers[-1].append(output.token_id)
            if output.reason is not None:
                if len(conversation.prompts) < len(conversation.turns):
                    self._send(output.request_id)
                else:
                    self._unfinished -= 1
        if not self._unfinished:
            self._done.set()


def words(draw: random.Random, low: int, high: int) -> array[int]:
    return array("i", (draw.randint(3, 999) for _ in range(draw.randint(low, high))))


def workloads(draw: random.Random) -> Iterator[Sequence[Sequence[Turn]]]:
    """Different prompts, one long prompt in common, and chats of four turns."""
    yield [[Turn(words(draw, 64, 330), draw.randint(32, 64))] for _ in range(10)]
    system = words(draw, 320, 320)
    yield [[Turn(system + words(draw, 20, 60), 32)] for _ in range(10)]
    yield [
        [Turn(words(draw, *((80, 200) if turn == 0 else (20, 60))), draw.randint(24, 48)) for turn in range(4)]
        for _ in range(5)
    ]


@pytest.mark.parametrize("tokens", [20_000, 1_200])
def test_the_real_engine_is_predicted(tokens: int) -> None:
    """Cost fitted on prompts of its own, three workloads predicted, with memory to spare and without."""
    chosen = Settings(blocks=tokens // 16, max_running=16)
    runs = []
    for prompts in calibration_prompts(1000, seed=1):
        if len(prompts) <= 16 and sum(map(len, prompts)) < tokens / 2:
            clock = VirtualTime()
            backend = TimedFake(TRUTH, clock)
            scheduler = Scheduler(paged(backend, tokens), budget_of(chosen), max_running=16, clock=clock)
            runs.append(timed_steps(backend, scheduler, prompts, clock))
    cost = fit_cost("fake", "virtual", runs, kv_bytes_per_token=TRUTH.kv_bytes_per_token)
    assert cost.prompt_token_s == pytest.approx(TRUTH.prompt_token_s, rel=0.05)
    for conversations in workloads(random.Random(1)):
        measured = LiveRun(tokens, chosen).run(conversations)
        figures = simulate(measured.trace, chosen, cost).figures
        assert figures["answer_tokens_per_s"] == pytest.approx(measured.tokens_per_s, rel=0.05)
        assert figures["hit_rate"] == pytest.approx(measured.hit_rate, abs=0.05)


def test_a_failing_backend_ends_the_measurement() -> None:
    clock = VirtualTime()
    backend = TimedFake(COST, clock)
    scheduler = Scheduler(paged(backend, 1024), budget_of(Settings()), max_running=4, clock=clock)
    backend.faults.steps_to_fail = 1000
    with pytest.raises(CLLMError, match="a request failed: injected fault"):
        timed_steps(backend, scheduler, [words(random.Random(1), 10, 10)], clock)

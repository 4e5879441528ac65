"""`cllm bench kernels`: is the work done as described, on every engine alike, and is the table judged right?"""

from __future__ import annotations

import io
import json
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer import Typer
from typer.testing import CliRunner

from cllm.errors import CLLMError
from cllm.kv.groups import LayerKV, LayerState, plan_groups
from cllm.machine import MemoryLimit
from cllm.models.gguf import GGUFModel
from cllm_bench._limits import measure_limits
from cllm_bench.errors import BenchError
from cllm_bench.figures import OURS, Run
from cllm_bench.kernels import cli, limits
from cllm_bench.kernels.shapes import SHAPES, Shape, file_macs_per_token, file_read_per_token
from cllm_bench.kernels.streams import draw_tokens, fill, step_times, tokens_per_s
from cllm_bench.kernels.works import (
    ANY_MODEL,
    BEST,
    FIRST_TOKEN,
    GENAI,
    MANY,
    MANY_SHORT,
    MEMORY,
    ONE_BRIEF,
    ONE_LONG,
    ONE_SHORT,
    PREFILL,
    PREFILL_ONCE,
    SAME,
    SMOLLM2,
    WINDOWS,
    Comparison,
    Plan,
    Work,
    plan_for,
)
from cllm_bench.kernels.works import STATES as STATES_PLAN
from cllm_bench.run import make_result
from cllm_bench.runners import serve
from cllm_bench.servers import start_runner
from cllm_bench.workloads import kernels
from cllm_bench.workloads.base import PartsFailedError, Setup
from cllm_bench.workloads.kernels import Kernels
from native_kit import write_model

native = pytest.importorskip("cllm._native", reason="the extension is not built")

SMALL = Work("small", "small", streams=3, context=20, steps=5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny.gguf", weight_type="q4_1", tied=True)


# --- the work ---


class Recorder:
    """Streams that write down what is asked of them."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def prompt(self, tokens: array[int]) -> None:
        self.calls.append(("prompt", len(tokens)))

    def share(self) -> None:
        self.calls.append(("share",))

    def decode(self, tokens: array[int], position: int) -> None:
        self.calls.append(("decode", len(tokens), position))

    def advance(self, tokens: array[int], position: int) -> None:
        self.calls.append(("advance", len(tokens), position))

    def rewind(self, position: int) -> None:
        self.calls.append(("rewind", position))


def test_a_decode_pass_goes_on_from_the_context_and_leaves_the_streams_as_they_were() -> None:
    streams = Recorder()
    times = step_times(streams, SMALL, 500)
    warm_up = [("decode", 3, 20), ("rewind", 20)]
    assert streams.calls == [*warm_up, *(("decode", 3, 20 + step) for step in range(5)), ("rewind", 20)]
    assert len(times) == 5 and all(time >= 0 for time in times)


def test_a_pass_of_several_tokens_a_step_goes_on_by_as_many() -> None:
    streams = Recorder()
    work = Work("r", "r", streams=1, context=20, steps=3, rows=8)
    assert len(step_times(streams, work, 500)) == 3
    assert streams.calls[2:] == [*(("advance", 8, 20 + 8 * step) for step in range(3)), ("rewind", 20)]
    assert work.tokens == 24 and work.room == 20 + 24 + 1


def test_a_prompt_pass_computes_the_whole_prompt_each_round() -> None:
    streams = Recorder()
    work = Work("p", "p", streams=1, context=30, rounds=3)
    assert tokens_per_s(streams, work, 500) > 0
    assert streams.calls == [("prompt", 30)] * 3
    assert work.tokens == 90


def test_filling_gives_every_stream_the_context() -> None:
    streams = Recorder()
    fill(streams, SMALL, 500)
    assert streams.calls == [("prompt", 20), ("share",)]


@given(st.integers(1, 200), st.text(max_size=8), st.integers(2, 60_000))
def test_tokens_are_the_same_for_every_engine_and_in_the_vocabulary(count: int, seed: str, n_vocab: int) -> None:
    drawn = draw_tokens(count, seed, n_vocab)
    assert drawn == draw_tokens(count, seed, n_vocab)
    assert len(drawn) == count and all(0 < token < n_vocab for token in drawn)


def test_quick_work_is_small_but_of_the_same_kind() -> None:
    for work in (*SMOLLM2.works, *ANY_MODEL.works):
        quick = work.quick()
        assert (quick.key, quick.streams, bool(quick.steps)) == (work.key, work.streams, bool(work.steps))
        assert quick.tokens <= 4 * max(64, work.rows * work.streams)


# --- the engines ---


class RecordingEngine:
    """Stands in for the extension's Engine and keeps what it is given."""

    def __init__(self) -> None:
        self.blocks = 0
        self.steps: list[tuple[list[int], list[list[int]], list[int], int]] = []
        self.copies: list[list[int]] = []

    def allocate(self, *, cells: int, block_size: int, type_k: str, type_v: str, **arrangement: Any) -> None:
        assert (block_size, type_k, type_v) == (16, "f16", "f16")
        self.blocks, self.arrangement = cells, arrangement

    def step(self, tokens: Any, chunks: Any, blocks: Any, logits: Any) -> bool:
        assert tokens.dtype == chunks.dtype == blocks.dtype == np.int32 and logits.dtype == np.float32
        self.steps.append((tokens.tolist(), chunks.tolist(), blocks.tolist(), len(logits)))
        return True

    def copy_blocks(self, pairs: Any) -> None:
        self.copies += pairs.tolist()


def block_streams(engine: RecordingEngine, streams: int, room: int) -> Any:
    from cllm_bench.kernels.blocks import BlockStreams

    return BlockStreams(engine, 50, streams, room)  # type: ignore[arg-type]


def test_every_stream_has_blocks_of_its_own_and_only_those_it_needs() -> None:
    engine = RecordingEngine()
    streams = block_streams(engine, streams=3, room=40)
    streams.decode(array("i", [7, 8, 9]), position=20)
    tokens, chunks, blocks, rows = engine.steps[0]
    assert tokens == [7, 8, 9] and rows == 3
    assert chunks == [[1, 20, 1, 2, 0, 0]] * 3
    assert len(set(blocks)) == 6 and all(0 <= block < engine.blocks for block in blocks)
    streams.decode(array("i", [7, 8, 9]), position=32)
    assert len(set(engine.steps[1][2])) == 9


def test_a_prompt_goes_to_the_first_stream_and_is_copied_to_the_others() -> None:
    engine = RecordingEngine()
    streams = block_streams(engine, streams=3, room=32)
    streams.prompt(array("i", range(20)))
    tokens, chunks, first, rows = engine.steps[0]
    assert (tokens, chunks, rows) == (list(range(20)), [[20, 0, 1, 2, 0, 0]], 1)
    streams.share()
    assert [source for source, _ in engine.copies] == first * 2
    targets = {target for _, target in engine.copies}
    assert len(targets) == 4 and not targets & set(first)


def test_several_tokens_of_a_stream_are_one_chunk_with_logits_of_each() -> None:
    engine = RecordingEngine()
    streams = block_streams(engine, streams=1, room=40)
    streams.advance(array("i", range(8)), position=12)
    tokens, chunks, blocks, rows = engine.steps[0]
    assert (tokens, chunks, rows) == (list(range(8)), [[8, 12, 8, 2, 0, 0]], 8) and len(set(blocks)) == 2


STATES = plan_groups([LayerKV(1, 0, 512)], 16, apart=False, states=[LayerState(0, (512, 512, 512))])


def test_states_are_read_where_the_step_before_wrote_them_and_go_back_to_those_of_the_prompt() -> None:
    from cllm_bench.kernels.blocks import BlockStreams

    engine = RecordingEngine()
    streams = BlockStreams(engine, 50, 2, 40, layout=STATES)  # type: ignore[arg-type]
    assert engine.arrangement["state_cells"] == 3 and engine.arrangement["states"] == [(0, STATES.states.places[0])]
    streams.prompt(array("i", range(20)))
    _, chunks, blocks, _ = engine.steps[-1]
    assert chunks == [[20, 0, 1, 2, 0, 0, 0, 3]]
    kept = blocks[2:]
    streams.share()
    targets = dict(engine.copies)
    assert len(targets) == 3 + 3 and set(kept) <= targets.keys()
    for _ in range(2):
        before = [*kept, *(targets[cell] for cell in kept)]
        for position in (20, 21, 22):
            streams.decode(array("i", [7, 8]), position)
            _, chunks, blocks, _ = engine.steps[-1]
            assert chunks == [[1, position, 1, 2, 0, 0, 3, 3]] * 2
            table = np.array(blocks).reshape(2, 2 + 3 + 3)
            read, written = table[:, 2:5].ravel().tolist(), table[:, 5:].ravel().tolist()
            assert read == before and not set(read) & set(written)
            assert not set(written) & {*kept, *(targets[cell] for cell in kept)}
            before = written
        streams.rewind(20)
    used = [cell for step in engine.steps for cell in step[2]]
    assert len(set(used)) == 2 * (2 + 3 * 3)


@pytest.mark.parametrize(
    ("keys", "plan"),
    [
        ({}, ANY_MODEL),
        ({"attention.sliding_window": 16}, WINDOWS),
        ({"shortconv.l_cache": 3}, STATES_PLAN),
        ({"ssm.state_size": 128}, STATES_PLAN),
    ],
)
def test_what_must_be_reached_follows_what_layers_keep(keys: dict[str, int], plan: Plan) -> None:
    model = SimpleNamespace(keys=SimpleNamespace(any=keys.get))
    assert plan_for(model) is plan  # type: ignore[arg-type]


def test_the_native_engine_does_all_kinds_of_work(tiny: Path) -> None:
    from cllm_bench.kernels.native import NativeEngine

    engine = NativeEngine(model=str(tiny), threads=2, instruction_set="generic")
    assert engine.describe()["instruction_set"] == "generic"
    assert engine.first_token()["seconds"] > 0
    for work in (SMALL, replace(SMALL, steps=0, streams=1), replace(SMALL, rows=8, streams=1)):
        assert engine.speed(asdict(work), {})["tokens_per_s"] > 0
    memory = engine.memory(asdict(SMALL))
    assert memory["resident_bytes"] > memory["weight_bytes"] > 0 and memory["kv_bytes"] > 0
    phases = engine.profile(asdict(SMALL))
    assert phases and sum(phases.values()) > 0
    assert engine.forget() == {}


def test_llama_cpp_does_all_kinds_of_work(tiny: Path) -> None:
    from cllm_bench.kernels.llama import LlamaEngine

    engine = LlamaEngine(model=str(tiny), threads=2)
    for variant in SAME.variants:
        assert engine.speed(asdict(SMALL), variant)["tokens_per_s"] > 0
    for work in (Work("prompt", "prompt", streams=1, context=60), replace(SMALL, rows=8, streams=1)):
        assert engine.speed(asdict(work), SAME.variants[0])["tokens_per_s"] > 0
    assert engine.forget() == {}


def test_requantised_files_are_q4_0(tiny: Path, tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType

    from cllm.errors import ModelError
    from cllm_bench.kernels.requantise import requantise

    target = tmp_path / "made" / "q4.gguf"
    requantise(tiny, target)
    assert GGUFModel.open(target).tensors["blk.0.ffn_up.weight"].type == GGMLQuantizationType.Q4_0
    assert list(target.parent.iterdir()) == [target]
    with pytest.raises(ModelError, match=r"missing\.gguf"):
        requantise(tmp_path / "missing.gguf", tmp_path / "never.gguf")


@pytest.mark.parametrize("instruction_set", native.instruction_sets())
def test_limits_are_positive_for_every_instruction_set(instruction_set: str) -> None:
    found = measure_limits(instruction_set, 2, 0.01, 1 << 20)
    assert set(found) == set(kernels.LIMIT_NAMES)
    assert all(1e6 < value < 1e15 for value in found.values())


@dataclass
class Weights:
    """As much of an engine as its limits need."""

    weight_bytes: int
    instruction_set: str = "generic"
    threads: int = 2


def test_limits_take_no_second_copy_of_large_weights_and_no_memory_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(limits, "measure_limits", lambda *arguments: asked.append(arguments) or {})
    monkeypatch.setattr(limits, "read_memory_limits", lambda: [MemoryLimit("the memory", 4 << 30, 2 << 30, hard=True)])
    for size in (1 << 20, 8 << 30):
        limits.machine_limits(Weights(size), 0.01)  # type: ignore[arg-type]
    assert asked == [("generic", 2, 0.01, 1 << 20), ("generic", 2, 0.01, 1 << 30)]
    monkeypatch.setattr(limits, "read_memory_limits", lambda: [MemoryLimit("the memory", 4 << 30, 1 << 29, hard=True)])
    with pytest.raises(BenchError, match=r"takes 1,024 MiB, more than the 512 MiB that the memory"):
        limits.machine_limits(Weights(8 << 30), 0.01)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("generic", 0, 0.01, 4096), "threads"),
        (("generic", 1, 0.0, 4096), "seconds"),
        (("generic", 1, float("nan"), 4096), "seconds"),
        (("generic", 1, 0.01, 0), "model_bytes"),
        (("mmx", 1, 0.01, 4096), "mmx"),
    ],
)
def test_limits_refuse_nonsense(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        measure_limits(*arguments)


# --- their processes ---


def test_a_runner_answers_each_line_and_survives_failures() -> None:
    def double(value: int) -> dict[str, Any]:
        if value < 0:
            raise ValueError("no\nway")
        return {"doubled": 2 * value}

    answers = io.StringIO()
    serve(double, io.StringIO("".join(json.dumps({"value": each}) + "\n" for each in (4, -1, 1))), answers)
    assert [json.loads(line) for line in answers.getvalue().splitlines()] == [
        {"doubled": 8},
        {"error": "no way"},
        {"doubled": 2},
    ]


async def test_an_engine_process_answers_and_says_why_it_cannot(tiny: Path, tmp_path: Path) -> None:
    settings = {"engine": "native", "model": str(tiny), "threads": 1, "instruction_set": "generic"}
    async with start_runner("the engine native", "kernels", settings) as runner:
        assert runner.ready["instruction_set"] == "generic"
        assert (await runner.ask(do="speed", work=asdict(SMALL), variant={}))["tokens_per_s"] > 0
        with pytest.raises(BenchError, match=r"native failed: .*nothing"):
            await runner.ask(do="nothing")
        assert await runner.ask(do="forget") == {}
    with pytest.raises(BenchError, match=r"missing\.gguf"):
        async with start_runner("x", "kernels", {**settings, "model": str(tmp_path / "missing.gguf")}):
            pass


# --- the run ---


class FakeRunner:
    """Answers from a table of speeds."""

    def __init__(self, fake: Fake, engine: str, model: str) -> None:
        self.name = f"{engine}:{Path(model).name}"
        self.ready = {"weight_bytes": 100_000, "instruction_set": "generic"}
        self._fake = fake

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self._fake.asked.append((self.name, do, arguments))
        if do == "speed":
            return {"tokens_per_s": self._fake.speed(self.name, arguments["work"], arguments["variant"])}
        return {
            "limits": dict.fromkeys(kernels.LIMIT_NAMES, 1e9),
            "first_token": {"seconds": 0.5},
            "memory": {"resident_bytes": 300e6, "weight_bytes": 100e6, "kv_bytes": 150e6},
            "profile": {"matmul": 0.003, "norm": 0.001},
            "forget": {},
        }[do]


class Fake:
    """Starts fake runners, and keeps what all of them are asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.broken: set[str] = set()
        self.running = 0
        self.speed: Callable[[str, dict[str, Any], dict[str, Any]], float] = _speed

    @asynccontextmanager
    async def start(self, name: str, module: str, wanted: Mapping[str, Any]) -> AsyncIterator[FakeRunner]:
        if wanted["engine"] in self.broken:
            raise BenchError(f"{name} failed: not installed")
        self.running += 1
        try:
            yield FakeRunner(self, wanted["engine"], wanted["model"])
        finally:
            self.running -= 1

    @property
    def works(self) -> list[str]:
        return [arguments["work"]["key"] for _, do, arguments in self.asked if do == "speed"]


def _speed(name: str, work: dict[str, Any], variant: dict[str, Any]) -> float:
    return 100.0 if name.startswith("native") else 20.0 if variant.get("flash", True) else 25.0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    fake = Fake()

    async def busy_at_rest() -> float:
        return 3.0

    monkeypatch.setattr(kernels, "start_runner", fake.start)
    monkeypatch.setattr(kernels, "SETTLE_S", 0.0)
    monkeypatch.setattr(kernels, "busy_at_rest", busy_at_rest)
    monkeypatch.setattr(kernels._KernelRun, "_requantised", lambda self: tmp_path / "q4_0.gguf")
    return fake


SETUP = Setup(model="tiny", encode=str.encode, threads=2, repeats=3)


async def measure(model: Path, **changes: Any) -> list[Run]:
    workload = replace(Kernels(SMOLLM2, model, sections=frozenset(SMOLLM2.sections)), **changes)
    runs: list[Run] = []
    await workload.measure(SETUP, runs.append)
    return runs


def values(runs: Sequence[Run], key: str, side: str = OURS) -> dict[int, float]:
    return {run.repeat: run.metrics[key] for run in runs if run.side == side and key in run.metrics}


async def test_a_run_measures_everything_and_closes_what_it_started(tiny: Path, fake: Fake) -> None:
    runs = await measure(tiny, profile=True)
    for comparison in SMOLLM2.comparisons:
        for side in (OURS, comparison.peer.label):
            assert len(values(runs, comparison.work.key, side)) == 3
    profiles = [run.facts["profile"] for run in runs if "profile" in run.facts]
    assert [list(profile) for profile in profiles] == [[work.label] for work in SMOLLM2.works]
    assert values(runs, FIRST_TOKEN) == {0: 0.5, 1: 0.5, 2: 0.5}
    assert values(runs, MEMORY) == {0: pytest.approx(50.0)}
    assert not fake.running and not any("left_out" in run.facts for run in runs)


async def test_sides_take_turns_in_changing_order(tiny: Path, fake: Fake) -> None:
    await measure(tiny, sections=frozenset({MANY_SHORT.key}))
    turns = [name for name, do, _ in fake.asked if do == "speed"]
    ours, peer = "native:tiny.gguf", "genai:tiny.gguf"
    assert turns == [ours, peer, peer, ours, ours, peer]


async def test_a_peer_runs_with_its_fastest_settings(tiny: Path, fake: Fake) -> None:
    runs = await measure(tiny, sections=frozenset({PREFILL.key}))
    assert set(values(runs, PREFILL.key, SAME.label).values()) == {25.0}
    said = {run.facts["settings"] for run in runs if run.side == SAME.label and "settings" in run.facts}
    assert said == {f"{PREFILL.label}: flash off"}


async def test_a_peer_that_is_not_there_is_left_out_with_the_reason(tiny: Path, fake: Fake) -> None:
    fake.broken = {"genai"}
    runs = await measure(tiny)
    (reason,) = [run.facts["left_out"] for run in runs if run.side == GENAI.label]
    assert "not installed" in reason and values(runs, MANY_SHORT.key)
    (note,) = [note for note in result_of(runs).notes if note.startswith("left out")]
    assert GENAI.label in note
    assert outcome(runs, MANY_SHORT.key, GENAI.label) == ""


async def test_work_that_fails_is_reported_and_the_rest_goes_on(tiny: Path, fake: Fake) -> None:
    def speed(name: str, work: dict[str, Any], variant: dict[str, Any]) -> float:
        if work["key"] == PREFILL.key:
            raise BenchError("broken")
        return 10.0

    fake.speed = speed
    runs: list[Run] = []
    with pytest.raises(PartsFailedError) as failed:
        await Kernels(SMOLLM2, tiny, sections=frozenset(SMOLLM2.sections)).measure(SETUP, runs.append)
    assert failed.value.reasons == {PREFILL.label: "broken"}
    assert values(runs, MANY.key)


async def test_engines_and_sections_that_were_not_asked_for_stay_out(tiny: Path, fake: Fake) -> None:
    await measure(tiny, beside_peers=False, sections=frozenset({ONE_SHORT.key}))
    assert {name for name, _, _ in fake.asked} == {"native:tiny.gguf"}
    assert set(fake.works) == {ONE_SHORT.key}


async def test_another_model_does_little_work_on_the_same_file(tiny: Path, fake: Fake) -> None:
    runs = await measure(tiny, plan=ANY_MODEL, sections=frozenset(ANY_MODEL.sections))
    assert {name for name, _, _ in fake.asked} == {"native:tiny.gguf", "llama:tiny.gguf"}
    for work in ANY_MODEL.works:
        assert [len(values(runs, work.key, side)) for side in (OURS, SAME.label)] == [3, 3]
    for work in (ONE_BRIEF, PREFILL_ONCE):
        assert outcome(runs, work.key, SAME.label, ANY_MODEL) == "met"
    # 100 tokens a second, one a step, and 100 with 8 a step.
    assert values(runs, "rows-over-one") == {0: 8.0, 1: 8.0, 2: 8.0}
    assert values(runs, "rows-over-one", SAME.label) == {0: 8.0, 1: 8.0, 2: 8.0}
    for times, judged in ((1.4, "met"), (1.6, "not met")):
        assert outcome([Run(OURS, 0, {"rows-over-one": times})], "rows-over-one", plan=ANY_MODEL) == judged


async def test_shares_are_of_the_limits_in_the_same_repeat(tiny: Path, fake: Fake) -> None:
    runs = await measure(tiny, sections=frozenset({PREFILL.key, ONE_SHORT.key}))
    model = GGUFModel.open(tiny)
    assert set(values(runs, "prefill-share").values()) == {100 * file_macs_per_token(model) / 1e9}
    assert set(values(runs, "stream-share").values()) == {100 * file_read_per_token(model) / 1e9}
    assert values(runs, "prefill: int8", kernels.LIMIT) == {0: 1.0, 1: 1.0, 2: 1.0}


def test_what_a_token_takes_follows_from_the_shape(tiny: Path, tmp_path: Path) -> None:
    model = GGUFModel.open(tiny)
    layers = [
        tensor.shape for name, tensor in model.tensors.items() if name.startswith("blk.") and len(tensor.shape) == 2
    ]
    assert file_macs_per_token(model) == sum(rows * cols for rows, cols in layers)
    assert file_read_per_token(model) == sum(tensor.size for tensor in model.tensors.values())
    apart = GGUFModel.open(write_model(tmp_path / "apart.gguf", tied=False))
    whole = sum(tensor.size for tensor in apart.tensors.values())
    assert file_read_per_token(apart) == whole - apart.tensors["token_embd.weight"].size


# --- the table ---


def result_of(runs: Sequence[Run], plan: Plan = SMOLLM2) -> Any:
    return make_result(Kernels(plan, Path("model.gguf")), SETUP, runs)


def outcome(runs: Sequence[Run], key: str, against: str | None = None, plan: Plan = SMOLLM2) -> str:
    row = next(row for row in result_of(runs, plan).rows if row.figure.key == key)
    return str(row.verdict(against) or "")


@pytest.mark.parametrize(
    ("work", "peer", "bound"),
    [
        (PREFILL, SAME, 3.5),
        (PREFILL, BEST, 1.7),
        (ONE_SHORT, SAME, 2.0),
        (ONE_SHORT, BEST, 1.3),
        (ONE_LONG, SAME, 3.0),
        (MANY, SAME, 3.5),
        (MANY, BEST, 2.5),
        (MANY_SHORT, GENAI, 1.3),
    ],
)
def test_speeds_are_judged_by_how_many_times_the_peers_they_are(work: Work, peer: Any, bound: float) -> None:
    for factor, expected in ((bound * 1.05, "met"), (bound * 0.95, "not met")):
        runs = [Run(OURS, 0, {work.key: 10 * factor}), Run(peer.label, 0, {work.key: 10.0})]
        assert outcome(runs, work.key, peer.label) == expected


def test_what_is_for_information_has_no_verdict() -> None:
    for comparison in SMOLLM2.comparisons:
        if comparison.times is None:
            label = comparison.peer.label
            runs = [Run(OURS, 0, {comparison.work.key: 10.0}), Run(label, 0, {comparison.work.key: 1.0})]
            assert outcome(runs, comparison.work.key, label) == ""


@pytest.mark.parametrize(
    ("key", "within", "beyond"),
    [
        (FIRST_TOKEN, 1.4, 1.6),
        (MEMORY, 149.0, 151.0),
        ("packed-over-file", 1.03, 1.031),
        ("prefill-share", 0.66, 0.64),
        ("stream-share", 0.71, 0.69),
    ],
)
def test_our_own_bounds(key: str, within: float, beyond: float) -> None:
    peer = Run(SAME.label, 0, {key: 500.0})  # it stands beside ours, and a ratio would mean nothing
    assert outcome([Run(OURS, 0, {key: within}), peer], key) == "met"
    assert outcome([Run(OURS, 0, {key: beyond}), peer], key) == "not met"
    assert outcome([Run(OURS, 0, {key: within}), peer], key, SAME.label) == ""


# --- the command ---


def invoke(*arguments: str) -> Any:
    app = Typer()
    app.command()(cli.kernels)
    return CliRunner().invoke(app, arguments)


def test_the_command_prints_and_writes(tiny: Path, fake: Fake, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "k.json"
    arguments = ("--quick", "--json", str(file), "--only", "prefill", "--against", "all", "--profile")
    result = invoke("--model", str(tiny), *arguments)
    assert result.exit_code == 0, result.output
    assert PREFILL.label in result.output and MANY.label not in result.output
    assert str(tiny) in result.output and "matmul 3.00 ms (75.0%)" in result.output
    content = json.loads(file.read_text())
    assert content["settings"]["only"] == ["prefill"] and content["workloads"][0]["name"] == "kernels"
    (row,) = [row for row in content["workloads"][0]["rows"] if row["key"] == "prefill"]
    beside = row["peers"][SAME.label]
    assert row["ours"]["median"] == 100.0 and beside["ratio"]["estimate"] == 4.0 and beside["met"] is None
    runs = [run for run in content["workloads"][0]["runs"] if run["side"] == OURS]
    assert runs[0]["facts"]["engine"]["weight_bytes"] == 100_000 and not content["failures"]
    assert any("profile" in run["facts"] for run in runs)
    asked = [arguments["work"] for _, do, arguments in fake.asked if do == "speed"]
    assert asked and all(work["context"] == 64 for work in asked)


def test_only_a_whole_measurement_is_judged(tiny: Path, fake: Fake, tmp_path: Path) -> None:
    file = tmp_path / "k.json"
    for quick, met in ((["--quick"], None), ([], True)):
        arguments = (*quick, "--only", "prefill", "--against", "all", "--repeats", "1", "--json", str(file))
        result = invoke("--model", str(tiny), *arguments)
        assert result.exit_code == 0, result.output
        rows = json.loads(file.read_text())["workloads"][0]["rows"]
        assert [row["peers"][SAME.label]["met"] for row in rows if row["key"] == "prefill"] == [met]
        assert [word in result.output for word in ("required", "verdict")] == [not quick] * 2


def test_the_command_writes_the_file_of_a_shape_and_measures_it(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLLM_CACHE_DIR", str(tmp_path))
    tiny = Shape(n_layers=2, n_embd=256, n_heads=4, n_kv_heads=2, head_dim=64, n_ff=256, n_vocab=320).layered
    monkeypatch.setitem(SHAPES, "tiny", tiny)
    file = tmp_path / "k.json"
    result = invoke("--shape", "tiny", "--type", "q5_k_m", "--quick", "--against", "all", "--json", str(file))
    assert result.exit_code == 0, result.output
    (written,) = (tmp_path / "bench").iterdir()
    saved = json.loads(file.read_text())["settings"]
    assert (saved["shapes"], saved["type"]) == (["tiny"], "q5_k_m")
    assert {name for name, _, _ in fake.asked} == {f"native:{written.name}", f"llama:{written.name}"}


def test_other_models_take_works_of_the_default_one_without_its_bounds_and_files(
    tiny: Path, fake: Fake, tmp_path: Path
) -> None:
    file = tmp_path / "k.json"
    only = [part for key in ("decode-512", "rows-8", "first-token") for part in ("--only", key)]
    result = invoke("--model", str(tiny), "--repeats", "1", "--against", "all", "--json", str(file), *only)
    assert result.exit_code == 0, result.output
    assert {name for name, _, _ in fake.asked} <= {f"native:{tiny.name}", f"llama:{tiny.name}"}
    assert "Q4_0" not in result.output
    rows = {row["key"]: row for row in json.loads(file.read_text())["workloads"][0]["rows"]}
    assert rows["decode-512"]["peers"][SAME.label]["required"] is None and rows["first-token"]["required"] is None
    assert set(fake.works) == {"decode-512", "rows-8"}


def test_works_of_another_plan_are_for_information() -> None:
    plan = ANY_MODEL.including(["prefill", "decode-2048"])
    assert plan.sections == (*ANY_MODEL.sections, ONE_LONG.key)
    assert plan.comparisons[len(ANY_MODEL.comparisons) :] == (Comparison(ONE_LONG, SAME),)
    assert SMOLLM2.including(SMOLLM2.sections) == SMOLLM2


def test_an_unwritable_json_file_is_known_before(tiny: Path, fake: Fake, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bad = tmp_path / "file" / "k.json"
    for threads in ("1", "1,2"):
        result = invoke("--model", str(tiny), "--threads", threads, "--json", str(bad))
        assert isinstance(result.exception, CLLMError) and f"cannot write {bad.parent}" in str(result.exception)
    assert not fake.asked


def test_the_command_fails_if_work_does(tiny: Path, fake: Fake) -> None:
    def speed(name: str, work: dict[str, Any], variant: dict[str, Any]) -> float:
        raise BenchError("broken")

    fake.speed = speed
    result = invoke("--model", str(tiny), "--quick", "--against", "all", "--only", "prefill")
    assert result.exit_code == 1 and "broken" in result.output


@pytest.mark.parametrize("arguments", [("--only", "nonsense"), ("--against", "nonsense")])
def test_unknown_names_are_refused(arguments: tuple[str, str]) -> None:
    result = invoke(*arguments)
    assert isinstance(result.exception, BenchError) and "nonsense" in str(result.exception)

"""`cllm bench kernels --threads 1,2,4`: the engine by number of threads, its table, its file and its picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer import Typer
from typer.testing import CliRunner

from cllm.machine import Cpus, MemoryLimit
from cllm_bench.errors import BenchError
from cllm_bench.figures import Run
from cllm_bench.kernels import cli
from cllm_bench.kernels.shapes import MIXES, SHAPES, Shape, random_engine, weight_bytes
from cllm_bench.kernels.works import MANY, ONE_MIDDLE, PREFILL, SCALING_WORKS, SOME, parse_threads
from cllm_bench.live import View
from cllm_bench.report import headings, table_lines
from cllm_bench.run import make_result
from cllm_bench.workloads.base import Setup
from native_kit import write_model

native = pytest.importorskip("cllm._native", reason="the extension is not built")

from cllm._native import Engine  # noqa: E402  (needs the extension)
from cllm_bench.workloads import scaling  # noqa: E402
from cllm_bench.workloads.scaling import Scaling, Subject  # noqa: E402

TINY = Shape(n_layers=2, n_embd=64, n_heads=4, n_kv_heads=2, head_dim=16, n_ff=128, n_vocab=320)
SETUP = Setup(model="tiny", encode=str.encode, threads=1, repeats=2)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(scaling, "busy_percent", lambda: 3.0)


# --- numbers of threads ---


@given(st.lists(st.integers(1, 1024), min_size=1))
def test_thread_counts_come_in_order_and_once(counts: list[int]) -> None:
    assert parse_threads(" , ".join(map(str, counts))) == sorted(set(counts))


@pytest.mark.parametrize("text", ["", "0", "1,,2", "-1", "1;2", "two", "1025", "1.5", "²", "1,"])
def test_other_thread_counts_are_refused_by_name(text: str) -> None:
    with pytest.raises(BenchError, match="--threads is"):
        parse_threads(text)


# --- shapes ---


def test_a_random_engine_has_the_size_its_shape_says() -> None:
    engine = random_engine(TINY, MIXES["q8_0"], 1, "generic")
    vectors = 4 * TINY.n_embd * (2 * TINY.n_layers + 1)
    assert engine.weight_bytes == pytest.approx(weight_bytes(TINY, MIXES["q8_0"]) + vectors, rel=0.03)
    layer = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 128
    assert TINY.macs_per_token == 2 * layer


@pytest.mark.parametrize(("name", "billions"), [("135M", 0.134), ("1B", 1.236), ("3B", 3.213), ("8B", 7.505)])
def test_the_shapes_are_those_of_the_models(name: str, billions: float) -> None:
    """Without a head of its own, which the real 8B has."""
    shape = SHAPES[name]
    assert (shape.macs_per_token + shape.n_vocab * shape.n_embd) / 1e9 == pytest.approx(billions, abs=0.001)


# --- measuring ---


class Said(View):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def name(threads: str) -> str:
    return "1 thread" if threads == "1" else f"{threads} threads"


async def measured(threads: Sequence[int] = (1, 2)) -> tuple[list[Run], list[str]]:
    works = tuple(work.quick() for work in (PREFILL, ONE_MIDDLE, SOME, MANY))
    workload = Scaling(scaling.random_subject("tiny", "q4_0", "generic"), works, threads, limit_s=0.01)
    view, runs = Said(), []
    await workload.measure(replace(SETUP, view=view), runs.append)
    return runs, view.lines


async def test_every_count_does_every_work_in_every_repeat(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "read_cpus", lambda: Cpus(3, 3, 3))
    (*turns, last), said = await measured()
    assert [(run.side, run.repeat) for run in turns] == [
        (side, repeat) for repeat, order in enumerate(("123", "231")) for side in map(name, order)
    ]
    for run in turns:
        assert all(run.metrics[work.key] > 0 for work in (PREFILL, ONE_MIDDLE, SOME, MANY))
        # Prompts and one stream have a limit; several streams have none.
        assert {key for key in run.metrics if key.endswith("-share")} == {"prefill-share", "decode-512-share"}
        assert run.facts["instruction_set"] == "generic" and run.facts["weight_bytes"] > 0
    assert said[0] == "tiny q4_0, random: 1 thread, 1 of 2"
    drawn = [curve for curve in last.curves if curve.points]
    assert [curve.plot for curve in drawn].count("tiny q4_0, random: speed") == 4 and len(drawn) == 6
    assert all([x for x, _ in curve.points] == [1.0, 2.0, 3.0] for curve in drawn)
    assert drawn[0].marks == {3.0: "default 3"} and "the default, 3 threads: at least" in last.facts["notes"][-1]


async def test_shares_are_of_the_limit_in_the_same_turn(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = iter([(1e9, 1e8), (2e9, 4e8)])

    def machine_limits(engine: Engine, seconds: float) -> dict[str, float]:
        return dict(zip((scaling.INT8, scaling.READ), next(limits), strict=True))

    monkeypatch.setattr(scaling, "machine_limits", machine_limits)
    monkeypatch.setattr(scaling, "read_cpus", lambda: Cpus(1, 1, 1))
    (*turns, _), _ = await measured((1,))
    for turn, (int8, read) in zip(turns, [(1e9, 1e8), (2e9, 4e8)], strict=True):
        metrics = turn.metrics
        assert metrics["prefill-share"] == pytest.approx(metrics[PREFILL.key] * TINY.macs_per_token / int8)
        per_token = weight_bytes(TINY, MIXES["q4_0"])
        assert metrics["decode-512-share"] == pytest.approx(metrics[ONE_MIDDLE.key] * per_token / read)


def test_a_shape_that_does_not_fit_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = MemoryLimit("the container's memory limit", 1 << 30, 1 << 29, hard=True)
    monkeypatch.setattr(scaling, "read_memory_limits", lambda: [limit])
    with pytest.raises(
        BenchError, match=r"8B as q8_0 takes 8,\d+ MiB, more than the 512 MiB that the container's memory limit"
    ):
        scaling.random_subject("8B", "q8_0", "auto")


def test_a_number_of_threads_is_a_row_beside_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "read_cpus", lambda: Cpus(4, 4, 4))
    workload = Scaling(Subject("x", lambda threads: None, 1, 1.0, 1.0), (PREFILL,), (1, 4))  # type: ignore[arg-type]
    runs = [
        *(
            Run("1 thread", repeat, {"prefill": speed, "prefill-share": 0.5})
            for repeat, speed in enumerate((100, 120, 90))
        ),
        *(Run("4 threads", repeat, {"prefill": 400, "prefill-share": 0.4}) for repeat in range(3)),
    ]
    result = make_result(workload, SETUP, runs)
    assert headings(result) == ["", "prefill, 512 tokens, tok/s", "prefill, 512 tokens: share"]
    assert table_lines(result) == [["1 thread", "100 (0.26x)", "0.50"], ["4 threads", "400", "0.40"]]


# --- the command ---


def invoke(*arguments: str) -> Any:
    app = Typer()
    app.command()(cli.kernels)
    return CliRunner().invoke(app, arguments)


def test_shapes_by_number_of_threads(tiny: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "s.json", tmp_path / "plots" / "s.png"
    shapes = ("--shape", "tiny", "--shape", "tiny", "--type", "q5_1")
    result = invoke("--threads", "1,2", *shapes, "--quick", "--json", str(file), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert "tiny q5_1, random" in result.output and "mean nothing" in result.output
    content = json.loads(file.read_text())
    assert len(content["results"]) == 2 and content["settings"]["shapes"] == ["tiny", "tiny"]
    saved = content["results"][0]
    assert {"1", "2"} <= set(saved["speeds"]) and saved["works"] == [work.key for work in SCALING_WORKS]
    assert all(len(each) == 1 for each in saved["speeds"]["1"].values()) and not saved["interrupted"]
    assert set(saved["shares"]["1"]) == {"prefill", "decode-16", "decode-512", "decode-2048"}
    assert set(saved["limits"]["1"]) == {scaling.INT8, scaling.READ}
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_a_model_by_number_of_threads(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny.gguf", weight_type="q4_k", n_embd=256, n_ff=256, n_vocab=320)
    result = invoke("--threads", "1,2", "--model", str(model), "--quick", "--only", "prefill", "--only", "decode-16")
    assert result.exit_code == 0, result.output
    assert "0.00 GB of weights" in result.output and "1 stream, context 16" in result.output
    assert "32 streams" not in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--threads", "1,x"), "--threads is '1,x'"),
        (("--threads", "1,2", "--against", "llama"), "--against"),
        (("--threads", "1,2", "--profile"), "--profile"),
        (("--shape", "7B"), "--shape is '7B'; it must be one of 135M, 1B, 3B, 8B"),
        (("--shape", "1B", "--type", "q2"), "--type is 'q2'; it must be one of q4_0,"),
        (("--type", "q4_0"), "--type needs --shape"),
        (("--shape", "1B", "--model", "smollm2"), "--shape and --model exclude"),
        (("--shape", "1B", "--shape", "3B"), "several --shape need several"),
        (("--threads", "1,2", "--only", "memory"), "--only is memory; by threads"),
        (("--threads", "2", "--plot", "x.png"), "--plot needs several"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: tuple[str, ...], says: str) -> None:
    result = invoke(*arguments)
    assert isinstance(result.exception, BenchError) and says in str(result.exception)

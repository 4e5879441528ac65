"""`cllm bench kernels --threads 1,2,4`: the engine by number of threads, its table and its file."""

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

from cllm.machine import Cpus
from cllm.models.gguf import GGUFModel
from cllm_bench.errors import BenchError
from cllm_bench.figures import Run
from cllm_bench.kernels import cli
from cllm_bench.kernels.shapes import SHAPES, Shape, file_macs_per_token, file_read_per_token
from cllm_bench.kernels.works import MANY, ONE_MIDDLE, PREFILL, SOME, parse_threads
from cllm_bench.live import View
from cllm_bench.report import headings, table_lines
from cllm_bench.run import make_result
from cllm_bench.workloads.base import Setup
from native_kit import write_model

native = pytest.importorskip("cllm._native", reason="the extension is not built")

from cllm_bench.workloads import scaling  # noqa: E402
from cllm_bench.workloads.scaling import Scaling  # noqa: E402

TINY = Shape(n_layers=2, n_embd=64, n_heads=4, n_kv_heads=2, head_dim=16, n_ff=128, n_vocab=320).layered
SETUP = Setup(model="tiny", encode=str.encode, threads=1, repeats=2)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(scaling, "busy_percent", lambda: 3.0)
    return write_model(tmp_path / "tiny.gguf", weight_type="q4_0", n_vocab=320)


# --- numbers of threads ---


@given(st.lists(st.integers(1, 1024), min_size=1))
def test_thread_counts_come_in_order_and_once(counts: list[int]) -> None:
    assert parse_threads(" , ".join(map(str, counts))) == sorted(set(counts))


@pytest.mark.parametrize("text", ["", "0", "1,,2", "-1", "1;2", "two", "1025", "1.5", "²", "1,"])
def test_other_thread_counts_are_refused_by_name(text: str) -> None:
    with pytest.raises(BenchError, match="--threads is"):
        parse_threads(text)


# --- shapes ---


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("135M", 0.134), ("1B", 1.236), ("3B", 3.213), ("8B", 7.505)),
        *(("gemma3-4B", 3.880), ("gemma4-E4B", 7.462), ("qwen3.5-0.8B", 0.752), ("qwen3.5-2B", 1.881)),
        *(("qwen3.5-4B", 4.205), ("lfm2-1.2B", 1.170), ("granite4-h-1B", 1.460)),
    ],
)
def test_the_shapes_are_those_of_the_models(name: str, billions: float) -> None:
    """Without a head of its own, which the real 8B has."""
    shape = SHAPES[name]
    sizes = [sizes for each in (*shape.layers, shape.outer) for sizes in each.values()]
    layers = sum(rows * columns for rows, columns in sizes)
    assert (layers + shape.n_vocab * shape.n_embd) / 1e9 == pytest.approx(billions, abs=0.001)


# --- measuring ---


class Said(View):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def name(threads: str) -> str:
    return "1 thread" if threads == "1" else f"{threads} threads"


async def measured(model: Path, threads: Sequence[int] = (1, 2)) -> tuple[list[Run], list[str]]:
    works = tuple(work.quick() for work in (PREFILL, ONE_MIDDLE, SOME, MANY))
    workload = Scaling(model, works, threads, "generic", limit_s=0.01)
    view, runs = Said(), []
    await workload.measure(replace(SETUP, view=view), runs.append)
    return runs, view.lines


async def test_every_count_does_every_work_in_every_repeat(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "read_cpus", lambda: Cpus(3, 3, 3))
    (*turns, last), said = await measured(tiny)
    assert [(run.side, run.repeat) for run in turns] == [
        (side, repeat) for repeat, order in enumerate(("123", "231")) for side in map(name, order)
    ]
    model = GGUFModel.open(tiny)
    for run in turns:
        metrics = run.metrics
        assert all(metrics[work.key] > 0 for work in (PREFILL, ONE_MIDDLE, SOME, MANY))
        # Prompts and one stream have a limit, which is measured in the same turn; several streams have none.
        assert {key for key in metrics if key.endswith("-share")} == {"prefill-share", "decode-512-share"}
        used = metrics["prefill"] * file_macs_per_token(model)
        assert metrics["prefill-share"] == pytest.approx(used / metrics[scaling.INT8])
        read = metrics["decode-512"] * file_read_per_token(model)
        assert metrics["decode-512-share"] == pytest.approx(read / metrics[scaling.READ])
        assert run.facts["instruction_set"] == "generic" and run.facts["weight_bytes"] > 0
    assert said[0] == "tiny: 1 thread, 1 of 2"
    assert "the default, 3 threads: at least" in last.facts["notes"][-1]


def test_a_number_of_threads_is_a_row_beside_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "read_cpus", lambda: Cpus(4, 4, 4))
    workload = Scaling(Path("x.gguf"), (PREFILL,), (1, 4))
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


def test_shapes_by_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setenv("CLLM_CACHE_DIR", str(tmp_path))
    file = tmp_path / "s.json"
    shapes = ("--shape", "tiny", "--shape", "tiny", "--type", "q5_1")
    result = invoke("--threads", "1,2", *shapes, "--quick", "--only", "prefill", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "random-tiny-q5_1-2" in result.output and "mean nothing" in result.output
    content = json.loads(file.read_text())
    assert len(content["workloads"]) == 2 and content["settings"]["shapes"] == ["tiny", "tiny"]
    runs = {run["side"]: run for run in content["workloads"][0]["runs"] if run["metrics"]}
    assert {"1 thread", "2 threads"} <= set(runs) and not content["interrupted"]
    assert set(runs["1 thread"]["metrics"]) == {"prefill", "prefill-share", scaling.INT8, scaling.READ}


def test_a_model_by_number_of_threads(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny.gguf", weight_type="q4_k", n_embd=256, n_ff=256, n_vocab=320)
    result = invoke("--threads", "1,2", "--model", str(model), "--quick", "--only", "prefill", "--only", "decode-16")
    assert result.exit_code == 0, result.output
    assert "1 stream, context 16" in result.output
    assert "32 streams" not in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--threads", "1,x"), "--threads is '1,x'"),
        (("--threads", "1,2", "--against", "llama"), "--against is 'llama'; it must be all or none"),
        (("--threads", "1,2", "--profile"), "--profile"),
        (("--shape", "7B"), "--shape is '7B'; it must be one of 135M, 1B, 3B, 8B"),
        (("--shape", "1B", "--type", "q2"), "--type is 'q2'; it must be one of q4_0,"),
        (("--type", "q4_0"), "--type needs --shape"),
        (("--shape", "1B", "--model", "smollm2"), "--shape and --model exclude"),
        (("--shape", "1B", "--shape", "3B"), "several --shape need several"),
        (("--threads", "1,2", "--only", "memory"), "--only is memory; by threads"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: tuple[str, ...], says: str) -> None:
    result = invoke(*arguments)
    assert isinstance(result.exception, BenchError) and says in str(result.exception)

"""`cllm bench kernels --threads 1,2,4`: the engine by number of threads, its table, its file and its picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer import Typer
from typer.testing import CliRunner

from cllm.bench.http import BenchError
from cllm.bench.kernels import cli
from cllm.bench.kernels.scaling_plot import check, draw
from cllm.bench.kernels.scaling_report import Scaling, load, notes, save, table
from cllm.bench.kernels.shapes import MIXES, SHAPES, Shape, random_engine, weight_bytes
from cllm.bench.kernels.works import MANY, ONE_MIDDLE, PREFILL, SCALING_WORKS, SOME, parse_threads, usual_counts
from cllm.machine import Cpus, Room
from native_kit import write_model

native = pytest.importorskip("cllm._native", reason="the extension is not built")

from cllm._native import Engine  # noqa: E402  (needs the extension)
from cllm.bench.kernels import scaling  # noqa: E402

TINY = Shape(n_layers=2, n_embd=64, n_heads=4, n_kv_heads=2, head_dim=16, n_ff=128, n_vocab=320)
BARE = ("psutil", "pydantic", "fastapi", "gguf", "httpx", "rich", "typer", "matplotlib", "yaml", "tokenizers", "jinja2")


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


@pytest.mark.parametrize(("usable", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])])
def test_the_usual_counts(usable: int, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cllm.bench.kernels.works.read_cpus", lambda: Cpus(usable, usable, usable))
    assert usual_counts() == counts


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


def measured(counts: tuple[int, ...] = (1, 2), repeats: int = 2, **changes: Any) -> Scaling:
    subject = scaling.random_subject("tiny", "q4_0", "generic")
    works = [work.quick() for work in (PREFILL, ONE_MIDDLE, SOME, MANY)]
    return scaling.measure(subject, works, counts, repeats=repeats, limit_s=0.01, **changes)


def test_every_count_does_every_work_in_every_repeat(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "read_cpus", lambda: Cpus(3, 3, 3))
    lines: list[str] = []
    found = measured(progress=lines.append)
    assert found.default == 3 and sorted(found.speeds) == [1, 2, 3]
    for threads in (1, 2, 3):
        assert {key: len(values) for key, values in found.speeds[threads].items()} == dict.fromkeys(found.works, 2)
        assert all(value > 0 for values in found.speeds[threads].values() for value in values)
        # Prompts and one stream have a limit; several streams have none.
        assert set(found.shares[threads]) == {PREFILL.key, ONE_MIDDLE.key}
    order = [int(line.split(": ")[1].split()[0]) for line in lines]
    assert order == [1, 2, 3, 2, 3, 1]
    assert found.instruction_set == "generic" and found.weight_bytes > 0


def test_shares_are_of_the_limit_in_the_same_turn(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = iter([(1e9, 1e8), (2e9, 4e8)])

    def machine_limits(engine: Engine, seconds: float) -> dict[str, float]:
        int8, read = next(limits)
        return {scaling.INT8: int8, scaling.READ: read}

    monkeypatch.setattr(scaling, "machine_limits", machine_limits)
    monkeypatch.setattr(scaling, "read_cpus", lambda: Cpus(1, 1, 1))
    found = measured((1,))
    for turn, (int8, read) in enumerate([(1e9, 1e8), (2e9, 4e8)]):
        prefill, one = found.speeds[1][PREFILL.key][turn], found.speeds[1][ONE_MIDDLE.key][turn]
        assert found.shares[1][PREFILL.key][turn] == pytest.approx(prefill * TINY.macs_per_token / int8)
        assert found.shares[1][ONE_MIDDLE.key][turn] == pytest.approx(one * weight_bytes(TINY, MIXES["q4_0"]) / read)


def test_an_interrupt_keeps_what_was_measured(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "read_cpus", lambda: Cpus(2, 2, 2))

    def stop(line: str) -> None:
        raise KeyboardInterrupt

    found = measured(progress=stop)
    assert found.interrupted and list(found.speeds) == [1]
    assert "interrupted" in table(found)


def test_a_shape_that_does_not_fit_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room("the container's memory limit", 1 << 30, 1 << 29, hard=True)
    monkeypatch.setattr(scaling, "read_rooms", lambda: [room])
    with pytest.raises(
        BenchError, match=r"8B as q8_0 takes 8,\d+ MiB, more than the 512 MiB that the container's memory limit"
    ):
        scaling.random_subject("8B", "q8_0", "auto")


# --- what is printed and written ---


def made() -> Scaling:
    speeds = {
        1: {"prefill": [100.0, 120.0, 90.0], "decode-32x512": [50.0, 50.0]},
        4: {"prefill": [400.0], "decode-32x512": [40.0]},
        2: {"prefill": [200.0], "decode-32x512": [100.0]},
    }
    shares = {threads: {"prefill": [0.5]} for threads in speeds}
    return Scaling("tiny", ["prefill", "decode-32x512"], 4, "generic", 10**9, speeds, shares)


def test_the_table_has_medians_shares_and_the_default() -> None:
    title, blank, head, line, *rows, _, note, default = table(made()).splitlines()
    assert title == "tiny: 1.00 GB of weights, generic" and not blank
    assert [cell.strip() for cell in head.split("|")[1:-1]] == ["threads", "prefill, 512 tokens", MANY.label[8:]]
    assert set(line) == set("|-:")
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert cells == [
        ["1", "100 (0.50)  25%", "50.0  50%"],
        ["2", "200 (0.50)  50%", "100 100%"],
        ["4 (default)", "400 (0.50) 100%", "40.0  40%"],
    ]
    assert len({len(row) for row in (head, line, *rows)}) == 1
    assert "int8" in note
    assert default == "the default, 4 threads: at least 40% of the best row (decode-32x512)"


def test_a_busy_machine_is_noted() -> None:
    found = made()
    found.busy_percent = 40.0
    assert any("40 % busy" in line for line in notes(found))


def test_a_table_of_nothing_is_no_failure() -> None:
    assert "nothing was measured" in table(Scaling("x", ["prefill"], 2))


def test_what_is_saved_can_be_loaded(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "s.json"
    save(file, {"quick": True}, [made()])
    assert load(file) == [made()]
    content = json.loads(file.read_text())
    assert content["machine"]["default_threads"] >= 1 and content["settings"] == {"quick": True}


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"results": [{}]}', '{"results": 3}'])
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(BenchError, match=r"s\.json is no file"):
        load(tmp_path / "s.json")
    with pytest.raises(BenchError, match="cannot read"):
        load(tmp_path / "none.json")


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plots/s{suffix}"
    draw([made(), made()], file)
    assert file.read_bytes()[:4] == (b"\x89PNG" if suffix == ".png" else b"<?xm")


def test_a_picture_that_cannot_be_drawn_is_refused_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"s\.jpg: a plot ends in \.png"):
        check(tmp_path / "s.jpg")
    with pytest.raises(BenchError, match="ends in"):
        scaling.run(scaling.Request(shapes=["8B"], plot=tmp_path / "s.jpg"))


# --- the commands ---


def invoke(*arguments: str) -> Any:
    app = Typer()
    app.command()(cli.kernels)
    return CliRunner().invoke(app, arguments)


def test_cllm_bench_kernels_with_a_shape(tiny: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "s.json", tmp_path / "s.png"
    result = invoke(
        "--threads", "1,2", "--shape", "tiny", "--type", "q5_1", "--quick", "--json", str(file), "--plot", str(plot)
    )
    assert result.exit_code == 0, result.output
    assert "tiny q5_1, random" in result.output and "(default)" in result.output
    assert "do not count" in result.output
    (saved,) = load(file)
    assert {1, 2} <= set(saved.speeds) and saved.works == [work.key for work in SCALING_WORKS]
    assert plot.stat().st_size > 1000


def test_cllm_bench_kernels_with_a_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny.gguf", weight_type="q4_k", n_embd=256, n_ff=256, n_vocab=320)
    result = invoke("--threads", "1,2", "--model", str(model), "--quick", "--only", "prefill", "--only", "decode-16")
    assert result.exit_code == 0, result.output
    assert "tiny: 0.00 GB of weights" in result.output and "1 stream, context 16" in result.output
    assert "32 streams" not in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--threads", "1,x"), "--threads is '1,x'"),
        (("--threads", "1,2", "--against", "llama"), "--against"),
        (("--threads", "1,2", "--profile"), "--profile"),
        (("--shape", "7B"), "--shape is '7B'; it must be one of 135M, 1B, 3B, 8B"),
        (("--shape", "1B", "--type", "q2"), "--type is 'q2'; it must be one of q4_0,"),
        (("--type", "q4_0"), "--type goes with --shape"),
        (("--shape", "1B", "--model", "smollm2"), "--shape and --model"),
        (("--shape", "1B", "--shape", "3B"), "several --shape need several"),
        (("--threads", "1,2", "--only", "memory"), "--only is memory; by threads"),
        (("--threads", "2", "--plot", "x.png"), "--plot needs several"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: tuple[str, ...], says: str) -> None:
    result = invoke(*arguments)
    assert isinstance(result.exception, BenchError) and says in str(result.exception)


def test_an_instruction_set_that_is_not_there_is_one_line(tiny: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert scaling.main(["--shape", "tiny", "--quick", "--instruction-set", "mmx"]) == 2
    error = capsys.readouterr().err
    assert "mmx" in error and error.count("\n") == 1


def test_the_module_runs_on_a_bare_machine(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({BARE!r}))\n"
        "from cllm.bench.kernels import scaling, shapes\n"
        f"shapes.SHAPES['tiny'] = shapes.Shape(**{ {name: getattr(TINY, name) for name in TINY.__slots__}!r})\n"
        f"sys.exit(scaling.main(['--shape', 'tiny', '--threads', '1,2', '--quick', '--json', {str(file)!r}]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "| 32 streams, context 512 |" in ran.stdout
    assert load(file)[0].name == "tiny q4_k_m, random"

"""`cllm bench kv-types`: quality, speed and bytes of all pairs of K and V types."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

from cllm.machine import MemoryLimit
from cllm.models.gguf import GGUFModel
from cllm_bench.errors import BenchError
from cllm_bench.figures import OURS, Run
from cllm_bench.live import View
from cllm_bench.quality.cli import kv_types
from cllm_bench.quality.texts import FEWEST, parts_of
from cllm_bench.report import Result, markdown, table_lines, verdict_lines
from cllm_bench.run import make_result
from cllm_bench.workloads.base import Setup
from native_kit import write_model

native = pytest.importorskip("cllm._native", reason="the extension is not built")

from cllm_bench.quality.comparison import Comparison, log_softmax, logits_in_turn  # noqa: E402  (need the extension)
from cllm_bench.workloads import kv_types as measuring  # noqa: E402
from cllm_bench.workloads.kv_types import JUDGED, PAIRS, QUICK_WORKS, REFERENCE, KvTypes, Pair  # noqa: E402
from step_kit import Rig, random_tokens  # noqa: E402

TOKENS = 70
SETUP = Setup(model="tiny", encode=str.encode, threads=1, repeats=2, ours=str(JUDGED))


class Said(View):
    """Keeps what is said, and may have had enough."""

    def __init__(self, stop: str = "never") -> None:
        self.lines: list[str] = []
        self._stop = stop

    def say(self, line: str) -> None:
        if line.startswith(self._stop):
            raise KeyboardInterrupt
        self.lines.append(line)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_embd=64, n_heads=2, n_kv_heads=1, head_dim=32)


@pytest.fixture
def workload(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> KvTypes:
    monkeypatch.setattr(measuring, "busy_percent", lambda: 3.0)
    model = GGUFModel.open(tiny)
    texts = [random_tokens(model.spec.n_vocab, TOKENS, seed) for seed in (1, 2)]
    return KvTypes(model, texts, "generic", small=True)


# --- quality ---


def test_log_probabilities_add_up_to_one() -> None:
    rows = log_softmax(np.random.default_rng(1).normal(0, 30, (5, 300)).astype(np.float32))
    assert np.exp(rows.astype(np.float64)).sum(1) == pytest.approx(1, abs=1e-5)


def test_a_comparison_by_hand() -> None:
    """Two tokens, two positions; at the second the other one is more likely."""
    theirs = np.log(np.array([[0.75, 0.25], [0.6, 0.4]], np.float32))
    ours = np.log(np.array([[0.5, 0.5 - 1e-6], [0.3, 0.7]], np.float32))
    found = Comparison()
    found.add(ours, theirs, [0, 1])
    assert found.positions == 2 and found.agreement == 0.5
    assert found.perplexity == pytest.approx((1 / 0.5 / 0.7) ** 0.5, rel=1e-4)
    assert found.perplexity_change == pytest.approx((0.75 * 0.4 / 0.5 / 0.7) ** 0.5 - 1, rel=1e-4)
    first = 0.75 * np.log(1.5) + 0.25 * np.log(0.5)
    second = 0.6 * np.log(2) + 0.4 * np.log(4 / 7)
    assert found.mean_divergence == pytest.approx((first + second) / 2, rel=1e-3)


def test_every_position_has_its_logits(tiny: Path) -> None:
    """As a prompt of that length would have them: all bits of them."""
    rig = Rig(tiny, threads=1)
    tokens = random_tokens(rig.n_vocab, TOKENS, 1)
    rig.engine.allocate(cells=5, block_size=16, type_k="q8_0", type_v="q4_0")
    turns = logits_in_turn(rig.engine, rig.n_vocab, tokens)
    rows = {begin + row: line.copy() for begin, part in turns for row, line in enumerate(part)}
    assert sorted(rows) == list(range(TOKENS))
    alone = np.empty((1, rig.n_vocab), np.float32)
    for length in (1, 17, 65, TOKENS):
        chunk = np.array([[length, 0, 1, 5, 0, 0]], np.int32)
        rig.engine.step(np.array(tokens[:length], np.int32), chunk, np.arange(5, dtype=np.int32), alone)
        assert (alone[0] == rows[length - 1]).all()


@pytest.mark.parametrize(("length", "most", "parts"), [(9, None, [4, 4]), (8, 1, [4]), (4, None, [4]), (3, None, [3])])
def test_texts_are_of_one_length(length: int, most: int | None, parts: list[int]) -> None:
    assert [len(part) for part in parts_of(range(length), 4, most)] == parts


# --- measuring ---


def values(runs: Sequence[Run], pair: Pair, key: str) -> list[float]:
    side = OURS if pair == JUDGED else str(pair)
    return [run.metrics[key] for run in runs if run.side == side and key in run.metrics]


async def test_every_pair_is_compared_and_timed(workload: KvTypes) -> None:
    view, runs = Said(), []
    await workload.measure(replace(SETUP, view=view), runs.append)
    said = view.lines
    assert len(said) == 9 * (2 + 2)
    assert said[0] == "1 of 36: text 1 of 2, f16/f16" and said[-1].startswith("36 of 36: speed, repeat 2 of 2, ")
    starts = [line.split(", ")[-1] for line in said[18:28:9]]
    assert starts == ["f16/f16", "f16/q8_0"], "repeats begin with another pair"
    for pair in PAIRS:
        assert values(runs, pair, "positions") == [2 * (TOKENS - 1)]
        assert (values(runs, pair, "mean_kl") == [0]) == (pair == REFERENCE)
        assert all(len(values(runs, pair, work.key)) == 2 for work in QUICK_WORKS)
    assert values(runs, REFERENCE, "same_top") == [1]
    divergences = [values(runs, Pair(name, name), "mean_kl")[0] for name in ("q8_0", "q4_0")]
    assert 0 < divergences[0] < divergences[1] < 0.1
    attention, n_layers = workload.model.spec.layers[0].attention, workload.model.spec.n_layers
    assert values(runs, Pair("q8_0", "q4_0"), "bytes_per_token") == [n_layers * attention.n_kv_heads * (34 + 18)]


def test_what_does_not_fit_is_left_out_by_name(workload: KvTypes, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = MemoryLimit("the machine", 1 << 24, 1 << 24, hard=False)
    monkeypatch.setattr(measuring, "read_memory_limits", lambda: [limit])
    works, notes = replace(workload, small=False)._that_fit()
    assert [work.key for work in works] == ["1x2048", "32x512"]
    assert any(note.startswith("left out: 32 streams at 2,048: K/V as f16 take 16 MiB") for note in notes)


async def test_an_interrupt_keeps_what_was_measured(workload: KvTypes) -> None:
    runs: list[Run] = []
    with pytest.raises(KeyboardInterrupt):
        await workload.measure(replace(SETUP, view=Said(stop="3 of")), runs.append)
    assert [values(runs, pair, "positions")[0] for pair in PAIRS] == [TOKENS - 1] * 2 + [0] * 7


# --- what is printed and written ---


def made(workload: KvTypes, speeds: Sequence[float] = (120.0, 130.0, 110.0)) -> Result:
    """f16/f16 does 100, 110 and 100 tokens a second."""
    quality = Comparison(positions=100, ours=300.0, theirs=299.0, same_top=97, divergence=1.5).metrics
    work = QUICK_WORKS[1].key
    runs = [Run(OURS, 0, {"bytes_per_token": 531, "of_f16": 0.531, **quality}, {"busy_percent_before": 40.0})]
    runs += [Run(OURS, repeat, {work: speed}) for repeat, speed in enumerate(speeds)]
    runs += [Run(str(REFERENCE), repeat, {work: speed}) for repeat, speed in enumerate((100.0, 110.0, 100.0))]
    return make_result(workload, SETUP, runs)


def test_a_pair_is_a_line_of_the_table(workload: KvTypes) -> None:
    result = made(workload)
    assert table_lines(result) == [
        ["q8_0/q8_0", "531", "0.531", "20.086", "+1.01%", "97.0%", "0.01500", "120 (1.16x)"],
        ["f16/f16", "", "", "", "", "", "", "100"],
    ]
    text = markdown(result)
    assert len({len(line) for line in text if line.startswith("|")}) == 1
    assert any("40 % busy" in line for line in text)


@pytest.mark.parametrize(("speeds", "verdict"), [((120, 130, 121), "met"), ((50, 55, 49), "not met")])
def test_verdicts(workload: KvTypes, speeds: Sequence[float], verdict: str) -> None:
    size, speed = verdict_lines(made(workload, speeds))
    assert size == "q8_0/q8_0: of f16: 0.531, must be <= 0.54: met"
    assert speed.startswith("q8_0/q8_0: 4 streams at 32: ") and speed.endswith(f", must be >= 1x: {verdict}")


# --- the command ---


def run(*arguments: str) -> Any:
    app = Typer()
    app.command()(kv_types)
    return CliRunner().invoke(app, arguments)


def test_the_whole_command(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "busy_percent", lambda: 3.0)
    file, directory = tmp_path / "out" / "pairs.json", tmp_path / "page"
    result = run("--model", str(tiny), "--quick", "--threads", "1", "--json", str(file), "--report", str(directory))
    assert result.exit_code == 0, result.output
    assert "mean nothing" in result.output
    content = json.loads(file.read_text())
    (workload,) = content["workloads"]
    found: dict[str, set[str]] = {}
    for each in workload["runs"]:
        found.setdefault(each["side"], set()).update(each["metrics"])
    assert set(found) == {OURS, *(str(pair) for pair in PAIRS if pair != JUDGED)}
    wanted = {"bytes_per_token", "perplexity", "mean_kl", *(work.key for work in QUICK_WORKS)}
    assert all(wanted <= keys for keys in found.values())
    assert content["settings"]["threads"] == workload["runs"][0]["facts"]["threads"] == 1
    html = (directory / "index.html").read_text()
    assert "q8_0/q4_0" in html and "Small sizes" in html and "tiny" in html


def test_texts_that_cannot_be_read(tiny: Path, tmp_path: Path) -> None:
    short, binary = tmp_path / "short.txt", tmp_path / "binary.txt"
    short.write_text("a word")
    binary.write_bytes(b"\xff\xfe\x00")
    for text, message in [
        (short, f"tokens long; give a text of at least {FEWEST}"),
        (binary, "is not UTF-8"),
        (tmp_path / "none.txt", "cannot read"),
    ]:
        result = run("--model", str(tiny), "--quick", "--text", str(text))
        assert isinstance(result.exception, BenchError) and message in str(result.exception)


def test_a_head_that_no_quantised_type_divides(tmp_path: Path) -> None:
    odd = write_model(tmp_path / "odd.gguf", n_embd=96, n_heads=2, n_kv_heads=2, head_dim=48)
    result = run("--model", str(odd), "--quick")
    assert result.exit_code == 1 and "head size of 48" in result.output

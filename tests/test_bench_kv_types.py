"""`cllm bench kv-types`: quality, speed and bytes of all pairs of K and V types."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

from cllm.bench.http import BenchError
from cllm.bench.kv_types.cli import FEWEST, kv_types
from cllm.errors import CLLMError
from cllm.machine import Room
from native_kit import write_model

native = pytest.importorskip("cllm._native", reason="the extension is not built")

from cllm.bench.kv_types import measure as measuring  # noqa: E402  (these need the extension)
from cllm.bench.kv_types import page, results  # noqa: E402
from cllm.bench.kv_types.measure import (  # noqa: E402
    PAIRS,
    QUICK_WORKS,
    REFERENCE,
    WORKS,
    Measured,
    OfPair,
    Pair,
    Subject,
)
from cllm.bench.kv_types.quality import Comparison, log_softmax, logits_in_turn, parts_of  # noqa: E402
from step_kit import Rig, random_tokens  # noqa: E402

TOKENS = 70


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_embd=64, n_heads=2, n_kv_heads=1, head_dim=32)


@pytest.fixture
def subject(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Subject:
    from cllm.models.gguf import GGUFModel

    monkeypatch.setattr(measuring, "busy_percent", lambda: 3.0)
    rig = Rig(tiny, threads=1)
    shape = GGUFModel.open(tiny).shape
    return Subject("tiny", rig.engine, shape, [random_tokens(shape.n_vocab, TOKENS, seed) for seed in (1, 2)])


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


def test_every_position_has_its_logits(subject: Subject) -> None:
    """As a prompt of that length would have them: all bits of them."""
    tokens = subject.texts[0]
    subject.engine.allocate(blocks=5, block_size=16, type_k="q8_0", type_v="q4_0")
    rows = {begin + row: line.copy() for begin, part in _turns(subject, tokens) for row, line in enumerate(part)}
    assert sorted(rows) == list(range(TOKENS))
    alone = np.empty((1, subject.shape.n_vocab), np.float32)
    for length in (1, 17, 65, TOKENS):
        chunk = np.array([[length, 0, 1, 5, 0, 0]], np.int32)
        subject.engine.step(np.array(tokens[:length], np.int32), chunk, np.arange(5, dtype=np.int32), alone)
        assert (alone[0] == rows[length - 1]).all()


def _turns(subject: Subject, tokens: Sequence[int]) -> Any:
    return logits_in_turn(subject.engine, subject.shape.n_vocab, tokens)


@pytest.mark.parametrize(("length", "most", "parts"), [(9, None, [4, 4]), (8, 1, [4]), (4, None, [4]), (3, None, [3])])
def test_texts_are_of_one_length(length: int, most: int | None, parts: list[int]) -> None:
    assert [len(part) for part in parts_of(range(length), 4, most)] == parts


# --- measuring ---


def test_every_pair_is_compared_and_timed(subject: Subject) -> None:
    said: list[str] = []
    found = measuring.measure(subject, QUICK_WORKS, repeats=2, progress=said.append)
    assert len(found.pairs) == 9 and len(said) == 9 * (2 + 2)
    assert said[0] == "1 of 36: text 1 of 2, f16/f16" and said[-1].startswith("36 of 36: speed, repeat 2 of 2, ")
    assert [line.split(", ")[-1] for line in said[18:28:9]] == ["f16/f16", "f16/q8_0"], (
        "repeats begin with another pair"
    )
    for pair, of in found.pairs.items():
        assert of.quality.positions == 2 * (TOKENS - 1)
        assert (of.quality.divergence == 0) == (pair == REFERENCE)
        assert {work: sorted(values) for work, values in of.speeds.items()} == {w.key: [0, 1] for w in QUICK_WORKS}
    assert found.pairs[REFERENCE].quality.agreement == 1
    divergences = {str(pair): of.quality.mean_divergence for pair, of in found.pairs.items()}
    assert 0 < divergences["q8_0/q8_0"] < divergences["q4_0/q4_0"] < 0.1
    shape = subject.shape
    assert found.pairs[Pair("q8_0", "q4_0")].bytes_per_token == shape.n_layers * shape.n_kv_heads * (34 + 18)


def test_what_does_not_fit_is_left_out_by_name(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "read_rooms", lambda: [Room("the machine", 1 << 24, 1 << 24, hard=False)])
    found = measuring.measure(subject, WORKS, repeats=0)
    assert [work.key for work in found.works] == ["1x2048", "32x512"]
    assert any(note.startswith("left out: 32 streams at 2,048: K/V as f16 take 16 MiB") for note in found.notes)


def test_an_interrupt_keeps_what_was_measured(subject: Subject) -> None:
    def stop(line: str) -> None:
        if line.startswith("3 of"):
            raise KeyboardInterrupt

    found = measuring.measure(subject, QUICK_WORKS, repeats=1, progress=stop)
    assert found.interrupted
    assert [of.quality.positions for of in found.pairs.values()] == [TOKENS - 1] * 2 + [0] * 7
    assert "interrupted: not all was measured" in results.table(found)


# --- what is printed and written ---


def made(speeds: Sequence[float] = (120.0, 130.0, 110.0)) -> Measured:
    """f16/f16 does 100, 110 and 100 tokens a second."""
    pairs = {pair: OfPair(1000) for pair in PAIRS}
    work = WORKS[1]
    pairs[REFERENCE].speeds[work.key] = {0: 100.0, 1: 110.0, 2: 100.0}
    pairs[results.JUDGED].speeds[work.key] = dict(enumerate(speeds))
    pairs[results.JUDGED].bytes_per_token = 531
    for of in pairs.values():
        of.quality = Comparison(positions=100, ours=300.0, theirs=299.0, same_top=97, divergence=1.5)
    return Measured("a model", "avx2", 2, [work], pairs)


def test_a_line_of_the_table() -> None:
    lines = results.lines(made())
    expected = ["q8_0", "q8_0", "531", "0.531", "20.086", "+1.01 %", "97.0 %", "0.01500", "120 tok/s (1.16x)"]
    assert lines[4] == expected
    assert lines[0][-1] == "100 tok/s (1.00x)" and lines[1][-1] == ""
    assert len(lines) == 9 and {len(line) for line in lines} == {len(results.headings(made()))}


@pytest.mark.parametrize(("speeds", "verdict"), [((120, 130, 110), "met"), ((50, 55, 49), "not met")])
def test_verdicts(speeds: Sequence[float], verdict: str) -> None:
    size, speed = results.verdict_lines(made(speeds))
    assert size == "q8_0/q8_0: bytes beside f16: 0.531, must be <= 0.54: met"
    assert speed.startswith("q8_0/q8_0: 32 streams at 512: ") and ", must be >= 1x: " + verdict in speed


def test_a_busy_machine_is_noted() -> None:
    found = made()
    assert not any("busy" in note for note in results.notes(found))
    found.busy_percent = 40
    assert "the machine was up to 40 % busy at rest: speeds are doubtful" in results.notes(found)


def test_plots_are_loss_and_speed_over_bytes() -> None:
    titles = [plot.title for plot in page.plots(made())]
    assert titles[:2] == ["Loss against bytes: perplexity", "Loss against bytes: mean KL from f16/f16"]
    assert titles[2:] == ["Speed against bytes: 32 streams at 512"]


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
    assert "small sizes: the figures above do not count" in result.output
    content = json.loads(file.read_text())
    assert [(pair["type_k"], pair["type_v"]) for pair in content["pairs"]] == [(p.type_k, p.type_v) for p in PAIRS]
    assert all(set(pair["tokens_per_s"]) == {work.key for work in QUICK_WORKS} for pair in content["pairs"])
    assert content["settings"]["threads"] == content["threads"] == 1
    html = (directory / "index.html").read_text()
    assert html.count("<svg") == 5 and "Small sizes" in html and "tiny" in html


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
    assert isinstance(result.exception, CLLMError) and "head size of 48" in str(result.exception)

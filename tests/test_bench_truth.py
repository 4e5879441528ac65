"""`cllm bench truth`: is the truth the truth, and is every side held against it?"""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

from cllm.bench.http import BenchError
from cllm.bench.truth import cli
from cllm.machine import Room
from cllm.models.gguf import GGUFModel
from native_kit import build_model, write_model
from step_kit import Rig, random_tokens

pytest.importorskip("cllm._native", reason="the extension is not built")

WORDS = " ".join(f"{chr(97 + number % 26)}{number}" for number in range(60))


def invoke(*arguments: str) -> Any:
    app = Typer()
    app.command()(cli.truth)
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(
    "options",
    [
        {"arch": "llama", "rope_scaling": "llama3"},
        {"arch": "llama", "biases": True, "tied": True, "rope_scaling": "linear"},
        {"arch": "qwen2"},
        {"arch": "qwen3", "head_dim": 32},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_the_truth_is_what_native_computes_with_exact_weights(options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from cllm.bench.truth.reference import Reference

    path = write_model(tmp_path / "model.gguf", weight_type="f32", **options)
    tokens = random_tokens(320, 50)
    rig = Rig(path, threads=1)
    expected = rig.all_logits(tokens, rig.table(50))
    found = Reference(GGUFModel.open(path), threads=1).logits(tokens)
    assert np.sqrt(np.square(found - expected).mean()) / expected.std() < 0.001


def test_the_command_holds_every_side_against_the_truth(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = write_model(tmp_path / "tiny.gguf", weight_type="q8_0", n_embd=128, tied=True)
    text, file = tmp_path / "text.txt", tmp_path / "t.json"
    text.write_text(WORDS)
    sets = ("--instruction-set", "generic")
    result = invoke("--model", str(model), "--text", str(text), "--quick", "--threads", "1", *sets, "--json", str(file))
    assert result.exit_code == 0, result.output
    saved = json.loads(file.read_text())
    sides = {(side["engine"], side["computed_with"], side["kv_type"]): side["mean_kl"] for side in saved["sides"]}
    native = {("native", "generic", kv_type) for kv_type in ("f16", "q8_0", "q4_0")}
    llama = {("llama.cpp", "flash attention on", kv_type) for kv_type in ("f16", "q8_0", "q4_0")}
    assert set(sides) == native | llama | {("llama.cpp", "flash attention off", "f16")}
    assert all(0 < divergence < 0.1 for divergence in sides.values())
    assert sides["native", "generic", "q4_0"] > 2 * sides["native", "generic", "f16"]
    assert saved["truth"]["perplexity"] == pytest.approx(saved["sides"][0]["perplexity"], rel=0.02)
    assert "do not count" in result.output and "mean KL" in result.output


def test_heads_that_no_quantised_type_fits_are_measured_with_f16_alone(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model, text = write_model(tmp_path / "tiny.gguf", n_embd=64), tmp_path / "text.txt"
    text.write_text(WORDS)
    result = invoke("--model", str(model), "--text", str(text), "--quick", "--instruction-set", "generic")
    assert result.exit_code == 0, result.output
    assert (
        "left out: quantised K/V: the head size, 16, is not a multiple of 32" in result.output
        and "q8_0" not in result.output
    )


def test_what_is_not_installed_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    text = tmp_path / "text.txt"
    text.write_text(WORDS)
    result = invoke("--model", str(write_model(tmp_path / "tiny.gguf")), "--text", str(text), "--quick")
    assert isinstance(result.exception, BenchError)
    assert "pip install torch 'transformers>=5,<6'" in str(result.exception)


def test_another_version_of_transformers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    from cllm.bench.truth.reference import Reference

    model = GGUFModel.open(write_model(tmp_path / "tiny.gguf"))
    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    with pytest.raises(BenchError, match=r"by transformers 5, and 4\.57\.1 is installed: pip install"):
        Reference(model, threads=1)


def test_heads_that_turn_in_part_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from cllm.bench.truth.reference import Reference

    model = GGUFModel.open(build_model().with_metadata(rope__dimension_count=8).write(tmp_path / "tiny.gguf"))
    with pytest.raises(BenchError, match="positions turn 8 of a head's 16 dimensions"):
        Reference(model, threads=1)


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cllm.bench.truth import measure

    model = GGUFModel.open(write_model(tmp_path / "tiny.gguf"))
    monkeypatch.setattr(measure, "read_rooms", lambda: [Room("the memory", 2 << 20, 1 << 20, hard=True)])
    monkeypatch.setattr(measure, "Reference", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(BenchError, match=r"tiny\.gguf: the truth takes \d+ MiB, .* more than the 1 MiB"):
        measure.measure(model, [list(range(300))], threads=1, instruction_sets=["generic"])


def test_one_engine_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cllm.bench.truth import measure

    alive: list[weakref.ref[Any]] = []

    class Loaded:
        def __init__(self, name: str) -> None:
            self.instruction_set = name

    def load(model: GGUFModel, *, threads: int, instruction_set: str) -> Loaded:
        assert not any(engine() for engine in alive)
        engine = Loaded(instruction_set)
        alive.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(measure, "load_engine", load)
    engines = measure._OneEngine(None, threads=1)  # type: ignore[arg-type]
    for name in ("avx2", "avx2", "generic", "avx2"):
        assert engines.of(name).instruction_set == name
    assert len(alive) == 3


def test_an_interrupted_run_says_how_far_each_side_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from cllm.bench.truth import measure, results

    model = GGUFModel.open(write_model(tmp_path / "tiny.gguf", n_embd=128))
    tokens = random_tokens(320, 40)

    def say(line: str) -> None:
        if line == "text 2 of 2: native, generic, K/V q8_0":
            raise KeyboardInterrupt

    found = measure.measure(model, [tokens, tokens], threads=1, instruction_sets=["generic"], say=say)
    notes = results.notes(found)
    assert notes[0].startswith("over 78 positions") and "interrupted: not all was measured" in notes
    assert "native, generic, K/V q8_0: over 39 positions only" in notes


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    result = invoke("--instruction-set", "mmx")
    assert isinstance(result.exception, BenchError) and "--instruction-set is mmx; this CPU has" in str(
        result.exception
    )


def test_some_parts_of_the_text_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[list[int]] = []

    def stop(model: GGUFModel, texts: list[list[int]], **_: Any) -> None:
        lengths.append([len(text) for text in texts])
        raise BenchError("enough")

    monkeypatch.setattr("cllm.bench.truth.measure.measure", stop)
    model, text = write_model(tmp_path / "tiny.gguf"), tmp_path / "text.txt"
    text.write_text(WORDS * 20)
    for arguments in ((), ("--parts", "2")):
        result = invoke("--model", str(model), "--text", str(text), *arguments)
        assert isinstance(result.exception, BenchError) and str(result.exception) == "enough"
    assert len(lengths[0]) > 2 and lengths[1] == [1024, 1024]

"""`cllm bench truth`: is the truth the truth, and is every side held against it?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

from cllm.bench.http import BenchError
from cllm.bench.truth import cli
from cllm.models.gguf import GGUFModel
from native_kit import write_model
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
    pytest.importorskip("llama_cpp")
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
    assert "left out: quantised K/V: heads of 16" in result.output and "q8_0" not in result.output


def test_what_is_not_installed_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    text = tmp_path / "text.txt"
    text.write_text(WORDS)
    result = invoke("--model", str(write_model(tmp_path / "tiny.gguf")), "--text", str(text), "--quick")
    assert isinstance(result.exception, BenchError)
    assert "pip install torch transformers" in str(result.exception)


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    result = invoke("--instruction-set", "mmx")
    assert isinstance(result.exception, BenchError) and "--instruction-set is mmx; this CPU has" in str(
        result.exception
    )

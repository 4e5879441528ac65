"""`cllm bench truth`: is the truth the truth, and is every side held against it?"""

from __future__ import annotations

import json
import sys
import weakref
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
from cllm_bench.live import View
from cllm_bench.quality import cli
from cllm_bench.run import make_result
from cllm_bench.workloads.base import Setup
from native_kit import build_model, write_model
from step_kit import Rig, random_tokens

pytest.importorskip("cllm._native", reason="the extension is not built")

SETUP = Setup(model="tiny", encode=str.encode, threads=1, repeats=1)
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
    from cllm_bench.quality.reference import Reference

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
    runs = [run for run in saved["workloads"][0]["runs"] if "way" in run["facts"]]
    sides = {
        (run["facts"]["engine"], run["facts"]["way"], run["facts"]["kv_type"]): run["metrics"]["mean_kl"]
        for run in runs
    }
    native = {("native", "generic", kv_type) for kv_type in ("f16", "q8_0", "q4_0")}
    llama = {("llama.cpp", "flash attention on", kv_type) for kv_type in ("f16", "q8_0", "q4_0")}
    assert set(sides) == native | llama | {("llama.cpp", "flash attention off", "f16")}
    assert all(0 < divergence < 0.1 for divergence in sides.values())
    assert sides["native", "generic", "q4_0"] > 2 * sides["native", "generic", "f16"]
    truth = saved["workloads"][0]["runs"][0]["metrics"]["perplexity"]
    assert truth == pytest.approx(runs[0]["metrics"]["perplexity"], rel=0.02)
    assert "mean nothing" in result.output and "mean KL" in result.output


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


def test_another_version_of_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers, "__version__", "4.57.1")
    with pytest.raises(BenchError, match=r"needs transformers 5; 4\.57\.1 is installed: .*pip install"):
        cli.check_installed()


def test_heads_that_turn_in_part_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from cllm_bench.quality.reference import Reference

    model = GGUFModel.open(build_model().with_metadata(rope__dimension_count=8).write(tmp_path / "tiny.gguf"))
    with pytest.raises(BenchError, match="turn whole heads"):
        Reference(model, threads=1)


async def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cllm_bench.workloads import truth

    model = GGUFModel.open(write_model(tmp_path / "tiny.gguf"))
    monkeypatch.setattr(truth, "read_memory_limits", lambda: [MemoryLimit("the memory", 2 << 20, 1 << 20, hard=True)])
    monkeypatch.setattr(truth, "Reference", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(BenchError, match=r"tiny\.gguf: the truth takes \d+ MiB, .* more than the 1 MiB"):
        await truth.Truth(model, [list(range(300))], ["generic"]).measure(SETUP, [].append)


def test_one_engine_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cllm_bench.workloads import truth

    alive: list[weakref.ref[Any]] = []

    class Loaded:
        def __init__(self, name: str) -> None:
            self.instruction_set = name

    def load(model: GGUFModel, *, threads: int, instruction_set: str) -> Loaded:
        assert not any(engine() for engine in alive)
        engine = Loaded(instruction_set)
        alive.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(truth, "load_engine", load)
    engines = truth._LoadedEngine(None, threads=1)  # type: ignore[arg-type]
    for name in ("avx2", "avx2", "generic", "avx2"):
        assert engines.of(name).instruction_set == name
    assert len(alive) == 3


async def test_an_interrupted_run_says_how_far_each_side_came(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from cllm_bench.workloads.truth import Truth

    class Interrupted(View):
        def say(self, line: str) -> None:
            if line == "text 2 of 2: native, generic, K/V q8_0":
                raise KeyboardInterrupt

    tokens = random_tokens(320, 40)
    workload = Truth(GGUFModel.open(write_model(tmp_path / "tiny.gguf", n_embd=128)), [tokens, tokens], ["generic"])
    setup, runs = replace(SETUP, view=Interrupted()), []
    with pytest.raises(KeyboardInterrupt):
        await workload.measure(setup, runs.append)
    notes = make_result(workload, setup, runs).notes
    assert notes[0].startswith("over 78 positions")
    assert "native, generic, K/V q8_0: over 39 positions only" in notes


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    result = invoke("--instruction-set", "mmx")
    assert isinstance(result.exception, BenchError) and "--instruction-set is mmx; this CPU has" in str(
        result.exception
    )


def test_some_parts_of_the_text_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[list[int]] = []

    def stop(workload: Any, *_: Any) -> int:
        lengths.append([len(text) for text in workload.texts])
        return 0

    monkeypatch.setattr(cli, "_run", stop)
    monkeypatch.setattr(cli, "check_installed", lambda: None)
    model, text = write_model(tmp_path / "tiny.gguf"), tmp_path / "text.txt"
    text.write_text(WORDS * 20)
    for arguments in ((), ("--parts", "2")):
        assert invoke("--model", str(model), "--text", str(text), *arguments).exit_code == 0
    assert len(lengths[0]) > 2 and lengths[1] == [1024, 1024]

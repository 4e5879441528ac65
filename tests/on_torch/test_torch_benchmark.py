"""The workloads `torch*` on the CPU with a tiny model: everything that needs no GPU runs, and says what it found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cllm.cli import main


def run_benchmark(path: Path, name: str, *more: str) -> tuple[int, dict[str, Any]]:
    options = ["--quick", "--set", "backend.torch.device=cpu", "--json", str(path), *more]
    with pytest.raises(SystemExit) as end:
        main(["bench", name, *options])
    assert isinstance(end.value.code, int)
    return end.value.code, json.loads(path.read_text())


def measured(path: Path, name: str) -> dict[str, dict[str, float]]:
    """The metrics of each side."""
    code, report = run_benchmark(path, name)
    assert code == 0 and report["failures"] == {}
    return {run["side"]: run["metrics"] for run in report["workloads"][0]["runs"]}


def test_the_engine_and_the_server_are_measured(tmp_path: Path) -> None:
    ours = measured(tmp_path / "torch.json", "torch")["ours"]
    assert ours["times_computed"] == 1.0
    speeds = [value for key, value in ours.items() if key.endswith("_tokens_per_s")]
    assert len(speeds) == 8 and all(speed > 0 for speed in speeds)
    assert ours["http_share"] > 0 and ours["attention_share"] > 0 and "fp8_one_times" not in ours


def test_the_invariant_mode_gives_the_same_answers(tmp_path: Path) -> None:
    sides = measured(tmp_path / "invariance.json", "torch-invariance")
    assert sides["ours"]["different"] == 0 and sides["ours"]["preemptions"] > 0
    assert all(side["many_tokens_per_s"] > 0 for side in sides.values()) and len(sides) == 2


def test_host_memory_saves_prompts(tmp_path: Path) -> None:
    sides = measured(tmp_path / "host.json", "torch-host")
    assert sides["ours"]["loads"] > 0 and sides["ours"]["cached_percent"] > 50
    assert sides["computed again"]["cached_percent"] == 0 and sides["computed again"]["loads"] == 0
    assert all(side["gap_p99_ms"] > 0 for side in sides.values())


def test_what_fails_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run_benchmark(
        tmp_path / "failed.json", "torch-invariance", "--set", "resources.kv_cache_max_memory_mb=0.001"
    )
    assert code == 1 and "torch-invariance" in next(iter(report["failures"]))

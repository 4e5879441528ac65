"""`cllm_bench.torch_gpu` on the CPU with a tiny model: every section that needs no GPU runs, and says what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run_benchmark(path: Path, only: str, *more: str) -> tuple[int, str, dict[str, Any]]:
    command = [sys.executable, "-m", "cllm_bench.torch_gpu", "--shape", "tiny", "--device", "cpu", "--only", only]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [*command, "--json", str(path), *more],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout + done.stderr, json.loads(path.read_text())


def test_every_section_measures(tmp_path: Path) -> None:
    code, said, report = run_benchmark(tmp_path / "all.json", "kernels,attention,8B,structured,http,invariance,host")
    assert report["errors"] == {}, said
    assert code == 0
    found = report["measures"]
    assert found["kernels"]["wrong"] == []
    assert found["8B shared prompt"]["times_computed"] == 1.0
    for name in (
        "8B one stream",
        "8B many",
        "8B prefill",
        "8B over HTTP",
        "8B 32 streams by a schema",
        "invariant many",
    ):
        assert found[name]["tokens_per_s"] > 0
    assert found["invariant alone"]["different"] == found["invariant in a small pool"]["different"] == 0
    assert found["invariant in a small pool"]["preemptions"] > 0
    assert found["fast against invariant"]["agreement_percent"] >= 99
    assert found["turns through the host"]["loads"] > 0 and found["turns computed again"]["cached_share"] == 0
    assert found["invariant turns through the host"]["different"] == 0
    assert found["8B over HTTP"]["events_per_token"] > 0.9
    not_measured = [row[0] for row in report["table"] if row[3] == "not measured"]
    assert len(not_measured) == 4  # fp8, both of 1B, and the GPU's idle time
    assert "| work" in said


def test_a_section_that_fails_takes_nothing_from_the_others(tmp_path: Path) -> None:
    code, said, report = run_benchmark(tmp_path / "some.json", "1B,attention", "--set", "scheduler.max_running=0")
    assert code == 1
    assert list(report["errors"]) == ["1B"]
    assert "scheduler.max_running" in report["errors"]["1B"]
    assert "1B: FAILED" in said
    assert report["measures"]["attention"]["tb_per_s"] > 0


def test_waiting_is_what_is_longer_than_a_gap_between_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from cllm_bench.torch_gpu.idle import gaps_of, read_spans, without_ends

    # Two steps of 100 us with a gap of 1 us inside, one kernel beside others, and 25 us of waiting between them.
    spans = [(0.0, 50.0), (10.0, 20.0), (51.0, 100.0), (125.0, 175.0), (176.0, 225.0)]
    events = [{"cat": "kernel", "ts": start, "dur": end - start} for start, end in reversed(spans)]
    others: list[dict[str, Any]] = [{"cat": "cpu_op", "ts": 100.0, "dur": 25.0}, {"ph": "M"}]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events + others}))
    assert read_spans(tmp_path / "trace.json") == spans
    assert without_ends([(float(at), at + 0.5) for at in range(11)]) == [(float(at), at + 0.5) for at in range(2, 9)]
    found = gaps_of(spans, step_s=112.5e-6)
    assert found["idle_percent"] == pytest.approx(100 * 25 / 225)
    assert found["idle_percent_with_gaps_in_steps"] == pytest.approx(100 * 27 / 225)
    assert found["waits_per_step"] == pytest.approx(0.5)

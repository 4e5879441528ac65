"""`cllm bench kv-bytes`: is what it reckons what the cache does, and what a server says?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench_kit import bench
from cllm.kv.groups import LayerKV, LayerState, plan_groups
from cllm_bench.kernels.shapes import MIXES
from cllm_bench.random_model import write
from cllm_bench.workloads.kv_bytes import KvBytes, of_report, reckon
from layered_kit import TINY_SHAPES
from thorough import slow

BLOCK = 256
FULL, WINDOW, STATE = LayerKV(0, 0, BLOCK), [LayerKV(n, 64, BLOCK) for n in (1, 2, 3)], LayerState(4, (BLOCK,) * 5)


def test_full_layers_keep_all_and_others_what_they_need() -> None:
    layout = plan_groups([FULL, *WINDOW], 16, apart=True, states=[STATE])
    short, long = (reckon(layout, tokens) for tokens in (800, 4800))
    assert [each.taken["full"] for each in (short, long)] == [800 // 16 * BLOCK, 4800 // 16 * BLOCK]
    assert short.taken["window"] == long.taken["window"]
    assert 64 // 16 * 3 * BLOCK <= long.taken["window"] <= (64 // 16 + 2) * 3 * BLOCK
    assert short.taken["state"] == long.taken["state"] >= 5 * BLOCK
    assert sorted(long.in_prompt) == list(long.in_prompt) and max(long.in_prompt) >= 4800 - 512
    assert max(long.in_prompt.values()) >= sum(long.taken.values())


def test_a_plain_model_takes_what_its_tokens_take() -> None:
    assert reckon(plan_groups([FULL], 16, apart=True), 1600).taken == {"full": 100 * BLOCK}


def test_what_a_server_says_is_in_bytes() -> None:
    groups = [{"kind": "full", "used": 3, "block_bytes": 10}, {"kind": "window", "used": 2, "block_bytes": 60}]
    report = {"groups": groups, "details": {"running": [{"computed": 48}]}}
    assert of_report(report) == ({"full": 30, "window": 120}, 48)
    for running in ([], [{"computed": 0}], [{"computed": 1}, {"computed": 1}]):
        assert of_report({"groups": groups, "details": {"running": running}}) is None
    assert of_report({}) is None


@slow
def test_a_server_takes_what_was_reckoned(tmp_path: Path) -> None:
    pytest.importorskip("cllm._native", reason="the extension is not built")
    model = write(tmp_path / "tiny.gguf", TINY_SHAPES["gemma3"], MIXES["q8_0"], "tiny")
    file = tmp_path / "k.json"
    assert bench("kv-bytes", "--model", str(model), "--quick", "--against", "none", "--json", str(file)) == 0
    rows = {row["key"]: row["ours"] for row in json.loads(file.read_text())["workloads"][0]["rows"]}
    assert rows["server_over_reckoned"]["median"] == pytest.approx(1.0, rel=0.3)  # its numbers come a moment later
    assert rows["window_growth"]["median"] == 1.0 and rows["of_all_full"]["median"] < 0.25
    assert rows.keys() == {figure.key for figure in KvBytes().all_figures}

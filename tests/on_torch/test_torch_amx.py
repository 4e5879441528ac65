"""A machine on which torch dies with AMX computes without it."""

from __future__ import annotations

import os

import pytest

from cllm.backends.torch import amx


@pytest.mark.parametrize(("dies", "limit"), [(True, "AVX512_CORE_FP16"), (False, None)])
def test_amx_is_left_out_only_where_a_trial_dies(
    dies: bool, limit: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(amx, "cpu_features", lambda: frozenset({"avx2", "amx_bf16"}))
    monkeypatch.setattr(amx, "_TRIAL", "import os; os.abort()" if dies else "pass")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    amx.avoid_broken_amx.__wrapped__()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2" and not caplog.messages, "what the user says counts"
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    amx.avoid_broken_amx.__wrapped__()
    assert os.environ.pop("ONEDNN_MAX_CPU_ISA", None) == limit
    assert any("torch crashes with AMX" in line for line in caplog.messages) == dies


def test_without_amx_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "cpu_features", lambda: frozenset({"avx2", "amx_tile"}))
    monkeypatch.setattr(amx, "_TRIAL", "import os; os.abort()")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    amx.avoid_broken_amx.__wrapped__()
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ

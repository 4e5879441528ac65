"""For caches on disk: a small model whose K/V is worth loading."""

from __future__ import annotations

from pathlib import Path

import pytest

from cllm.kv.tiers.disk_tier import DiskTier
from native_disk import slow
from native_kit import write_model


@pytest.fixture
def loading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model this small is computed faster than any disk is read."""
    monkeypatch.setattr(DiskTier, "compute_seconds", slow)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=4, head_dim=32, weight_type="q8_0")

"""A hub on this machine, and nothing of the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hub_kit import FILES, Hub, run_hub, use


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """With one repository, and a cache of our own."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("CLLM_CACHE_DIR", str(tmp_path / "cache"))
    with run_hub(repositories={"org/repo": dict(FILES)}) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        use(monkeypatch, running.url)
        yield running

"""A browser with a clean window, where the keys are kept, and the same tests once more on a cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser_kit import Browser, browsing
from cluster_kit import LocalCluster, ScriptedCluster
from thorough import EXHAUSTIVE, exhaustive, slow

ON_A_CLUSTER = {
    "test_http_anthropic": None,
    "test_http_cllm": ".*",
    "test_http_completing": ".*",
    "test_http_errors": ".*(fail|crash|request_id)",
    "test_http_exactness": ".*(empty|usage|ids)",
    "test_http_hints": None,
    "test_http_ollama": None,
    "test_http_openai": ".*",
    "test_http_progress": ".*",
    "test_http_reading": ".*",
    "test_http_responses": None,
    "test_http_structured": ".*",
    "test_http_tokens": None,
    "test_http_tools": ".*(call|log_prob)",
    "test_http_window": None,
    "test_key_rights": None,
    "test_same_prompt_in_every_api": None,
    "test_sampling_defaults": None,
    "test_tenants": ".*(another_key|at_once|makes_room|counts)",
    "test_warm": ".*",
}
"""Modules whose tests also run against an ingress with a replica (`cluster_kit`): the same answers, errors and headers.
Those whose names match do in `make test-slow`. The others are about what an ingress and a single server have in common:
`make test-exhaustive` runs them."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module = metafunc.module.__name__
    if module not in ON_A_CLUSTER or metafunc.definition.get_closest_marker("single") is not None:
        return
    always = ON_A_CLUSTER[module]
    if always is not None and re.match(always, metafunc.function.__name__):
        metafunc.parametrize("served_by", ["single", pytest.param("cluster", marks=slow)], indirect=True)
    elif EXHAUSTIVE:
        metafunc.parametrize("served_by", ["single", pytest.param("cluster", marks=exhaustive)], indirect=True)


@pytest.fixture(autouse=True)
def served_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if getattr(request, "param", "single") == "cluster":
        for name, kind in {"AsyncLLM": LocalCluster, "ScriptedLLM": ScriptedCluster}.items():
            monkeypatch.setattr(request.module, name, kind, raising=False)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """A clean window: nothing stored, nothing in the console."""
    chromium.size(1280, 900)
    chromium.emulate()
    chromium.driver.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": "*", "storageTypes": "all"})
    chromium.complaints()
    yield chromium
    chromium.open("about:blank")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"

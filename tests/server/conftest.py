"""A browser with a clean window, and where the keys are kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from browser_kit import Browser, browsing


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

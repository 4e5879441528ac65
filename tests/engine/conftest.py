"""Both layouts of the KV cache."""

from __future__ import annotations

import pytest

from engine_kit import LAYOUTS


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)

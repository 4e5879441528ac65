"""How much of a long search a run makes. `make test` takes samples of it; `make test-exhaustive` tries everything.

Tests that search are marked `exhaustive`. With CLLM_TESTS=exhaustive they leave nothing out; what cannot be sampled,
such as a build with sanitizers, is skipped without it.
"""

from __future__ import annotations

import os

import pytest

EXHAUSTIVE = os.environ.get("CLLM_TESTS") == "exhaustive"

exhaustive = pytest.mark.exhaustive
only_exhaustive = [exhaustive, pytest.mark.skipif(not EXHAUSTIVE, reason="make test-exhaustive runs it")]

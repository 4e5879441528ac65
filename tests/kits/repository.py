"""Where things are in this repository, for tests that read its files or start its scripts."""

from __future__ import annotations

from pathlib import Path

KITS = Path(__file__).resolve().parent
TESTS = KITS.parent
ROOT = TESTS.parent
DATA = TESTS / "data"

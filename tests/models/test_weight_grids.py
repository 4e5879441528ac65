"""The native engine's tables of codes are those of the package gguf."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "weight_grids.py"


def test_the_file_is_what_its_script_writes() -> None:
    assert subprocess.run([sys.executable, str(SCRIPT), "--check"], check=False).returncode == 0, f"run {SCRIPT}"

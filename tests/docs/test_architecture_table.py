"""The table of architectures in docs/backends.md says what the models of the tests need."""

from __future__ import annotations

import subprocess
import sys

from repository import ROOT


def test_the_table_is_that_of_the_models() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "architecture_table.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0, "run python scripts/architecture_table.py"

"""The table of docs/clients.md says what is tested, whether or not the clients are installed."""

from __future__ import annotations

import subprocess
import sys

from repository import ROOT

SCRIPT = ROOT / "scripts" / "client_table.py"


def test_the_table_is_that_of_the_tests() -> None:
    command = [sys.executable, str(SCRIPT), "--check"]
    assert subprocess.run(command, check=False).returncode == 0, "run python scripts/client_table.py"


def test_no_file_of_tests_is_forgotten() -> None:
    named = SCRIPT.read_text(encoding="utf-8")
    files = sorted((ROOT / "tests" / "clients").glob("test_*.py"))
    assert len(files) > 8
    for file in files:
        client = file.stem.removeprefix("test_")
        assert client == "examples" or f'"{client}"' in named

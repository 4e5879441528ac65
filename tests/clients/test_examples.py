"""The examples of docs/clients.md, run as they stand there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from clients_kit import ServedModel
from npm_kit import node_environment

pytestmark = pytest.mark.model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
FENCE = re.compile(r"^```(python|js)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = FENCE.findall(PAGE.read_text(encoding="utf-8"))
PYTHON = [code for language, code in EXAMPLES if language == "python"]
(NODE,) = (code for language, code in EXAMPLES if language == "js")


def for_this_server(code: str, served: ServedModel) -> str:
    assert "http://localhost:8000" in code and 'none"' in code
    return code.replace("http://localhost:8000", served.url).replace('none"', f'{served.key}"')


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_an_example_runs(served: ServedModel, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": f"example_{number}"}
    exec(compile(for_this_server(PYTHON[number], served), PAGE.name, "exec", dont_inherit=True), names)
    assert capsys.readouterr().out.strip()


@pytest.mark.skipif(not shutil.which("npm"), reason="node and npm are not on this machine")
def test_the_example_for_node_runs(served: ServedModel, pytestconfig: pytest.Config) -> None:
    environment = node_environment(pytestconfig)
    command = ["node", "-e", for_this_server(NODE, served)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0 and ran.stdout.strip(), ran.stderr

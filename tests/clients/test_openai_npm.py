"""openai from npm, in a process of node's."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from clients_kit import ServedModel
from npm_kit import node_environment
from server_process import until

CLIENT = "openai (npm)"
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        not (shutil.which("node") and shutil.which("npm")), reason="node and npm are not on this machine"
    ),
]


@pytest.fixture(scope="module")
def outcomes(served: ServedModel, pytestconfig: pytest.Config) -> dict[str, Any]:
    """What became of each feature."""
    script = Path(__file__).with_name("openai_npm.cjs")
    command = ["node", str(script), served.openai, served.key]
    environment = node_environment(pytestconfig)
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return {line["feature"]: line for line in map(json.loads, ran.stdout.splitlines())}


def test_chat(outcomes: dict[str, Any]) -> None:
    """chat"""
    assert outcomes["chat"]["ok"], outcomes["chat"]["error"]


def test_stream(outcomes: dict[str, Any]) -> None:
    """chat, streamed, with usage at the end"""
    assert outcomes["stream"]["ok"], outcomes["stream"]["error"]


def test_tool(outcomes: dict[str, Any]) -> None:
    """tools: required"""
    assert outcomes["tools"]["ok"], outcomes["tools"]["error"]


def test_runner(outcomes: dict[str, Any]) -> None:
    """`runTools`: a named tool, called, its result back"""
    assert outcomes["runner"]["ok"], outcomes["runner"]["error"]


def test_json_schema(outcomes: dict[str, Any]) -> None:
    """structured output: json_schema"""
    assert outcomes["schema"]["ok"], outcomes["schema"]["error"]


def test_embeddings(outcomes: dict[str, Any]) -> None:
    """embeddings"""
    assert outcomes["embeddings"]["ok"], outcomes["embeddings"]["error"]


def test_responses(outcomes: dict[str, Any]) -> None:
    """Responses, whole and streamed"""
    assert outcomes["responses"]["ok"], outcomes["responses"]["error"]


def test_errors(outcomes: dict[str, Any]) -> None:
    """errors of the client's own types: 400, 401, 404"""
    assert outcomes["errors"]["ok"], outcomes["errors"]["error"]


def test_cancel(served: ServedModel, outcomes: dict[str, Any]) -> None:
    """a stream that is left ends at once"""
    assert outcomes["cancel"]["ok"], outcomes["cancel"]["error"]
    until(served.idle)

"""Does the API's own description tell the truth? schemathesis reads it, sends what it allows and what it forbids, and
compares: what is allowed must be taken, what is forbidden refused, and every answer described."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from cllm.config import Config
from cllm.llm import AsyncLLM
from cllm.server.app import create_app
from cllm.server.http.connection import Connection
from cllm.server.http.connections import Connections
from repository import KITS
from thorough import EXHAUSTIVE, exhaustive, slow

# A request that passes the deadline it asked for was taken; 408 is its answer. What is too short to be pinned gets 409.
SETTINGS = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "404", "408", "409"]
"""
# Every field of their bodies, or almost, is that of another endpoint, and tried there.
ALIKE = (
    *("/generate", "/generate_stream", "/v1/messages/count_tokens", "/apply-template", "/v1/chat/completions/render"),
    *("/v1/responses", "/api/generate", "/benchmark"),
)
SETTINGS += "".join(f'\n[[operations]]\ninclude-path = "{path}"\nphases.coverage.enabled = false\n' for path in ALIKE)


@pytest.fixture
def url() -> Iterator[str]:
    """A real server on the fake backend, in a thread."""
    config = Config.model_validate({"backend": {"type": "fake"}, "log": {"level": "error"}})
    protocol: Any = partial(Connection, Connections(config.server))
    app = create_app(AsyncLLM(config), config)
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, port=0, log_level="error"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@exhaustive
@slow
def test_the_description_is_true(url: str, tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(SETTINGS)
    phases, examples = ("examples,coverage,fuzzing", 5) if EXHAUSTIVE else ("examples,fuzzing", 2)
    command = f"run {url}/openapi.json --phases {phases} --max-examples {examples} --seed 1"
    quiet = "--exclude-path /v1/rerank "  # for which a model needs a head
    quiet += "--generation-deterministic --no-color --continue-on-failure --request-timeout 60"
    hooks = KITS / "schemathesis_hooks.py"
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", *command.split(), *quiet.split()],
        cwd=tmp_path,
        env={**os.environ, "SCHEMATHESIS_HOOKS": str(hooks)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

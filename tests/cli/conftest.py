"""Commands that run in the process of the tests."""

from __future__ import annotations

import io
import logging
import os
import signal
from collections.abc import Iterator

import pytest

from cli_kit import Here, Result
from cllm.cli import main
from cllm.observe.log import stop_logging


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Here]:
    """Run a command in this process: what a user would see of it, but faster."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    for name in list(os.environ):
        if name.startswith("CLLM_"):
            monkeypatch.delenv(name)

    def run(*args: str, stdin: str = "", **env: str) -> Result:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as caught:
            for name, value in env.items():
                patch.setenv(name, value)
            main(args)
        stop_logging()
        assert isinstance(caught.value.code, int)
        return Result(caught.value.code, *capsys.readouterr())

    yield run
    signal.signal(signal.SIGTERM, on_sigterm)
    logging.getLogger("cllm").setLevel(logging.NOTSET)

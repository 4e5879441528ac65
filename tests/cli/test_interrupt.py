"""Ctrl-C while a command starts: it ends, and prints nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from cli_kit import Here, environment

# Sends itself SIGINT when the module of that name is first looked for, as Ctrl-C would at that moment.
INTERRUPTED = """
import os, runpy, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == WHEN:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["cllm", *ARGS]
runpy.run_module("cllm", run_name="__main__")
"""


def interrupted(when: str, *args: str) -> subprocess.CompletedProcess[str]:
    code = f"WHEN, ARGS = {when!r}, {args!r}\n{INTERRUPTED}"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=environment()
    )


@pytest.mark.parametrize(
    "when",
    ["cllm.cli", "typer", "cllm.cli.stdio", "cllm.observe.json_option", "cllm.cli.models", "cllm_bench.simulate.cli"],
)
def test_while_the_command_line_is_imported(when: str) -> None:
    done = interrupted(when, "generate", "--backend", "fake", "hi")
    assert done.returncode == -signal.SIGINT
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("when", ["cllm.config", "pydantic", "numpy", "cllm.llm", "cllm.backends.fake"])
def test_while_a_command_imports_what_it_needs(when: str) -> None:
    done = interrupted(when, "generate", "--backend", "fake", "hi")
    assert done.returncode == 128 + signal.SIGINT
    assert (done.stdout, done.stderr) == ("", "")


def wrap_an_interrupt(*_: object) -> None:
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt as error:
        raise ValueError('Error building "model" validator: KeyboardInterrupt:') from error


def name_an_interrupt(*_: object) -> None:
    raise ValueError('Error building "model" validator: KeyboardInterrupt:')


@pytest.mark.parametrize("failing", [wrap_an_interrupt, name_an_interrupt])
def test_a_library_that_makes_an_error_of_it(failing: object, monkeypatch: pytest.MonkeyPatch, here: Here) -> None:
    monkeypatch.setattr("cllm.cli.config.load_settings", failing)
    result = here("config", "show")
    assert (result.returncode, result.stderr) == (130, "")

"""Commands of `cllm`: in this process, or in one of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

COMMAND = [sys.executable, "-m", "cllm"]
FAKE = ["--backend", "fake"]
READY = re.compile(r"cLLM is ready: (http://\S+) \((\S+), (\S+)\)\n")
LIMIT_S = 60


@dataclass
class Result:
    returncode: int
    stdout: str
    stderr: str


Here = Callable[..., Result]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("CLLM_")}


def process(*args: str, stdin: int | None = None, text: bytes | None = None) -> Result:
    """Run a command in a process of its own."""
    done = subprocess.run(
        [*COMMAND, *args], stdin=stdin, input=text, capture_output=True, timeout=LIMIT_S, env=environment()
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


@contextmanager
def running(*args: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended for sure; its three streams are pipes."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*COMMAND, *args], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment()
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def wait_ready(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None and server.stderr is not None
    line = server.stdout.readline()
    found = READY.fullmatch(line)
    assert found, f"not ready: {line!r} {server.stderr.read() if server.poll() is not None else ''}"
    return found[1]

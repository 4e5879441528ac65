"""Real processes whose standard files are closed, have nobody at the other end, or somebody who does not read."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from cllm.cli.http_server import ONE_SIGNAL_S
from thorough import EXHAUSTIVE, exhaustive, slow, some

pytestmark = slow

COMMAND = [sys.executable, "-m", "cllm"]
FAKE = ["--backend", "fake"]
SERVE = [*COMMAND, "serve", *FAKE, "--port", "0"]
LIMIT_S = 120


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("CLLM_")}


@contextmanager
def started(command: list[str], **options: object) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL, **options) as child:  # type: ignore[call-overload]
        try:
            yield child
        finally:
            child.kill()


@contextmanager
def full_pipe() -> Iterator[int]:
    """The end to write to of a pipe that nobody reads and that takes nothing more."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        for size in (1 << 16, 1):
            with pytest.raises(BlockingIOError):
                while True:
                    os.write(writing, b"x" * size)
        os.set_blocking(writing, True)
        yield writing
    finally:
        os.close(reading)
        os.close(writing)


@contextmanager
def broken_pipe() -> Iterator[int]:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        yield writing
    finally:
        os.close(writing)


def port_of(child: subprocess.Popen[bytes]) -> int:
    """Where the child listens, by what the kernel knows of it: nothing it prints can be relied upon here."""
    import psutil

    process = psutil.Process(child.pid)
    while child.poll() is None:
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                return int(connection.laddr.port)
        time.sleep(0.02)  # asked all the time, the kernel would have no time left for the child
    raise AssertionError(f"ended with {child.returncode}")


def complete(port: int) -> None:
    body = {"model": "fake", "prompt": "hello", "max_tokens": 2}
    httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=LIMIT_S).raise_for_status()


# -- nobody reads --------------------------------------------------------------------------------------------------


@exhaustive
@pytest.mark.parametrize(
    ("blocked", "number"),
    some(itertools.product(("stdout", "stderr", "both"), (signal.SIGTERM, signal.SIGINT)), 5),
)
def test_a_server_whose_lines_nobody_reads_serves_and_ends(blocked: str, number: signal.Signals) -> None:
    with full_pipe() as pipe:
        files = {name: pipe if blocked in (name, "both") else subprocess.DEVNULL for name in ("stdout", "stderr")}
        with started([*SERVE, "--set", "log.level=debug"], **files) as server:
            port = port_of(server)
            for _ in range(5):
                complete(port)
            server.send_signal(number)
            assert server.wait(LIMIT_S) == 0


def test_a_second_signal_ends_a_server_whose_log_nobody_reads() -> None:
    slow = ["--set", "backend.fake.latency_ms=20", "--set", "server.shutdown_grace_s=600"]
    body = {"model": "fake", "prompt": "hello", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    with full_pipe() as pipe, started([*SERVE, *slow], stdout=subprocess.DEVNULL, stderr=pipe) as server:
        url = f"http://127.0.0.1:{port_of(server)}"
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT_S) as reply:
            lines = reply.iter_lines()  # held: a connection whose lines nobody wants any more is closed
            next(lines)
            server.send_signal(signal.SIGTERM)
            wait_until_closing(url)
            time.sleep(2 * ONE_SIGNAL_S)  # sooner, it would count as the same one
            server.send_signal(signal.SIGTERM)
            assert server.wait(LIMIT_S) == 128 + signal.SIGTERM


def wait_until_closing(url: str) -> None:
    with suppress(httpx.TransportError):
        while httpx.get(f"{url}/ready", timeout=LIMIT_S).status_code == 200:
            time.sleep(0.02)


def test_lines_that_are_lost_are_counted_when_somebody_reads_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import logging, os, sys\n"
        "from cllm.config import LogConfig\n"
        "from cllm.observe import log, log_writer\n"
        "log_writer.MAX_WAITING_CHARS = 10_000\n"
        "log.setup_logging(LogConfig())\n"
        "for i in range(3000): logging.getLogger('cllm').info('line %d of many', i)\n"
        "print('logged', flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, str(script)], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        try:
            assert child.stdout and child.stderr and child.stdin
            assert child.stdout.readline() == "logged\n"
            lines = []
            while not lines or "dropped here" not in lines[-1]:  # it comes by itself, with no line after it
                lines.append(child.stderr.readline())
                assert lines[-1], lines[-3:]
            child.stdin.close()
            lines += child.stderr.readlines()
            assert child.wait(LIMIT_S) == 0
        finally:
            child.kill()
    lost = sum(int(found[1]) for line in lines if (found := re.search(r"warning (\d+) log lines were dropped", line)))
    assert lost > 0
    assert lost + sum("of many" in line for line in lines) == 3000


def test_a_command_stuck_in_printing_ends_on_a_signal() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with full_pipe() as pipe, started([*COMMAND, "generate", *FAKE, "hi"], stdout=pipe, stderr=pipe) as child:
            wait_until_blocked(child)
            child.send_signal(number)
            assert child.wait(LIMIT_S) == 128 + number


def wait_until_blocked(child: subprocess.Popen[bytes]) -> None:
    """Until its main thread is inside a write to a pipe."""
    deadline = time.monotonic() + LIMIT_S / 4
    while child.poll() is None:
        if "pipe" in Path(f"/proc/{child.pid}/wchan").read_text():
            return
        if time.monotonic() > deadline:
            pytest.skip("this kernel does not tell where a process waits")
        time.sleep(0.02)
    raise AssertionError(f"ended with {child.returncode}")


# -- nobody is there -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["--version"],
        ["config", "show"],
        ["config", "show", "--json", "-"],
        ["generate", *FAKE, "hi", "-n", "3"],
        ["generate", *FAKE, "hi", "-n", "2000"],
        ["bench", "micro", "--quick"],
        ["simulate", "--help"],
    ],
)
def test_a_broken_pipe_is_a_quiet_end(args: list[str]) -> None:
    with broken_pipe() as pipe:
        done = subprocess.run(
            [*COMMAND, *args], stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.PIPE, env=environment()
        )
    assert (done.returncode, done.stderr) == (1, b"")


def test_both_pipes_broken_is_an_end_too() -> None:
    with broken_pipe() as pipe:
        for args in (["generate", *FAKE, "hi"], ["generate", *FAKE, ""], ["config", "show"]):
            with started([*COMMAND, *args], stdout=pipe, stderr=pipe) as child:
                assert child.wait(LIMIT_S) in (1, 2)


@pytest.mark.parametrize("broken", ["stdout", "stderr", "both"])
def test_a_server_goes_on_when_its_reader_is_gone(broken: str) -> None:
    with broken_pipe() as pipe:
        files = {name: pipe if broken in (name, "both") else subprocess.PIPE for name in ("stdout", "stderr")}
        with started(SERVE, **files) as server:
            port = port_of(server)
            for _ in range(3):
                complete(port)
            server.send_signal(signal.SIGTERM)
            out, err = server.communicate(timeout=LIMIT_S)
    assert server.returncode == 0
    assert b"Traceback" not in (out or b"") + (err or b"")
    if broken == "stdout":
        assert err.count(b" length: ") + err.count(b" stop: ") == 3


@pytest.mark.parametrize("args", [["config", "show"], ["--version"], ["generate", *FAKE, "hi", "-n", "3"]])
def test_a_full_disk_behind_stdout_is_one_line(args: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, *args], stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, env=environment()
        )
    assert (done.returncode, done.stderr) == (
        2,
        b"cllm: cannot write the output: No space left on device\n",
    )


# -- closed --------------------------------------------------------------------------------------------------------

CLOSED = [closed for size in (1, 2, 3) for closed in itertools.combinations((0, 1, 2), size)]
CLOSED = CLOSED if EXHAUSTIVE else [(0,), (1, 2), (0, 1, 2)]


def shell(args: list[str], closed: tuple[int, ...]) -> list[str]:
    redirections = "".join(f" {number}{'<' if number == 0 else '>'}&-" for number in closed)
    return ["sh", "-c", f'exec "$@"{redirections}', "sh", *args]


@exhaustive
@pytest.mark.parametrize("closed", CLOSED, ids=str)
def test_closed_standard_files(closed: tuple[int, ...]) -> None:
    commands = {
        ("config", "show"): 0,
        ("generate", *FAKE, "hi", "-n", "3"): 0,
        ("generate", *FAKE, "-"): 2 if 0 in closed else 0,  # there is no prompt
        ("chat", *FAKE): 0,
        ("pull", "no-such-model"): 2,
    }
    for args, code in commands.items():
        done = subprocess.run(
            shell([*COMMAND, *args], closed), input=b"hi\n", capture_output=True, env=environment(), timeout=LIMIT_S
        )
        assert done.returncode == code, (args, done)
        assert b"Traceback" not in done.stderr
        assert done.stderr.count(b"\n") <= 1
        if code == 2 and 2 not in closed:
            assert done.stderr.startswith(b"cllm: ")


@exhaustive
@pytest.mark.parametrize("closed", CLOSED, ids=str)
def test_a_server_with_closed_standard_files(closed: tuple[int, ...]) -> None:
    with started(shell(SERVE, closed), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        port = port_of(server)
        for number in closed:
            assert Path(f"/proc/{server.pid}/fd/{number}").readlink() == Path("/dev/null")
        complete(port)
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=LIMIT_S)
    assert server.returncode == 0
    assert b"Traceback" not in out + err
    assert (b"cLLM is ready" in out) is (1 not in closed)
    assert (b"SIGTERM: shutting down" in err) is (2 not in closed)

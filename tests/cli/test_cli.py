"""The command line: help, exit codes, one-line errors, and real processes on the fake backend."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import cllm.cli
from cli_kit import FAKE, LIMIT_S, Here, Result, process, running, wait_ready
from cllm.cli import main
from cllm.models.architectures import ARCHITECTURES
from thorough import slow


def one_error_line(result: Result) -> str:
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and result.stderr.endswith("\n"), result.stderr
    assert result.stderr.startswith("cllm: ")
    return result.stderr.removeprefix("cllm: ").rstrip("\n")


# -- help and start ------------------------------------------------------------------------------------------------


def test_help_names_every_command(here: Here) -> None:
    result = here("--help")
    assert result.returncode == 0
    for command in ("serve", "chat", "generate", "pull", "bench", "config"):
        assert re.search(rf"^  {command} +\S", result.stdout, re.MULTILINE), command


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("serve", ["MODEL", "--backend", "--device", "--host", "--port", "--config", "--set"]),
        ("chat", ["MODEL", "--model", "--device", "--system", "--max-tokens", "--temperature", "--json", "--set"]),
        (
            "generate",
            [
                "PROMPT",
                "--model",
                "--device",
                "--max-tokens",
                "--temperature",
                "--top-p",
                "--top-k",
                "--seed",
                "--stop",
            ],
        ),
        ("pull", ["MODEL"]),
        ("config show", ["--config", "--set", "--json"]),
        ("config check", ["FILE"]),
        ("bench", ["sequential"]),
    ],
)
def test_each_command_explains_its_options(command: str, options: list[str], here: Here) -> None:
    result = here(*command.split(), "--help")
    assert result.returncode == 0
    assert [option for option in options if option not in result.stdout] == []


def test_version() -> None:
    assert re.fullmatch(r"cllm \d+\.\d+\S*\n", process("--version").stdout)


def test_the_command_line_imports_nothing_heavy() -> None:
    code = "import sys, cllm.cli; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"asyncio", "fastapi", "jinja2", "llama_cpp", "numpy", "pydantic", "rich", "tokenizers", "uvicorn", "yaml"}
    assert "typer" in loaded
    assert heavy & set(loaded) == set()


# -- config --------------------------------------------------------------------------------------------------------


def test_config_check_says_ok(tmp_path: Path, here: Here) -> None:
    file = tmp_path / "good.yaml"
    file.write_text("server: {port: 8001}\n")
    result = here("config", "check", str(file), CLLM_SERVER__PORT="nonsense")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{file}: ok\n", "")


def test_config_check_lists_every_problem(tmp_path: Path, here: Here) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("server:\n  port: 70000\n  prot: 1\nlog: {level: loud}\n")
    result = here("config", "check", str(file))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        f"{file}:3: unknown key server.prot: did you mean server.port?",
        f"server.port is 70000 ({file}:2): it must be at most 65535 (default 8000)",
        f"log.level is 'loud' ({file}:4): it must be debug, info, warning or error (default info)",
    ]
    broken = tmp_path / "broken.yaml"
    broken.write_text("server: [\n")
    result = here("config", "check", str(broken))
    assert result.returncode == 2
    assert result.stderr.startswith(f"{broken}:2: not valid YAML") and result.stderr.count("\n") == 1


def test_config_show_tells_where_values_come_from(tmp_path: Path, here: Here) -> None:
    file = tmp_path / "cllm.yaml"
    file.write_text("server: {api_key: s3cret}\nlog: {format: json}\n")
    shown = tmp_path / "shown.json"
    result = here(
        "config", "show", "--config", str(file), "--set", "server.port=9", "--json", str(shown), CLLM_SERVER__HOST="h"
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(shown.read_text())
    assert {key: rows[key] | {"description": None} for key in ("server.port", "server.host", "log.format")} == {
        "server.port": {"value": 9, "source": "flag", "description": None},
        "server.host": {"value": "h", "source": "env CLLM_SERVER__HOST", "description": None},
        "log.format": {"value": "json", "source": f"file {file}", "description": None},
    }
    assert rows["server.max_prompts"]["source"] == "default"
    assert re.search(r"^server\.port +9 +flag +port to listen on", result.stdout, re.MULTILINE)
    assert "s3cret" not in result.stdout + shown.read_text()


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "batch", *FAKE, "--against", "none", "--quick", "--repeats", "1"],
        ["simulate", "--requests", "20"],
    ],
)
def test_json_is_alone_on_stdout(here: Here, command: list[str]) -> None:
    result = here(*command, "--json", "-")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)
    assert result.stderr and "stdout.json" not in result.stderr and not Path("-").exists()


def test_config_show_can_write_json_to_stdout(here: Here) -> None:
    rows = json.loads(here("config", "show", "--json", "-").stdout)
    assert rows["server.port"]["value"] == 8000


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["serve", "--set", "server.prot=1"], "unknown key server.prot: did you mean server.port?"),
        (["serve", "--set", "nonsense"], "--set 'nonsense': expected KEY=VALUE, such as server.port=8001"),
        (["serve", "--port", "99999"], "server.port is 99999 (flag): it must be at most 65535 (default 8000)"),
        (
            ["serve", "--backend", "tensor"],
            "backend.type is 'tensor' (flag): it must be auto, native, llama_cpp, torch",
        ),
        (["serve", "--device", "gpu"], "backend.torch.device is 'gpu' (flag): it must be a string that matches"),
        (["serve", "--backend", "native", "--device", "cuda"], "--device is cuda, but the native backend runs on"),
        (["generate", "-b", "llama_cpp", "--device", "cuda:1", "x"], "--device is cuda:1, but the llama_cpp backend"),
        (["chat", *FAKE, "--device", "cuda"], "--device is cuda, but the fake backend runs on the CPU"),
        (["serve", "--config", "/missing.yaml"], "cannot read the configuration file /missing.yaml"),
        (["serve", *FAKE, "--host", "no such host"], "server.host is 'no such host', which is not an address"),
        (["serve", *FAKE, "--host", "192.0.2.1", "--port", "0"], "cannot listen on port 0 on 192.0.2.1"),
        (["generate", *FAKE, "--temperature", "-1", "x"], "temperature is -1.0; it must be"),
        (["generate", *FAKE, ""], "the prompt is empty"),
        (["config", "show", "--json", "/proc/no/file"], "--json: cannot write /proc/no/file"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(args: list[str], message: str, here: Here) -> None:
    assert one_error_line(here(*args)).startswith(message)


def test_every_backend_runs_on_the_cpu(here: Here) -> None:
    assert here("generate", *FAKE, "--device", "cpu", "-n", "2", "hi").returncode == 0


def test_bad_environment_is_one_line(here: Here) -> None:
    assert one_error_line(here("serve", *FAKE, CLLM_SEVER__PORT="1")) == (
        "unknown environment variable CLLM_SEVER__PORT: did you mean CLLM_SERVER__PORT?"
    )


def test_missing_and_damaged_models_are_one_line(tmp_path: Path, here: Here) -> None:
    missing = tmp_path / "missing.gguf"
    assert str(missing) in one_error_line(here("serve", str(missing), "--port", "0"))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF\x03\x00\x00\x00 cut off")
    assert str(damaged) in one_error_line(here("serve", str(damaged), "--port", "0"))
    assert str(damaged) in one_error_line(here("generate", "--model", str(damaged), "hello"))


def test_models_lists_the_architectures_that_native_can_run(here: Here) -> None:
    rows = json.loads(here("models", "--support", "--json", "-").stdout)
    assert [row["architecture"] for row in rows] == list(ARCHITECTURES)
    assert "Gemma 3" in here("models", "--support").stdout


def test_unknown_model_name_is_one_line(here: Here) -> None:
    assert "smollm3000" in one_error_line(here("pull", "smollm3000"))


@pytest.mark.parametrize("listening", [True, False])
def test_a_taken_port_is_one_line_and_nothing_is_loaded(listening: bool) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if listening:
            other.listen()
        port = other.getsockname()[1]
        # A model that does not exist: had it been looked for first, the message would be another.
        result = process("serve", "no-such-model", "--port", str(port))
    assert one_error_line(result) == f"port {port} on 127.0.0.1 is already in use: choose another with --port"


def crash(*_: object) -> None:
    raise RuntimeError("two\nlines")


def test_unexpected_errors_are_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cllm.cli.config.load_settings", crash)
    monkeypatch.delenv("CLLM_LOG__LEVEL", raising=False)
    with pytest.raises(SystemExit) as caught:
        main(["config", "show"])
    assert caught.value.code == 1
    assert capsys.readouterr().err == (
        "cllm: unexpected RuntimeError: two lines (set CLLM_LOG__LEVEL=debug for a traceback)\n"
    )


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("cllm.cli.config.load_settings", crash)
    monkeypatch.setenv("CLLM_LOG__LEVEL", "debug")
    with pytest.raises(SystemExit):
        main(["config", "show"])
    err = capsys.readouterr().err
    assert "Traceback" in err and err.endswith("cllm: unexpected RuntimeError: two lines\n")


# -- serve ---------------------------------------------------------------------------------------------------------


def completion(url: str, **body: Any) -> dict[str, Any]:
    reply = httpx.post(f"{url}/v1/completions", json={"model": "fake", "prompt": "hello", **body}, timeout=LIMIT_S)
    reply.raise_for_status()
    answer: dict[str, Any] = reply.json()
    return answer


def test_serve_prints_its_url_answers_and_leaves_on_a_signal() -> None:
    with running("serve", *FAKE, "--port", "0", "--set", "log.format=json") as server:
        url = wait_ready(server)
        assert httpx.get(f"{url}/health").status_code == 200
        assert completion(url, max_tokens=5, ignore_eos=True)["usage"]["completion_tokens"] == 5
        server.send_signal(signal.SIGTERM)
        rest, log = server.communicate(timeout=LIMIT_S)
    assert server.returncode == 0
    assert rest == ""
    lines = [json.loads(line) for line in log.splitlines()]
    (request,) = [line for line in lines if "request_id" in line]
    assert (request["reason"], request["generated_tokens"]) == ("length", 5)
    assert [line["message"] for line in lines if line["message"].startswith("SIGTERM: shutting down")]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


@slow
def test_serve_again_on_the_port_just_left() -> None:
    with running("serve", *FAKE, "--port", "0") as server:
        url = wait_ready(server)
        completion(url, max_tokens=1)
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=LIMIT_S)
    assert server.returncode == 0
    port = url.rpartition(":")[2]
    with running("serve", *FAKE, "--port", port) as again:
        assert wait_ready(again) == url


@contextmanager
def streaming(url: str, max_tokens: int) -> Iterator[Iterator[str]]:
    """The lines of a stream whose first token has come."""
    body = {"model": "fake", "prompt": "hello", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT_S) as reply:
        lines = (line for line in reply.iter_lines() if line)
        assert next(lines).startswith("data: ")
        yield lines


@slow
def test_shutdown_lets_running_requests_finish() -> None:
    with running("serve", *FAKE, "--port", "0", "--set", "backend.fake.latency_ms=20") as server:
        url = wait_ready(server)
        with streaming(url, max_tokens=50) as lines:
            server.send_signal(signal.SIGTERM)
            received = list(lines)
        assert '"finish_reason":"length"' in received[-2].replace(" ", "")
        assert received[-1] == "data: [DONE]"
        server.communicate(timeout=LIMIT_S)
    assert server.returncode == 0


@slow
def test_shutdown_refuses_what_outlasts_the_grace() -> None:
    settings = ["--set", "backend.fake.latency_ms=20", "--set", "server.shutdown_grace_s=0.1"]
    with running("serve", *FAKE, "--port", "0", *settings) as server:
        url = wait_ready(server)
        with streaming(url, max_tokens=4000) as lines:
            server.send_signal(signal.SIGTERM)
            received = list(lines)
        assert [line for line in received if '"error"' in line]
        server.communicate(timeout=LIMIT_S)
    assert server.returncode == 0


@slow
def test_a_second_signal_stops_at_once() -> None:
    settings = ["--set", "backend.fake.latency_ms=20", "--set", "server.shutdown_grace_s=600"]
    with running("serve", *FAKE, "--port", "0", *settings) as server:
        url = wait_ready(server)
        with streaming(url, max_tokens=4000):
            server.send_signal(signal.SIGTERM)
            assert server.stderr is not None
            while "SIGTERM: shutting down" not in server.stderr.readline():
                pass
            while server.poll() is None:  # one that comes at once with the first is no second one
                server.send_signal(signal.SIGTERM)
                time.sleep(0.05)
    assert server.returncode == 128 + signal.SIGTERM


# -- generate and chat ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("args", "stdin"), [(["hello"], ""), (["-"], "hello\n"), ([], "hello")])
def test_generate_takes_its_prompt_from_anywhere(args: list[str], stdin: str, tmp_path: Path, here: Here) -> None:
    file = tmp_path / "result.json"
    result = here("generate", *args, *FAKE, "-n", "8", "-t", "0", "--json", str(file), stdin=stdin)
    assert result.returncode == 0, result.stderr
    data = json.loads(file.read_text())
    assert data["prompt"] == "hello"
    assert result.stdout == data["text"] + "\n"
    assert data["completion_tokens"] <= 8
    assert data["timings"]["total_s"] > 0
    (line,) = result.stderr.splitlines()
    assert re.fullmatch(r"\[\d+ tokens in, 0 cached; \d+ out \(\w+\); first after \d+\.\d\d s(, [\d.]+ tok/s)?\]", line)


def test_generate_is_reproducible_with_a_seed(here: Here) -> None:
    args = ["generate", "hello", *FAKE, "-n", "16", "--seed", "7", "--json", "-"]
    first, second = (json.loads(here(*args).stdout) for _ in range(2))
    assert first["text"] == second["text"]


def test_generate_without_a_prompt_at_a_terminal_is_refused() -> None:
    terminal, other_end = os.openpty()
    try:
        result = process("generate", *FAKE, stdin=other_end)
    finally:
        os.close(terminal)
        os.close(other_end)
    assert one_error_line(result) == "no prompt: give one as an argument, or pipe it in"


def test_generate_refuses_what_is_not_text() -> None:
    result = process("generate", *FAKE, text=b"\xff\xfe")
    assert one_error_line(result).startswith("the prompt on stdin is not UTF-8 text")


def test_chat_keeps_the_history_and_shows_what_was_cached(tmp_path: Path, here: Here) -> None:
    file = tmp_path / "chat.json"
    result = here(
        "chat", *FAKE, "-n", "8", "-t", "0", "--system", "Be brief.", "--json", str(file), stdin="one\n\ntwo\n"
    )
    assert result.returncode == 0, result.stderr
    data = json.loads(file.read_text())
    assert [message["role"] for message in data["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert [message["content"] for message in data["messages"][:2]] == ["Be brief.", "one"]
    first, second = data["answers"]
    assert second["prompt_tokens"] > first["prompt_tokens"]
    assert second["cached_tokens"] > 0
    assert result.stdout == f"{first['text']}\n{second['text']}\n"
    lines = [line for line in result.stderr.splitlines() if " out (" in line]
    assert f"{second['cached_tokens']} cached" in lines[1]


def test_chat_commands(tmp_path: Path, here: Here) -> None:
    file = tmp_path / "chat.json"
    talk = "one\n/reset\n/help\n/nonsense\ntwo\n/quit\nnever\n"
    result = here("chat", *FAKE, "-n", "4", "--json", str(file), stdin=talk)
    assert result.returncode == 0, result.stderr
    data = json.loads(file.read_text())
    assert [message["content"] for message in data["messages"] if message["role"] == "user"] == ["two"]
    assert len(data["answers"]) == 2
    assert [line for line in result.stderr.splitlines() if line.startswith("unknown command /nonsense")]


def test_chat_survives_a_question_that_is_too_long(here: Here) -> None:
    talk = "x" * 5000 + "\nshort\n"
    result = here("chat", *FAKE, "-n", "4", "--set", "resources.max_context_length=512", stdin=talk)
    assert result.returncode == 0, result.stderr
    first, advice, second = result.stderr.splitlines()[:3]
    assert first.startswith("cllm: This model's maximum context length is 512 tokens") and "512" in first
    assert "rolling window" in advice
    assert " out (" in second


def test_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    with running("chat", *FAKE, "-t", "0", "--set", "backend.fake.latency_ms=1000") as talk:
        assert talk.stdin and talk.stdout and talk.stderr
        talk.stdin.write("tell me everything\n")
        talk.stdin.flush()
        assert talk.stdout.read(1)
        talk.send_signal(signal.SIGINT)
        assert talk.stderr.readline() == "[stopped]\n"
        _, err = talk.communicate("/help\n", timeout=LIMIT_S)
    assert talk.returncode == 0
    assert err.startswith("/set ")


def test_ctrl_c_before_the_command_has_begun_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cllm.cli, "app", interrupted)
    assert cllm.cli._run([]) == 130

"""Several models from files and from the command line."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import server_process
from cllm.cli import app as cllm_app
from cllm.config import load_config
from cllm.errors import ConfigError, ModelError
from cllm.served import ServedModels
from gguf_kit import tiny_model
from native_kit import write_model
from thorough import slow

# -- files ---------------------------------------------------------------------------------------------------------


def test_a_directory_is_all_its_models(tmp_path: Path) -> None:
    for name in ("one", "two"):
        tiny_model(tmp_path / f"{name}.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    (tmp_path / "notes.txt").write_text("no model")
    settings = {"backend.type": "llama_cpp", "models": [str(tmp_path)], "resources.max_memory_mb": 100.0}
    served = ServedModels(load_config(None, settings, {}).config)
    assert [each.name for each in served.models] == ["one", "two"]
    assert not any(each.at_start for each in served.models)


def test_a_directory_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="a directory without models"):
        ServedModels(load_config(None, {"models": [str(tmp_path)]}, {}).config)


# -- the whole server ----------------------------------------------------------------------------------------------


def test_a_stream_keeps_its_model_until_it_ends_or_its_client_leaves() -> None:
    entries = "models=[one, {name: two, load: first_use, backend: {fake: {latency_ms: 20}}}]"
    with server_process.serving(entries, "resources.max_memory_mb=4") as server:

        def card() -> dict[str, Any]:
            found: dict[str, Any] = httpx.get(f"{server.url}/v1/models/two").json()
            return found

        assert card()["state"] == "unloaded"
        body = {"model": "two", "prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            assert (card()["state"], card()["requests"]) == ("ready", 1)
            refused = httpx.post(f"{server.url}/models/unload", json={"model": "two"})
            assert refused.status_code == 409
        server_process.until(lambda: card()["requests"] == 0)
        assert httpx.post(f"{server.url}/models/unload", json={"model": "two"}).status_code == 200
        assert (card()["state"], card()["kv_bytes"]) == ("unloaded", 0)
        assert server.logged("two loaded in") and server.logged("model two")
        server.send(signal.SIGTERM)
        assert server.end() == 0


@slow
def test_one_line_says_where_and_which_models(tmp_path: Path) -> None:
    for name in ("A", "B", "dir/C"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_model(tmp_path / f"{name}.gguf", context_length=512)
    command = [sys.executable, "-m", "cllm", "serve", *(str(tmp_path / name) for name in ("A.gguf", "B.gguf", "dir"))]
    command += ["--backend", "native", "--port", "0", "--set", "resources.max_memory_mb=16"]
    command += ["--set", "kv.disk.enabled=true", "--set", f"kv.disk.directory={tmp_path / 'kv'}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        server.send_signal(signal.SIGTERM)
        rest, said = server.communicate(timeout=60)
    assert re.fullmatch(r"cLLM is ready: http://127\.0\.0\.1:\d+ \(A, B loaded; C on first use\)\n", line)
    assert (rest, server.returncode) == ("", 0)
    assert said.count("storing K/V of prompts and answers in") == 1


@slow
def test_what_cannot_be_served_is_one_line() -> None:
    command = [sys.executable, "-m", "cllm", "serve", "a", "b", "--backend", "fake", "--port", "0"]
    command += ["--set", "resources.max_memory_mb=0.04"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    (error,) = [line for line in ended.stderr.splitlines() if line.startswith("cllm: ")]
    assert "2 models should be loaded together, but do not fit" in error
    assert "Traceback" not in ended.stderr


def test_the_list_of_models_says_what_each_takes(tmp_path: Path) -> None:
    write_model(tmp_path / "one.gguf", context_length=512)
    (tmp_path / "two.gguf").write_bytes(b"no model")
    shown = CliRunner().invoke(cllm_app, ["models", str(tmp_path), "--backend", "native", "--json", "-"])
    assert shown.exit_code == 0
    one, two = json.loads(shown.stdout)
    # Two layers, two K/V heads of 16 values, keys and values of 2 bytes each.
    assert (one["kv_bytes_per_1000_tokens"], one["context"], one["context_bytes"]) == (256_000, 512, 512 * 256)
    assert (one["backend"], one["file_bytes"]) == ("native", (tmp_path / "one.gguf").stat().st_size)
    assert one["weights_bytes"] > 0
    assert "two.gguf" in two["problem"]
    table = CliRunner().invoke(cllm_app, ["models", str(tmp_path), "--backend", "native"]).stdout
    assert "one.gguf" in table and "two.gguf: " in table


def test_a_model_that_was_asked_for_by_name_and_is_none_is_an_error(tmp_path: Path) -> None:
    good, bad = write_model(tmp_path / "good.gguf"), str(tmp_path / "bad.gguf")
    for arguments in ([bad], [str(good), bad]):
        shown = CliRunner().invoke(cllm_app, ["models", *arguments, "--backend", "native"])
        assert shown.exit_code == 2 and f"no such file: {bad}" in shown.stderr
    assert "good.gguf" in shown.stdout


def test_aliases_of_a_directory_are_refused(tmp_path: Path) -> None:
    tiny_model(tmp_path / "one.gguf")
    settings = {"models": [{"name": str(tmp_path), "aliases": ["x"]}]}
    with pytest.raises(ConfigError, match="is a directory, whose models cannot share aliases; remove the aliases"):
        ServedModels(load_config(None, settings, {}).config)


def test_known_names_are_listed_before_they_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLLM_CACHE_DIR", str(tmp_path))
    assert CliRunner().invoke(cllm_app, ["models"]).stdout == "smollm2: not downloaded yet; run: cllm pull smollm2\n"

"""What the shell offers when Tab is pressed, asked as bash asks, and help texts that are not cut."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli_kit import COMMAND, Here, environment
from cllm_bench.workloads import WORKLOADS

bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def completed(*words: str, **env: str) -> list[str]:
    """The last word is incomplete."""
    asked = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1), "_CLLM_COMPLETE": "complete_bash"}
    done = subprocess.run(
        COMMAND, capture_output=True, text=True, timeout=60, check=True, env={**environment(), **asked, **env}
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("cllm", "se"), ["serve"]),
        (("cllm", "serve", "--back"), ["--backend"]),
        (("cllm", "serve", "-b", "n"), ["native"]),
        (("cllm", "chat", "--device", ""), ["auto", "cpu", "cuda"]),
        (("cllm", "generate", "--model", "smol"), ["smollm2"]),
        (("cllm", "serve", "smollm2", "smol"), ["smollm2"]),
        (("cllm", "serve", "--set", "server.por"), ["server.port="]),
        (("cllm", "bench", "cluster-h"), ["cluster-hits"]),
        (("cllm", "bench", "batch", "--repo"), ["--report"]),
        (("cllm", "keys", "re"), ["remove"]),
        (("cllm", "serve", "./"), []),
    ],
)
def test_commands_options_and_values_are_completed(words: tuple[str, ...], offered: list[str]) -> None:
    assert completed(*words) == offered


def test_downloaded_models_are_completed_by_name_and_others_left_to_the_shell(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--repo" / "snapshots" / "1"
    for file in (snapshot / "tiny-q8_0.gguf", tmp_path / "models" / "mine.gguf"):
        file.parent.mkdir(parents=True)
        file.touch()
    env = {"CLLM_CACHE_DIR": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "none")}
    assert completed("cllm", "chat", "", **env) == ["smollm2", "hf:org/repo/tiny-q8_0.gguf"]
    assert completed("cllm", "chat", "/", **env) == []


@bash
def test_the_script_for_bash_works(tmp_path: Path) -> None:
    (tmp_path / "cllm").write_text(f'#!/bin/sh\nexec {sys.executable} -m cllm "$@"\n')
    (tmp_path / "cllm").chmod(0o755)
    script = "; ".join(
        (
            f"PATH={tmp_path}:$PATH",
            'eval "$(cllm --show-completion)"',
            "COMP_WORDS=(cllm serve --backend l); COMP_CWORD=3",
            '_cllm_completion cllm; echo "${COMPREPLY[@]}"',
        )
    )
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False, env=environment()
    )
    assert (done.stdout, done.stderr) == ("llama_cpp\n", "")


@pytest.mark.parametrize("command", [[], ["bench"], ["cluster"], ["simulate"], ["keys"]])
def test_lists_of_commands_are_whole(command: list[str], here: Here) -> None:
    shown = here(*command, "--help").stdout
    assert "Commands:" in shown and "..." not in shown.partition("Commands:")[2]


def test_the_help_of_bench_has_every_workload_and_every_option(here: Here) -> None:
    shown = here("bench", "--help").stdout
    for name in (*WORKLOADS, "kernels", "kv-types", "truth", "all"):
        assert re.search(rf"^  {name} +\S", shown, re.MULTILINE), name
    for option in set(re.findall(r"^ +(--[a-z-]+)", here("bench", "batch", "--help").stdout, re.MULTILINE)):
        assert re.search(rf"^  {option}\b.*\n? +\S", shown, re.MULTILINE), option

"""Models from the Hugging Face hub: the real client against a hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from cllm.models.registry import cache_dir, resolve
from hub_kit import FILES, WEIGHTS, Hub, refusal, silent, use

UNUSED = {"pytorch_model.bin", "modeling.py", "original/consolidated.pth"}


def files_in(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def unfinished() -> list[Path]:
    return list(cache_dir().rglob("*.incomplete"))


def test_a_repository_is_fetched_but_for_what_is_not_used(hub: Hub) -> None:
    seen: list[tuple[int, int]] = []
    directory = resolve("hf:org/repo", progress=lambda done, total: seen.append((done, total)))
    wanted = {name: data for name, data in FILES.items() if name not in UNUSED}
    assert files_in(directory) == wanted and directory.is_relative_to(cache_dir())
    size = sum(map(len, wanted.values()))
    assert seen[-1] == (size, size) and all(0 <= done <= total == size for done, total in seen)


def test_weights_that_are_there_twice_are_fetched_once(hub: Hub) -> None:
    twice = {
        "consolidated.safetensors": b"once more",
        "original/model.safetensors": b"once more",
        "onnx/config.json": b"once more",
    }
    hub.repositories["org/twice"] = FILES | twice
    wanted = {name: data for name, data in FILES.items() if name not in UNUSED}
    assert files_in(resolve("hf:org/twice", progress=silent)) == wanted


def test_what_the_index_names_is_fetched(hub: Hub) -> None:
    index = b'{"weight_map": {"a": "weights-1.safetensors", "b": "model-00001-of-00002.safetensors"}}'
    changed = {"model.safetensors.index.json": index, "weights-1.safetensors": b"a", "consolidated.safetensors": b"b"}
    hub.repositories["org/named"] = FILES | changed
    seen: list[tuple[int, int]] = []
    directory = resolve("hf:org/named", progress=lambda done, total: seen.append((done, total)))
    wanted = (FILES | changed).keys() - UNUSED - {"consolidated.safetensors"}
    assert files_in(directory).keys() == wanted
    assert seen[-1] == (sum(len((FILES | changed)[name]) for name in wanted),) * 2
    hub.asked.clear()
    assert resolve("hf:org/named", progress=silent, refresh=True) == directory and not hub.downloads()


def test_what_was_fetched_is_used_without_the_hub(hub: Hub) -> None:
    directory = resolve("hf:org/repo", progress=silent)
    hub.asked.clear()
    assert resolve("hf:org/repo", progress=silent) == directory and not hub.asked


def test_pull_fetches_what_is_newer_and_nothing_else(hub: Hub) -> None:
    first = resolve("hf:org/repo", progress=silent)
    hub.asked.clear()
    assert resolve("hf:org/repo", progress=silent, refresh=True) == first and not hub.downloads()
    hub.repositories["org/repo"]["config.json"] = b'{"new": 1}'
    assert resolve("hf:org/repo", progress=silent) == first
    second = resolve("hf:org/repo", progress=silent, refresh=True)
    assert (second / "config.json").read_bytes() == b'{"new": 1}' and hub.downloads() == ["config.json"]
    assert resolve("hf:org/repo", progress=silent) == second


def test_a_hub_that_is_gone(hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    directory = resolve("hf:org/repo", progress=silent)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    use(monkeypatch, "http://127.0.0.1:9")
    assert resolve("hf:org/repo", progress=silent, refresh=True) == directory
    assert "cannot download hf:org/repo" in caplog.text and "using the version downloaded before" in caplog.text
    assert "is http://127.0.0.1:9 reachable?" in refusal("hf:org/other")


def test_one_file_of_a_repository(hub: Hub) -> None:
    hub.repositories["org/repo"]["sub/model.gguf"] = b"GGUF"
    path = resolve("hf:org/repo/sub/model.gguf", progress=silent)
    assert path.read_bytes() == b"GGUF" and hub.downloads() == ["model.gguf"]
    assert resolve("hf:org/repo/sub/model.gguf", progress=silent) == path
    assert "has no such file; it has sub/model.gguf" in refusal("hf:org/repo/other.gguf")


def test_repositories_that_cannot_be_had(hub: Hub) -> None:
    assert f"{hub.url} has no public repository org/none; check the name, or set HF_TOKEN" in refusal("hf:org/none")
    hub.gated.add("org/repo")
    assert f"access must be requested at {hub.url}/org/repo; then set HF_TOKEN" in refusal("hf:org/repo")
    hub.repositories["org/odd"] = {"tokenizer.json": b"{}"}
    assert "hf:org/odd has neither a config.json nor .gguf files" in refusal("hf:org/odd")


def test_the_token_is_sent(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "secret"
    assert "set HF_TOKEN" in refusal("hf:org/repo")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert (resolve("hf:org/repo", progress=silent) / "config.json").exists()


def test_an_interrupted_fetch_stops_at_once_and_goes_on_later(hub: Hub) -> None:
    slow = "model-00001-of-00002.safetensors"
    hub.slow[slow] = 60.0
    others = psutil.Process().children()
    started: list[psutil.Process] = []

    def interrupt(done: int, total: int) -> None:
        if slow in hub.downloads() and done >= total - len(WEIGHTS) and unfinished():
            started.extend(child for child in psutil.Process().children() if child not in others)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve("hf:org/repo", progress=interrupt)
    assert started and not any(child.is_running() for child in started) and not unfinished()
    hub.slow.clear()
    hub.asked.clear()
    directory = resolve("hf:org/repo", progress=silent)
    assert (directory / slow).read_bytes() == WEIGHTS
    assert slow in hub.downloads() and "tokenizer.json" not in hub.downloads()


def test_what_a_killed_client_left_is_removed_later(hub: Hub) -> None:
    blobs = cache_dir() / "hub" / "models--org--repo" / "blobs"
    blobs.mkdir(parents=True)
    for name, age_s in (("old", 7200), ("young", 60)):
        (blobs / f"{name}.incomplete").write_bytes(b"half")
        os.utime(blobs / f"{name}.incomplete", (time.time() - age_s,) * 2)
    resolve("hf:org/repo", progress=silent)
    assert [path.name for path in unfinished()] == ["young.incomplete"]


def test_a_damaged_cache_is_mended_by_pull(hub: Hub) -> None:
    directory = resolve("hf:org/repo", progress=silent)
    (directory / "tokenizer.json").unlink()
    assert (resolve("hf:org/repo", progress=silent, refresh=True) / "tokenizer.json").exists()


def test_a_cache_that_cannot_be_written_is_one_line(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CLLM_CACHE_DIR", str(tmp_path / "file"))
    assert "cannot store hf:org/repo in" in refusal("hf:org/repo")


def test_a_disk_that_is_full_says_so(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("only root can make a small disk")
    monkeypatch.setenv("CLLM_CACHE_DIR", str(disk))
    try:
        assert f"in {disk / 'hub'}: the disk is full; it needs 3 MiB" in refusal("hf:org/repo")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_two_at_once_both_end_well(hub: Hub) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(resolve("hf:org/repo", progress=silent))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] == found[1] and not unfinished()


def test_pull_prints_where_it_is(hub: Hub) -> None:
    command = [sys.executable, "-m", "cllm", "pull", "hf:org/repo"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == "Downloading hf:org/repo ...\n"
    assert (Path(ran.stdout.strip()) / "config.json").exists()
    refused = subprocess.run([*command[:-1], "hf:org/none"], capture_output=True, text=True)
    assert refused.returncode == 2 and len(refused.stderr.strip().splitlines()) == 1

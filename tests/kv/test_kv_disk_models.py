"""Which model K/V on disk belong to, what `cllm cache` shows of them, and how they are cleared."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cllm.cli import app
from cllm.errors import CLLMError
from cllm.kv.block_names import fingerprint
from cllm.kv.disk import model_digest
from cllm.kv.disk.files import Files
from cllm.kv.disk.model_digest import ChangedError, content_digest, identity
from cllm.kv.disk.overview import clear, overview
from disk_kit import MODEL, load, long_prompt, make_store, names_of, open_model_store, put, segments

# -- model files ---------------------------------------------------------------------------------------------------


def test_every_byte_of_a_model_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_digest, "PIECE_BYTES", 100)
    file, known = tmp_path / "model.gguf", tmp_path / "kv" / "models"
    data = bytes(range(250))
    digests = set()
    for changed in range(-1, len(data)):
        file.write_bytes(bytes(byte ^ (number == changed) for number, byte in enumerate(data)))
        digests.add(content_digest([file], known))
    file.write_bytes(data + b"\0")
    digests.add(content_digest([file], known))
    assert len(digests) == len(data) + 2


def test_a_digest_is_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, known = tmp_path / "model.gguf", tmp_path / "kv" / "models"
    file.write_bytes(b"weights" * 100)
    hashed: list[int] = []
    real = model_digest._hash
    monkeypatch.setattr(
        model_digest, "_hash", lambda opened, size, stopped: hashed.append(size) or real(opened, size, stopped)
    )
    digest = content_digest([file], known)
    assert content_digest([file], known) == digest
    assert len(hashed) == 1
    times = file.stat()
    file.write_bytes(b"Weights" * 100)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert content_digest([file], known) != digest, "though size and time are what they were"
    assert len(hashed) == 2
    known.write_bytes(known.read_bytes()[:-3])
    content_digest([file], known)
    assert len(hashed) == 3, "what is remembered was damaged"
    assert known.stat().st_mode & 0o777 == 0o600


def test_files_in_another_order_are_another_model(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    one.write_bytes(b"a")
    two.write_bytes(b"b")
    known = tmp_path / "models"
    assert content_digest([one, two], known) != content_digest([two, one], known)


def test_a_model_that_was_replaced_after_loading_has_no_digest(tmp_path: Path) -> None:
    file, known = tmp_path / "model.gguf", tmp_path / "models"
    file.write_bytes(b"weights")
    loaded = identity(file)
    assert content_digest([file], known, loaded=[loaded])
    replacement = tmp_path / "new"
    replacement.write_bytes(b"weights")
    replacement.replace(file)
    with pytest.raises(ChangedError, match="after it was loaded"):
        content_digest([file], known, loaded=[loaded])


def test_a_digest_needs_no_directory_to_remember_it(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    (tmp_path / "in the way").write_bytes(b"")
    assert content_digest([file], tmp_path / "in the way" / "models") == content_digest([file], tmp_path / "models")


# -- the command ---------------------------------------------------------------------------------------------------

OTHER = fingerprint(b"another model's files", {})


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with blocks of two models."""
    monkeypatch.setenv("CLLM_CACHE_DIR", str(tmp_path))
    store = make_store(tmp_path / "kv")
    for model, blocks in ((MODEL, 10), (OTHER, 20)):
        model_store = open_model_store(store, model)
        put(model_store, names_of(model_store, long_prompt(blocks)))
        store.work()
    store.close()
    return tmp_path / "kv"


def test_cache_shows_what_is_there(filled: Path) -> None:
    (filled / "notes.txt").write_bytes(b"mine")
    (filled / "models").write_bytes(b"")
    damaged = segments(filled)[0].with_name(f"{'0' * 32}.kv")
    damaged.write_bytes(b"nothing of ours")
    result = CliRunner().invoke(app, ["cache", "--json", "-"])
    assert result.exit_code == 0
    shown = json.loads(result.output)
    assert shown["directory"] == str(filled)
    assert shown["limit_bytes"] == 2048 << 20
    assert shown["bytes"] == sum(path.stat().st_size for path in segments(filled))
    assert sorted(model["tokens"] for model in shown["models"]) == [40, 80]
    assert sum(model["damaged_files"] for model in shown["models"]) == 1
    assert shown["foreign_files"] == 1
    assert damaged.exists(), "looking changes nothing"
    table = CliRunner().invoke(app, ["cache"]).output
    assert str(filled) in table and "small" in table and "kv.disk.max_mb" in table
    assert all(model["id"][:12] in table for model in shown["models"])


def test_cache_clear_removes_one_model_or_all(filled: Path) -> None:
    (filled / "notes.txt").write_bytes(b"mine")
    folder = MODEL[:16].hex()
    result = CliRunner().invoke(app, ["cache", "clear", "--model", folder[:8]])
    assert (result.exit_code, result.output.split(" (")[0]) == (0, "removed 1 file")
    assert [model.folder for model in overview(filled).models] == [OTHER[:16].hex()]
    unknown = CliRunner().invoke(app, ["cache", "clear", "--model", "nobody"])
    assert isinstance(unknown.exception, CLLMError) and "; models there: small" in str(unknown.exception)
    assert CliRunner().invoke(app, ["cache", "clear", "-m", "small"]).exit_code == 0
    assert overview(filled).models == []
    assert (filled / "notes.txt").exists()
    assert CliRunner().invoke(app, ["cache", "clear"]).output.startswith("removed 0 files")
    unknown = CliRunner().invoke(app, ["cache", "clear", "--model", "small"])
    assert isinstance(unknown.exception, CLLMError) and str(unknown.exception).endswith("; it is empty")


@pytest.mark.parametrize("call", ["open", "remove"])
def test_one_file_that_is_refused_does_not_hide_the_others(
    filled: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    refused, _ = segments(filled)
    able = getattr(Files, call)

    def refuse(files: Files, path: str, **options: bool) -> Any:
        if path == str(refused):
            raise OSError(errno.EACCES, "Permission denied")
        return able(files, path, **options)

    monkeypatch.setattr(Files, call, refuse)
    shown = CliRunner().invoke(app, ["cache"])
    assert shown.exit_code == 0 and ("1 file cannot be read:" in shown.output) == (call == "open")
    counts = json.loads(CliRunner().invoke(app, ["cache", "--json", "-"]).output)["models"]
    assert sum(model["unreadable_files"] for model in counts) == (call == "open")
    assert sum(model["files"] for model in counts) == 2
    cleared = CliRunner().invoke(app, ["cache", "clear"])
    if call == "open":
        assert cleared.output.startswith("removed 2 files") and segments(filled) == []
    else:
        assert isinstance(cleared.exception, CLLMError) and "Permission denied" in str(cleared.exception)
        assert segments(filled) == [refused], "the others are gone"


def test_a_running_store_survives_clearing(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    model_store = open_model_store(store)
    names = names_of(model_store, long_prompt(10))
    put(model_store, names)
    store.work()
    assert clear(tmp_path, lambda _: True)[0] == 1
    assert load(store, model_store, names) == 0
    put(model_store, names)
    store.work()
    assert load(store, model_store, names) == 10


def test_the_directory_can_be_set(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["cache", "--set", f"kv.disk.directory={tmp_path}", "--set", "kv.disk.max_mb=100"])
    assert result.output == f"{tmp_path}: 0.0 MiB of K/V, at most 100 MiB (kv.disk.max_mb)\n"


@pytest.mark.parametrize("command", [[], ["clear"]])
def test_what_is_no_directory_is_refused(tmp_path: Path, command: list[str]) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"mine")
    result = CliRunner().invoke(app, ["cache", "--set", f"kv.disk.directory={file}", *command])
    assert isinstance(result.exception, CLLMError) and not result.output
    assert str(result.exception) == f"{file} is not a directory: choose another kv.disk.directory"
    assert file.read_bytes() == b"mine"


def test_nobody_waits_for_a_digest_that_is_not_needed_any_more(tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_bytes(bytes(100))
    with pytest.raises(model_digest.StoppedError):
        model_digest.content_digest([file], tmp_path / "known", stopped=lambda: True)
    assert not (tmp_path / "known").exists()


def test_two_servers_write_and_one_of_them_is_cleared_under_the_other(tmp_path: Path) -> None:
    stores = [make_store(tmp_path) for _ in range(2)]
    model_stores = [open_model_store(store) for store in stores]
    chains = [names_of(model_stores[0], long_prompt(4, start=1000 * number)) for number in range(2)]
    for store, model_store, names in zip(stores, model_stores, chains, strict=True):
        put(model_store, names)
        store.work()
    assert clear(tmp_path, lambda model: True)[0] == 2
    for store, model_store, names in zip(stores, model_stores, chains, strict=True):
        assert load(store, model_store, names) == 0
        put(model_store, names)
        store.work()
        assert load(store, model_store, names) == 4 and store.details()["trouble"] is None

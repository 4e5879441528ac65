"""Names to files. The fetch is real: pip takes a small wheel out of a local directory."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from cllm.errors import ModelError
from cllm.models import registry, verify
from cllm.models.fetch import WheelModel
from cllm.models.registry import cache_dir, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 2000


def silent(done: int, total: int) -> None:
    pass


def refusal(name: str, progress: Callable[[int, int], None] = silent) -> str:
    with pytest.raises(ModelError) as caught:
        resolve(name, progress=progress)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def build_wheel(directory: Path, member: str = "tiny_model/tiny.gguf", content: bytes = CONTENT) -> Path:
    directory.mkdir(exist_ok=True)
    wheel = directory / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return wheel


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of one wheel, a cache of our own, and the name `tiny`."""
    directory = tmp_path / "wheels"
    wheel = build_wheel(directory)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("CLLM_CACHE_DIR", str(tmp_path / "cache"))
    know_tiny(monkeypatch, wheel.stat().st_size, hashlib.sha256(CONTENT).hexdigest())
    return directory


def know_tiny(monkeypatch: pytest.MonkeyPatch, wheel_bytes: int, sha256: str) -> None:
    model = WheelModel("tiny", "tiny-model==1.0", wheel_bytes, "tiny.gguf", len(CONTENT), sha256)
    monkeypatch.setitem(registry._KNOWN, "tiny", model)


def left_over() -> list[Path]:
    """What is in the cache, but for the note of a file that was verified."""
    models = cache_dir() / "models"
    return [path for path in models.iterdir() if path.suffix != ".verified"] if models.exists() else []


def test_first_use_fetches_with_progress_and_later_ones_do_not(wheels: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = resolve("tiny", progress=lambda done, total: seen.append((done, total)))
    assert path == cache_dir() / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    size = (wheels / "tiny_model-1.0-py3-none-any.whl").stat().st_size
    assert seen[-1] == (size, size)
    assert all(0 <= done <= total for done, total in seen)
    assert left_over() == [path]

    (wheels / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert resolve("tiny", progress=silent) == path


def test_without_a_progress_function_one_line_goes_to_stderr(wheels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resolve("tiny")
    assert capsys.readouterr().err == "Downloading tiny ...\n"


def test_a_file_of_the_wrong_size_is_fetched_again(wheels: Path) -> None:
    path = resolve("tiny", progress=silent)
    path.write_bytes(CONTENT[:-1])
    assert resolve("tiny", progress=silent).read_bytes() == CONTENT


def change_a_byte(path: Path) -> None:
    """The size stays, the time does not, whatever steps the file system counts it in."""
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"?")
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 10**9))


def test_a_damaged_file_of_the_right_size_is_fetched_again(wheels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = resolve("tiny", progress=silent)
    change_a_byte(path)
    assert resolve("tiny").read_bytes() == CONTENT
    assert capsys.readouterr().err == f"{path} is damaged; downloading tiny again ...\n"


def test_a_damaged_file_that_cannot_be_fetched_again_is_one_line(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve("tiny", progress=silent)
    change_a_byte(path)
    monkeypatch.delenv("PIP_FIND_LINKS")
    message = refusal("tiny")
    assert message.startswith(f"{path} is damaged, and cannot download tiny: ")
    assert left_over() == [path]


def test_a_file_is_hashed_once_for_each_change(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def count(*data: bytes) -> Any:
        hashed.append(1)
        return sha256(*data)

    sha256 = hashlib.sha256
    path = resolve("tiny", progress=silent)
    monkeypatch.setattr("cllm.models.verify.hashlib.sha256", count)

    def resolve_in_a_new_process() -> int:
        verify._verified_here.clear()
        hashed.clear()
        assert resolve("tiny", progress=silent).read_bytes() == CONTENT
        return len(hashed)

    assert resolve_in_a_new_process() == 0
    os.utime(path, ns=(5, 5))
    assert [resolve_in_a_new_process() for _ in range(3)] == [1, 0, 0]
    stamp = path.with_name("tiny.gguf.verified")
    for damaged in (b"", b"[]", b"\xff", b'{"size": 1}'):
        stamp.write_bytes(damaged)
        assert [resolve_in_a_new_process() for _ in range(2)] == [1, 0]
    stamp.unlink()
    stamp.mkdir()  # in the way: the note cannot be kept, all else goes on
    (stamp / "file").touch()
    assert [resolve_in_a_new_process() for _ in range(2)] == [1, 1]
    assert resolve("tiny", progress=silent) and hashed == [1], "but it is kept in the process"
    assert left_over() == [path]


def test_a_note_for_another_checksum_counts_for_nothing(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve("tiny", progress=silent)
    know_tiny(monkeypatch, 1000, "0" * 64)
    assert "is damaged, and cannot download tiny" in refusal("tiny")


def test_a_wrong_checksum_leaves_nothing(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    know_tiny(monkeypatch, 1000, "0" * 64)
    assert "sha256" in refusal("tiny")
    assert left_over() == []


def test_a_wheel_without_the_file_leaves_nothing(wheels: Path) -> None:
    build_wheel(wheels, member="tiny_model/other.gguf")
    assert "does not contain tiny.gguf" in refusal("tiny")
    assert left_over() == []


def test_a_damaged_wheel_leaves_nothing(wheels: Path) -> None:
    wheel = wheels / "tiny_model-1.0-py3-none-any.whl"
    raw = bytearray(wheel.read_bytes())
    raw[200:260] = bytes(60)
    wheel.write_bytes(raw)
    assert "is damaged" in refusal("tiny")
    assert left_over() == []


def test_offline_is_one_line_and_leaves_nothing(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    message = refusal("tiny")
    assert message.startswith("cannot download tiny: ")
    assert "tiny-model==1.0" in message
    assert left_over() == []


def test_a_python_without_pip_says_so(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert "has no pip" in refusal("tiny")
    assert left_over() == []


def test_a_cache_that_cannot_be_written_is_one_line(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CLLM_CACHE_DIR", str(tmp_path / "file"))
    assert "cannot store tiny in" in refusal("tiny")


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "the disk is full; it needs 1 MiB. Free some space, or set CLLM_CACHE_DIR to a directory"),
        (errno.EDQUOT, "the disk quota is used up; it needs 1 MiB"),
        (errno.EROFS, "Read-only file system; set CLLM_CACHE_DIR to a directory that is writable"),
        (errno.EACCES, "Permission denied; set CLLM_CACHE_DIR to a directory that is writable"),
        (errno.EIO, "Input/output error"),
    ],
)
@pytest.mark.parametrize("where", ["mkdir", "open", "fsync", "replace"])
def test_what_cannot_be_written_says_why(
    wheels: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str, where: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    def fail_to_write(path: Path, mode: str = "r", **options: Any) -> Any:
        return fail() if "w" in mode else plain_open(path, mode, **options)

    plain_open = Path.open
    failing = {"mkdir": (Path, fail), "open": (Path, fail_to_write), "fsync": (os, fail), "replace": (Path, fail)}
    owner, stand_in = failing[where]
    with monkeypatch.context() as patch:
        patch.setattr(owner, where, stand_in)
        message = refusal("tiny")
    assert message.startswith(f"cannot store tiny in {cache_dir() / 'models'}: {said}")
    assert left_over() == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk is full"),
        ("OSError: [Errno 122] Disk quota exceeded: '/x'", "the disk quota is used up"),
        (
            "ERROR: Could not install packages due to an OSError: [Errno 30] Read-only file system: '/x'",
            "Read-only file",
        ),
    ],
)
def test_a_disk_that_is_full_for_pip_says_so(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, said: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "{line}" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    message = refusal("tiny")
    assert message.startswith(f"cannot store tiny in {cache_dir() / 'models'}: {said}")
    assert "package index" not in message
    assert left_over() == []


@pytest.mark.parametrize("kib", [16, 48, 160, 640])
def test_a_disk_that_really_is_full(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kib: int) -> None:
    """The sizes are such that it is full while pip writes, while the wheel is unpacked, and not at all."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can make a small disk")
    monkeypatch.setenv("CLLM_CACHE_DIR", str(disk))
    try:
        if kib == 640:
            assert resolve("tiny", progress=silent).read_bytes() == CONTENT
        else:
            assert f"cannot store tiny in {disk / 'models'}: the disk is full" in refusal("tiny")
            assert left_over() == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_an_interrupted_fetch_leaves_nothing_and_stops_pip(wheels: Path) -> None:
    started: list[psutil.Process] = []
    others = psutil.Process().children()  # of tests that ran before

    def interrupt(done: int, total: int) -> None:
        started.extend(child for child in psutil.Process().children() if child not in others)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve("tiny", progress=interrupt)
    assert started
    assert not any(child.is_running() for child in started)
    assert left_over() == []


def test_two_at_once_both_end_well(wheels: Path) -> None:
    both_fetching = threading.Barrier(2, timeout=60)

    def fetch(_: int) -> bytes:
        waited = False

        def meet(done: int, total: int) -> None:
            nonlocal waited
            if not waited:
                waited = True
                both_fetching.wait()

        return resolve("tiny", progress=meet).read_bytes()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(fetch, range(2))) == [CONTENT, CONTENT]
    assert [path.name for path in left_over()] == ["tiny.gguf"]


def test_what_a_killed_fetch_left_is_removed_later(wheels: Path) -> None:
    models = cache_dir() / "models"
    for name, age_s in (("old", 7200), ("young", 60)):
        directory = models / f".fetch-{name}"
        directory.mkdir(parents=True)
        (directory / "part").write_bytes(b"half")
        for path in (directory / "part", directory):
            os.utime(path, (time.time() - age_s,) * 2)
    resolve("tiny", progress=silent)
    assert sorted(path.name for path in left_over()) == [".fetch-young", "tiny.gguf"]


def test_a_path_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(str(file)) == file
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/mine.gguf") == file


def test_what_is_neither_name_nor_file_is_refused(tmp_path: Path) -> None:
    assert "unknown model 'smollm3'; use smollm2" in refusal("smollm3")
    assert f"no such file: {tmp_path}/none.gguf" in refusal(f"{tmp_path}/none.gguf")
    assert f"no such directory: {tmp_path}/none/;" in refusal(f"{tmp_path}/none/")
    assert "is a directory without a config.json" in refusal(str(tmp_path))
    assert "/dev/null is neither a file nor a directory" in refusal("/dev/null")


def test_a_hugging_face_directory_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path


def test_hub_names_without_the_client_say_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLLM_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "scripts/install.py hf" in refusal("hf:org/repo/file.gguf")


@pytest.mark.parametrize(
    "name", ["hf:", "hf:org", "hf:/repo", "hf:org/repo/", "hf:org/repo/readme.md", "hf://a/b.gguf"]
)
def test_hub_names_that_name_no_file_are_refused(name: str) -> None:
    assert "hf:org/repo/file.gguf" in refusal(name)


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("CLLM_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "cllm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "cllm"
    monkeypatch.setenv("CLLM_CACHE_DIR", "~/own")
    assert cache_dir() == tmp_path / "own"

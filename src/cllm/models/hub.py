"""Downloads models from the Hugging Face hub with its own client, into cLLM's cache, in the hub's own layout.

The client downloads several files at a time and cannot be stopped, so it runs in a process of its own; the files it
writes show its progress. A file is complete or missing. After an interruption, finished files stay, and the next run
downloads only the missing ones. HF_ENDPOINT and HF_TOKEN work as usual.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

import psutil

from cllm.errors import ModelError
from cllm.machine import install_extra, read_memory_limits, total_memory
from cllm.models.fetch import directory_bytes, run_client, show_progress, storage_failure
from cllm.models.gguf_choice import Choice, choose, gguf_files
from cllm.models.hf_directory import CONFIG
from cllm.models.json_file import read_json
from cllm.models.load_progress import ByteProgress

log = logging.getLogger("cllm")

Sizes = dict[str, int | None]
"""Sizes of a repository's files; None if the hub does not report one."""
OnChoice = Callable[[Choice], object]

_UNFINISHED = "*.incomplete"
_ABANDONED_AFTER_S = 3600.0
_MAX_INDEX_BYTES = 64 << 20
_DOWNLOAD = """
import sys
from huggingface_hub import snapshot_download
repository, revision, cache, *files = sys.argv[1:]
snapshot_download(repository, revision=revision, cache_dir=cache, allow_patterns=files)
"""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model in a repository: the files that match a pattern, in the same folder, and those the index names.

    If the repository has .gguf files instead, the model is one of them.
    """

    name: str
    """As the user wrote it."""
    repository: str
    patterns: tuple[str, ...]
    index: str | None = None
    """The file whose `weight_map` names more files."""
    file: str | None = None
    """A .gguf file that is the whole model."""
    quantisation: str | None = None
    """The quantisation of the .gguf file to choose."""

    def only(self, file: str) -> HubModel:
        return replace(self, patterns=(file,), index=None, file=file)

    def matches(self, file: str) -> bool:
        """Unlike in `fnmatch`, `*` does not match across folders."""
        return any(fnmatch(file, each) and file.count("/") == each.count("/") for each in self.patterns)


@dataclass(frozen=True, slots=True)
class _Revision:
    commit: str
    sizes: Sizes
    """The files to download."""
    others: Sizes
    """Other safetensors files in the same folder, which the index may name."""


def fetch_hub_model(
    model: HubModel, cache: Path, progress: ByteProgress | None, *, refresh: bool, on_choice: OnChoice | None
) -> Path:
    """The directory with the files, or the .gguf file, in `cache`. A model that is already there is used without asking
    the hub, unless `refresh` is set and the hub is reachable."""
    known = _read_note(_note_file(cache, model.name))
    if known is not None and not refresh:
        return known
    try:
        commit, files = _list_files(model)
    except ModelError as error:
        if known is None:
            raise
        log.warning("%s; using the version downloaded before", error)
        return known
    model = _choose_file(model, files, on_choice)
    revision = _select_files(model, commit, files)
    directory = cache / f"models--{model.repository.replace('/', '--')}"
    total = sum(size or 0 for size in revision.sizes.values())
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(directory)
        revision = _with_index(model, revision, cache, directory)
        total = sum(size or 0 for size in revision.sizes.values())
        if not _is_complete(directory, revision):
            with show_progress(f"Downloading {model.name}", progress) as report:
                _download(
                    model, revision, cache, lambda: report(min(directory_bytes(directory / "blobs"), total), total)
                )
                report(total, total)
        snapshot = _snapshot(directory, revision)
        if not _is_complete(directory, revision):
            raise ModelError(f"cannot download {model.name}: files in {snapshot} are incomplete; try again")
        found = snapshot if model.file is None else snapshot / model.file
        # Find a chosen file by its full name, too.
        for name in {model.name, model.name if model.file is None else f"hf:{model.repository}/{model.file}"}:
            _note_file(cache, name).write_text(str(found.relative_to(cache)), encoding="utf-8")
    except OSError as error:
        raise storage_failure(model.name, cache, total, error) from error
    return found


def _note_file(cache: Path, name: str) -> Path:
    return cache / f"{re.sub('[/:]', '--', name.removeprefix('hf:'))}.fetched"


def _read_note(note: Path) -> Path | None:
    """What the note says was downloaded, if it still exists."""
    try:
        found = note.parent / note.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    return found if found.exists() else None


def _list_files(model: HubModel) -> tuple[str, Sizes]:
    """The current commit, and its files."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ModelError(f"{model.name} needs the Hugging Face client; run: {install_extra('hf')}") from error
    try:
        info = HfApi().model_info(model.repository, files_metadata=True)
    except Exception as error:  # the client's error classes change between versions
        raise ModelError(f"cannot download {model.name}: {_reason(model, error)}") from error
    return str(info.sha), {each.rfilename: each.size for each in info.siblings or ()}


def _choose_file(model: HubModel, files: Sizes, on_choice: OnChoice | None) -> HubModel:
    """Choose one of the repository's .gguf files, unless it has safetensors files, which are then the model."""
    if model.file is not None:
        return model
    found = gguf_files(files)
    has_weights = any(name.endswith(".safetensors") for name in files)
    if not found or (model.quantisation is None and has_weights and CONFIG in files):
        if model.quantisation is not None:
            raise ModelError(f"{model.name}: the repository has no .gguf files, so there is no quantisation to choose")
        return model
    choice = choose(model.name, found, model.quantisation, total_memory(read_memory_limits()))
    log.info("%s: using %s, %s", model.name, choice.chosen, choice.why)
    if on_choice is not None:
        on_choice(choice)
    return model.only(choice.chosen.name)


def _select_files(model: HubModel, commit: str, files: Sizes) -> _Revision:
    sizes = {name: size for name, size in files.items() if model.matches(name)}
    if not sizes and model.file is None:
        raise ModelError(f"{model.name} has neither a config.json nor .gguf files, so it is not a model")
    if not sizes:
        some = ", ".join(sorted(name for name in files if name.endswith(".gguf"))[:5])
        advice = f"; it has {some}" if some else ""
        raise ModelError(f"cannot download {model.name}: the repository has no such file{advice}")
    others = files.keys() - sizes.keys() if model.index in sizes else ()
    beside = {name: files[name] for name in others if "/" not in name and name.endswith(".safetensors")}
    return _Revision(commit, sizes, beside)


def _with_index(model: HubModel, revision: _Revision, cache: Path, directory: Path) -> _Revision:
    """Download the index first, if it may name more files."""
    if not revision.others or model.index is None:
        return revision
    index = replace(revision, sizes={model.index: revision.sizes[model.index]})
    if not _is_complete(directory, index):
        _download(model, index, cache, lambda: None)
    found = read_json(_snapshot(directory, revision) / model.index, _MAX_INDEX_BYTES) or {}
    places = found.get("weight_map")
    named = set(map(str, places.values())) if isinstance(places, dict) else set()
    more = {name: size for name, size in revision.others.items() if name in named}
    return replace(revision, sizes=revision.sizes | more)


def _reason(model: HubModel, error: Exception) -> str:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if "GatedRepoError" in kinds:
        return f"access must be requested at {endpoint}/{model.repository}; then set HF_TOKEN"
    if "RepositoryNotFoundError" in kinds:
        return f"{endpoint} has no public repository {model.repository}; check the name, or set HF_TOKEN"
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{said} (is {endpoint} reachable?)"


def _snapshot(directory: Path, revision: _Revision) -> Path:
    return directory / "snapshots" / revision.commit


def _is_complete(directory: Path, revision: _Revision) -> bool:
    snapshot = _snapshot(directory, revision)
    found = {name: _size(snapshot / name) for name in revision.sizes}
    return all(found[name] is not None and size in (None, found[name]) for name, size in revision.sizes.items())


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _download(model: HubModel, revision: _Revision, cache: Path, on_tick: Callable[[], None]) -> None:
    command = [sys.executable, "-c", _DOWNLOAD, model.repository, revision.commit, str(cache), *revision.sizes]
    environment = os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    output, failed = run_client(command, environment, on_tick, _stop)
    if failed:
        raise ModelError(f"cannot download {model.name}: {_last_line(output)}; try again to resume")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the client, and remove its unfinished files, which it never resumes."""
    opened: list[str] = []
    with suppress(psutil.Error):
        opened = [file.path for file in psutil.Process(process.pid).open_files()]
    process.kill()
    process.wait()
    for path in opened:
        if fnmatch(path, _UNFINISHED):
            Path(path).unlink(missing_ok=True)


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "the client failed without a message"


def _remove_abandoned(directory: Path) -> None:
    """Remove files of clients that were killed. One that is still being written is recent."""
    for path in (directory / "blobs").glob(_UNFINISHED):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
                path.unlink()

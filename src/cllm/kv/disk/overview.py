"""What is in a directory, and clearing it: for `cllm cache`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cllm.kv.disk.directory import KNOWN_NAME, Directory, SegmentFile
from cllm.kv.disk.files import Files
from cllm.kv.disk.format import DamagedError, OtherVersionError
from cllm.kv.disk.segment import scan


@dataclass(slots=True)
class ModelOnDisk:
    """One model with its settings: other K/V types or another engine make another one."""

    folder: str
    about: dict[str, str | int] = field(default_factory=dict)
    segments: int = 0
    bytes: int = 0
    blocks: int = 0
    block_tokens: int = 0
    sequences: int = 0
    damaged: int = 0
    """Damaged or unfinished files: never used, and removed by the next server that finds them."""
    other_versions: int = 0
    unreadable: int = 0
    """Files that cannot be read."""
    used_ns: int = 0
    """When it was last used."""

    @property
    def tokens(self) -> int:
        return self.blocks * self.block_tokens

    @property
    def name(self) -> str:
        return str(self.about.get("model", "unknown"))


@dataclass(slots=True)
class Overview:
    models: list[ModelOnDisk]
    foreign: int
    """Files that are not ours."""

    @property
    def bytes(self) -> int:
        return sum(model.bytes for model in self.models)


def overview(root: Path, files: Files | None = None) -> Overview:
    """Read all headers. Nothing is changed."""
    directory = Directory(str(root), files or Files())
    survey = directory.survey()
    models: dict[str, ModelOnDisk] = {}
    for found in survey.files:
        _count(directory, found, models.setdefault(found.folder, ModelOnDisk(found.folder)))
    return Overview(sorted(models.values(), key=lambda model: -model.used_ns), survey.foreign)


def _count(directory: Directory, found: SegmentFile, model: ModelOnDisk) -> None:
    try:
        with directory.opened(found.path) as file:
            segment, torn = scan(directory.files, file, found.path)
    except DamagedError:
        model.damaged += 1
    except OtherVersionError:
        model.other_versions += 1
    except FileNotFoundError:
        return
    except OSError:
        model.unreadable += 1
    else:
        model.about = model.about or dict(segment.header.about)
        model.block_tokens = segment.header.block_tokens
        model.sequences += segment.is_sequence
        model.blocks += 0 if segment.is_sequence else segment.count
        model.damaged += torn
    model.segments += 1
    model.bytes += found.size
    model.used_ns = max(model.used_ns, found.modified_ns)


def clear(root: Path, wanted: Callable[[ModelOnDisk], bool], files: Files | None = None) -> tuple[int, int]:
    """Remove the models for which `wanted` is true; returns how many files and bytes.

    Running servers notice. Foreign files are not touched.
    """
    directory = Directory(str(root), files or Files())
    survey = directory.survey()
    if not survey.files:
        return 0, 0
    with directory.locked() as tally:
        models = {model.folder: model for model in overview(root, files).models}
        count = size = 0
        failure: OSError | None = None
        for found in directory.survey().files:
            model = models.get(found.folder)
            if model is None or not wanted(model):
                continue
            try:
                directory.files.remove(found.path)
            except FileNotFoundError:
                continue
            except OSError as error:  # the others go all the same
                failure = failure or error
                continue
            count += 1
            size += found.size
        for folder in models:
            with suppress(OSError):  # not empty
                directory.files.remove_directory(directory.path_in(folder))
        with suppress(OSError):
            tally.forget()
        if not directory.survey().files:
            with suppress(OSError):
                directory.files.remove(directory.path_in(KNOWN_NAME))
    if failure is not None:
        raise failure
    return count, size

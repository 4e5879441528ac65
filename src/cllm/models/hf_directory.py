"""A Hugging Face directory as a model: its configuration, checked, and where its tensors lie.

config.json                                    what the model is
model.safetensors                              its weights, in one file,
model.safetensors.index.json, model-00001-…    or in parts
tokenizer.json, tokenizer_config.json, …       its text side, read in text/
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cllm.errors import ModelError
from cllm.models.gguf_header import short
from cllm.models.hf_config import HFNumbers, read_config
from cllm.models.json_file import AGAIN, Fields, read_json
from cllm.models.safetensors_file import StoredTensor, read_header
from cllm.models.shape import ModelShape
from cllm.models.stamped_file import FileStamp

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FETCHED = (
    *(CONFIG, "generation_config.json", "model*.safetensors", INDEX),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"),
)
"""The files of a repository that are used, beside those that its index names."""

_MOST_CONFIG_BYTES = 1 << 20
_MOST_INDEX_BYTES = 64 << 20
_MOST_PARTS = 4096


@dataclass(frozen=True, slots=True)
class HFModel:
    path: Path
    name: str
    shape: ModelShape
    numbers: HFNumbers
    config: Mapping[str, Any] = field(repr=False)
    stamps: Mapping[Path, FileStamp] = field(repr=False)
    """Of the files that hold the tensors, as they were when their headers were read."""
    tensors: Mapping[str, StoredTensor] = field(repr=False)

    @property
    def weight_type(self) -> str | None:
        """That of most of its tensors."""
        kinds = Counter(tensor.dtype for tensor in self.tensors.values())
        return kinds.most_common(1)[0][0] if kinds else None

    @classmethod
    def open(cls, path: Path) -> HFModel:
        """Read and check everything but the weights. Every problem is a `ModelError` that names the file."""
        config = read_json(path / CONFIG, _MOST_CONFIG_BYTES)
        if config is None:
            raise ModelError(f"{path}: has no {CONFIG}, so it is no Hugging Face model; give another directory")
        shape, numbers = read_config(Fields(path / CONFIG, config))
        stamps, tensors = _read_tensors(path)
        return cls(path, path.resolve().name, shape, numbers, config, stamps, tensors)


def is_hf_directory(path: Path) -> bool:
    return (path / CONFIG).is_file()


def _read_tensors(path: Path) -> tuple[dict[Path, FileStamp], dict[str, StoredTensor]]:
    whole = path / WEIGHTS
    if whole.exists():
        stamp, tensors = read_header(whole)
        return {whole: stamp}, tensors
    places = _read_index(path)
    stamps: dict[Path, FileStamp] = {}
    found: dict[str, StoredTensor] = {}
    for part in sorted(set(places.values())):
        stamps[path / part], tensors = read_header(path / part)
        found |= {name: tensor for name, tensor in tensors.items() if places.get(name) == part}
    if missing := places.keys() - found.keys():
        name = min(missing)
        raise ModelError(f"{path / places[name]}: lacks the tensor {short(name)} that {INDEX} puts there; {AGAIN}")
    return stamps, found


def _read_index(path: Path) -> dict[str, str]:
    """Which file holds which tensor."""
    index = path / INDEX
    found = read_json(index, _MOST_INDEX_BYTES)
    if found is None:
        others = "; weights in .bin files are not read, since they can run code" if any(path.glob("*.bin")) else ""
        raise ModelError(f"{path}: has neither {WEIGHTS} nor {INDEX}{others}; fetch it with its safetensors files")
    places = found.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ModelError(f"{index}: weight_map is {short(places)}, not a list of files; {AGAIN}")
    for name, part in places.items():
        if not _is_plain(part):
            raise ModelError(
                f"{index}: puts {short(name)} into {short(part)}, which is no file of this directory; {AGAIN}"
            )
    if len(set(places.values())) > _MOST_PARTS:
        raise ModelError(f"{index}: names more than {_MOST_PARTS} files; {AGAIN}")
    return places


def _is_plain(part: Any) -> bool:
    """The name of a file beside the index, and of nothing elsewhere."""
    return isinstance(part, str) and part.endswith(".safetensors") and not set(part) & set("/\\:\0")

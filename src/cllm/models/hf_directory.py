"""A Hugging Face directory as a model: its configuration, validated, and the location of its tensors.

config.json                                    architecture and sizes
model.safetensors                              the weights in one file,
model.safetensors.index.json, model-00001-…    or in parts
tokenizer.json, tokenizer_config.json, …       read by text/
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm.errors import ModelError
from cllm.models.gguf_header import short
from cllm.models.hf_architectures import HFArchitecture
from cllm.models.hf_config import find_architecture, read_config, text_part
from cllm.models.hf_recurrence import read_row_factors
from cllm.models.hf_tensors import text_tensors
from cllm.models.json_file import FETCH_AGAIN, Fields, read_json
from cllm.models.safetensors_file import StoredTensor, read_header
from cllm.models.spec import ModelSpec
from cllm.models.tensors import HF_HEAD
from cllm.models.unchanged_file import FileStamp

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FETCHED = (
    *(CONFIG, "generation_config.json", "model*.safetensors", INDEX),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"),
)
"""The files of a repository to download, in addition to those its index names."""

_MAX_CONFIG_BYTES = 1 << 20
_MAX_INDEX_BYTES = 64 << 20
_MAX_PARTS = 4096


@dataclass(frozen=True, slots=True)
class HFModel:
    path: Path
    name: str
    spec: ModelSpec
    architecture: HFArchitecture
    config: Mapping[str, Any] = field(repr=False)
    stamps: Mapping[Path, FileStamp] = field(repr=False)
    """Identify the weight files whose headers were read."""
    tensors: Mapping[str, StoredTensor] = field(repr=False)
    """A model of more than text has those of its text part here, as if there were nothing else."""
    row_factors: Mapping[str, NDArray[np.float32]] = field(default_factory=dict, repr=False)
    """By what rows of matrices are multiplied when they are loaded: one number by role, or one for each row."""
    left_aside: int = 0
    """Layers behind the others that predict further tokens (MTP), which are not used."""

    @property
    def weight_type(self) -> str | None:
        """The type of most of its tensors."""
        kinds = Counter(tensor.dtype for tensor in self.tensors.values())
        return kinds.most_common(1)[0][0] if kinds else None

    @classmethod
    def open(cls, path: Path) -> HFModel:
        """Read and check everything but the weights. Every problem is a `ModelError` that names the file."""
        config = read_json(path / CONFIG, _MAX_CONFIG_BYTES)
        if config is None:
            raise ModelError(f"{path}: has no {CONFIG}, so it is not a Hugging Face model; use another directory")
        fields = Fields(path / CONFIG, config)
        text = text_part(fields)
        architecture = find_architecture(text or fields)
        spec = read_config(text or fields, architecture)
        stamps, tensors = _read_tensors(path)
        if text is not None:
            tensors = text_tensors(tensors)
        if spec.recurrent and spec.n_layers > len(tensors):
            raise ModelError(f"{path}: has {len(tensors)} tensors, too few for {spec.n_layers} layers; {FETCH_AGAIN}")
        tied = config.get("tie_word_embeddings")
        spec = replace(spec, tied=HF_HEAD not in tensors if tied is None else fields.flag("tie_word_embeddings", False))
        factors = read_row_factors(text or fields, spec.layers[0].recurrence)
        aside = (text or fields).values.get("mtp_num_hidden_layers")
        aside = max(0, aside) if type(aside) is int and spec.recurrent else 0
        return cls(path, path.resolve().name, spec, architecture, config, stamps, tensors, factors, aside)


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
        raise ModelError(
            f"{path / places[name]}: has no tensor {short(name)}, which {INDEX} says it has; {FETCH_AGAIN}"
        )
    return stamps, found


def _read_index(path: Path) -> dict[str, str]:
    """Which file holds which tensor."""
    index = path / INDEX
    found = read_json(index, _MAX_INDEX_BYTES)
    if found is None:
        others = "; .bin files are not supported, since they can run code" if any(path.glob("*.bin")) else ""
        raise ModelError(f"{path}: has neither {WEIGHTS} nor {INDEX}{others}; download its safetensors files")
    places = found.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ModelError(f"{index}: weight_map is {short(places)}, not an object of file names; {FETCH_AGAIN}")
    for name, part in places.items():
        if not _is_plain(part):
            raise ModelError(
                f"{index}: puts {short(name)} into {short(part)}, which is not a file of this directory; {FETCH_AGAIN}"
            )
    if len(set(places.values())) > _MAX_PARTS:
        raise ModelError(f"{index}: names more than {_MAX_PARTS} files; {FETCH_AGAIN}")
    return places


def _is_plain(part: Any) -> bool:
    """Whether this is the name of a file in the same directory."""
    return isinstance(part, str) and part.endswith(".safetensors") and not set(part) & set("/\\:\0")

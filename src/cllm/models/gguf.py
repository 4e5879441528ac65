"""A GGUF model file: its header, validated, and the bytes of its tensors.

Every problem with the file, now or while it is read, becomes a `ModelError` of one line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from gguf import GGMLQuantizationType, LlamaFileType
from numpy.typing import NDArray

from cllm.errors import ModelError
from cllm.models import gguf_states
from cllm.models.gguf_header import DamagedError, HeaderReader, TensorInfo, short
from cllm.models.gguf_keys import Keys
from cllm.models.spec import MOST_LAYERS, AttentionSpec, LayerSpec, ModelSpec
from cllm.models.unchanged_file import FileStamp, UnchangedFile, unreadable

T = TypeVar("T")

_ADVICE = "use another .gguf file"
DAMAGED_ADVICE = f"download it again or {_ADVICE}"

_POOLING: dict[int, Literal["last", "mean", "cls"]] = {1: "mean", 2: "cls", 3: "last"}
_RANK = 4
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,8})\.")


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """The header of one model file: metadata and tensor directory."""

    path: Path
    name: str
    spec: ModelSpec
    """Sizes alone: `gguf_decoder.decoder_spec` says what else there is to a model that we run ourselves."""
    stamp: FileStamp
    """Identifies the file whose header was read."""
    metadata: Mapping[str, Any] = field(repr=False)
    """Scalars as Python values, arrays of strings as lists, arrays of numbers as numpy arrays."""
    tensors: Mapping[str, TensorInfo] = field(repr=False)

    @property
    def keys(self) -> Keys:
        return Keys(self.path, self.spec.architecture, self.metadata)

    @property
    def size_bytes(self) -> int:
        return self.stamp.size

    @property
    def weight_type(self) -> str | None:
        """What the file says it is, such as Q4_K_M, if it has such tensors; otherwise the type of most of its bytes."""
        kinds = {GGMLQuantizationType(tensor.type).name for tensor in self.tensors.values()}
        stated = _stated_type(self.metadata.get("general.file_type"))
        if stated is not None and any(_family(kind) == _family(stated) for kind in kinds):
            return stated
        sizes: dict[int, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.size
        if not sizes:
            return None
        most = max(sizes, key=lambda kind: sizes[kind])
        return str(GGMLQuantizationType(most).name)

    @property
    def left_aside(self) -> int:
        """Layers behind the others that predict further tokens (MTP), which are not used."""
        return self.keys.count("nextn_predict_layers", 0) if self.spec.recurrent else 0

    def leaves_aside(self, tensor: str) -> bool:
        """Whether a tensor belongs to such a layer."""
        found = _LAYER.match(tensor)
        behind = int(found[1]) - self.spec.n_layers if found is not None else -1
        return behind >= 0 and behind < self.left_aside

    def get(self, key: str, default: T) -> T:
        """The value of `key`, which must be of the default's type (a `None` default takes any type)."""
        return self.keys.get(key, default)

    def strings(self, key: str) -> list[str]:
        """The strings of an array; empty if the key is missing."""
        return self.keys.strings(key)

    def numbers(self, key: str, kind: type[int] | type[float]) -> list[Any]:
        """The numbers of an array, all of that kind; empty if the key is missing."""
        value: list[Any] = self.get(key, [])
        if value and type(value[0]) is not kind:
            raise self.keys.wrong_kind(key, f"a list of {type(value[0]).__name__}", f"a list of {kind.__name__}")
        return value

    @property
    def pooling(self) -> Literal["last", "mean", "cls"]:
        """Which hidden states make an embedding; by default the last one, the only one that has seen the whole text."""
        return _POOLING.get(self._pooling_type, "last")

    @property
    def ranks(self) -> bool:
        """Whether the model is a reranker: its head scores how well a document answers a query."""
        return self._pooling_type == _RANK

    @property
    def is_causal(self) -> bool:
        """Whether a token attends only to those before it. Otherwise the model cannot generate."""
        return self.get(f"{self.spec.architecture}.attention.causal", True)

    @property
    def _pooling_type(self) -> int:
        return self.get(f"{self.spec.architecture}.pooling_type", 0)

    def check_unchanged(self) -> None:
        """Raise `ModelError` if the file is no longer the one whose header was read."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise unreadable(self.path, error, _ADVICE) from error
        self.stamp.check(self.path, status)

    @classmethod
    def open(cls, path: Path) -> GGUFModel:
        """Read and check the header of `path`. Every problem is a `ModelError` that names the file."""
        try:
            with path.open("rb") as file:
                stamp = FileStamp.of(os.fstat(file.fileno()))
                metadata, tensors = HeaderReader(file, stamp.size).read()
        except OSError as error:
            raise unreadable(path, error, _ADVICE) from error
        except DamagedError as error:
            raise ModelError(f"{path}: {error}; {DAMAGED_ADVICE}") from error
        keys = Keys(path, _architecture(metadata, path), metadata)
        name = keys.get("general.name", "") or path.stem
        return cls(path, name, _read_sizes(keys, tied="output.weight" not in tensors), stamp, metadata, tensors)


class TensorFile(UnchangedFile):
    """The bytes of the tensors. `with TensorFile(model) as file:` raises, also at its end, if the file has changed."""

    def __init__(self, model: GGUFModel) -> None:
        super().__init__(model.path, model.stamp, _ADVICE)
        self._model = model

    def __enter__(self) -> TensorFile:
        super().__enter__()
        return self

    def read(self, name: str, start: int = 0, size: int | None = None) -> NDArray[np.uint8]:
        """The tensor's bytes, or `size` of them from `start` on; valid until the next call."""
        info = self._model.tensors[name]
        return self.read_bytes(info.offset + start, info.size - start if size is None else size, f"the tensor {name}")


def _stated_type(value: object) -> str | None:
    """The name of a general.file_type. A converter that was not told the type sets a bit beside the one it guessed."""
    if not isinstance(value, int):
        return None
    try:
        name: str = LlamaFileType(value & ~LlamaFileType.GUESSED).name
    except ValueError:  # damaged, or newer than the installed package gguf
        return None
    return name.partition("_")[2] or None


def _family(kind: str) -> str:
    """IQ3_M is a mix of IQ3_S and others, Q4_K_S one of Q4_K and others."""
    found = re.match(r"[A-Z]+\d+", kind)
    return found[0] if found else kind


def _architecture(metadata: Mapping[str, Any], path: Path) -> str:
    found = Keys(path, "", metadata).get("general.architecture", "")
    if not re.fullmatch(r"[\w.-]{1,64}", found):
        wrong = f"is {short(found)}" if found else "is missing"
        raise ModelError(f"{path}: general.architecture {wrong}, so it is not a language model; use another .gguf file")
    return found


def _read_sizes(keys: Keys, *, tied: bool) -> ModelSpec:
    n_embd = keys.size("embedding_length")
    tokens = keys.strings("tokenizer.ggml.tokens")
    return ModelSpec(
        architecture=keys.architecture,
        n_embd=n_embd,
        n_vocab=len(tokens) or keys.size("vocab_size"),
        context_length=keys.size("context_length"),
        layers=_read_layers(keys, n_embd),
        tied=tied,
    )


def _read_layers(keys: Keys, n_embd: int) -> tuple[LayerSpec, ...]:
    n_layers = min(keys.size("block_count"), MOST_LAYERS)
    if gguf_states.carries_states(keys):
        return gguf_states.read_layers(keys, n_embd, n_layers)
    n_heads = keys.sizes("attention.head_count", n_layers)
    n_kv_heads = keys.sizes("attention.head_count_kv", n_layers, n_heads)
    full = [keys.size(f"attention.{part}_length", n_embd // n_heads[0]) for part in ("key", "value")]
    windowed = [
        keys.size(f"attention.{part}_length_swa", dim) for part, dim in zip(("key", "value"), full, strict=True)
    ]
    shared = keys.count("attention.shared_kv_layers", 0)
    sliding = keys.sliding(n_layers, 0) if windowed != full or shared else [False] * n_layers
    own = {kind: index for index, kind in enumerate(sliding[: n_layers - shared])}
    """The last layer of each kind that has K/V of its own."""
    found: dict[LayerSpec, LayerSpec] = {}
    layers = []
    for index, (heads, kv_heads, slides) in enumerate(zip(n_heads, n_kv_heads, sliding, strict=True)):
        kv_from = None if index < n_layers - shared else own.get(slides)
        dim_k, dim_v = windowed if slides else full
        layer = LayerSpec(AttentionSpec(heads, kv_heads, dim_k, dim_v, kv_from=kv_from))
        layers.append(found.setdefault(layer, layer))
    return tuple(layers)

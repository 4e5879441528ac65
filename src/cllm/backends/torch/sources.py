"""Models that torch can run, from Hugging Face directories and from GGUF files: what they are, and their weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType

import torch

from cllm.backends.torch.weights import TensorShape, WeightSource
from cllm.models.dequantise import DEQUANTISED, dequantised_rows
from cllm.models.gguf import GGUFModel, TensorFile
from cllm.models.gguf_decoder import decoder_spec, unsupported_reason
from cllm.models.gguf_rotation import FREQUENCIES, rope_dims
from cllm.models.hf_directory import HFModel
from cllm.models.json_file import FETCH_AGAIN
from cllm.models.spec import ModelSpec
from cllm.models.tensors import hf_name, in_halves
from cllm.models.unchanged_file import UnchangedFile

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_PIECE_BYTES = 16 << 20
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ROTATED = ("self_attn.q_proj.", "self_attn.k_proj.")


def unsupported(model: GGUFModel | HFModel) -> str | None:
    """Why torch cannot run this model, as one clause; None if it can, unless its files are damaged."""
    if isinstance(model, HFModel):
        wrong = next((name for name, tensor in model.tensors.items() if tensor.dtype not in _DTYPES), None)
        return None if wrong is None else f"its tensor {wrong} is of type {model.tensors[wrong].dtype}"
    if model.spec.architecture not in _ARCHITECTURES:
        return f"its architecture is {model.spec.architecture}, not one of {', '.join(_ARCHITECTURES)}"
    reason = unsupported_reason(model, DEQUANTISED)
    if reason is not None:
        return reason
    if "blk.0.attn_qkv.weight" in model.tensors:
        return "its queries, keys and values are one tensor"
    rotated, head_dim = rope_dims(model), model.spec.layers[0].attention.head_dim_k
    if rotated != head_dim or head_dim % 2:
        return f"its RoPE rotates {rotated} of {head_dim} dimensions of a head"
    return None


def spec_of(model: GGUFModel | HFModel) -> ModelSpec:
    return model.spec if isinstance(model, HFModel) else decoder_spec(model)


def open_source(model: GGUFModel | HFModel) -> AbstractContextManager[WeightSource]:
    """`with open_source(model) as source:` fails, also at its end, if the files have changed."""
    return DirectorySource(model) if isinstance(model, HFModel) else GGUFSource(model)


class DirectorySource:
    """The safetensors files of a directory."""

    def __init__(self, model: HFModel) -> None:
        self._model = model
        self._files: dict[Path, UnchangedFile] = {}
        self._stack = ExitStack()
        self.label = str(model.path)

    def __enter__(self) -> DirectorySource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, at)

    @property
    def names(self) -> Collection[str]:
        return self._model.tensors.keys()

    def shape(self, name: str) -> TensorShape:
        return self._model.tensors[name].shape

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        tensor = self._model.tensors[name]
        rows, *columns = tensor.shape
        row_bytes = tensor.size // rows
        step = max(1, _PIECE_BYTES // row_bytes)
        file = self._file(tensor.file)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            raw = file.read_bytes(tensor.offset + first * row_bytes, count * row_bytes, f"the tensor {name}")
            yield torch.from_numpy(raw).view(_DTYPES[tensor.dtype]).view(count, *columns)

    def _file(self, path: Path) -> UnchangedFile:
        if path not in self._files:
            self._files[path] = self._stack.enter_context(UnchangedFile(path, self._model.stamps[path], FETCH_AGAIN))
        return self._files[path]


class GGUFSource:
    """A GGUF file, dequantised. Of the architecture llama it has the rows of queries and keys in another order."""

    def __init__(self, model: GGUFModel) -> None:
        self._model = model
        self._file = TensorFile(model)
        self._stored = {hf_name(name): name for name in model.tensors if name != FREQUENCIES}
        self.label = str(model.path)

    def __enter__(self) -> GGUFSource:
        self._file.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.__exit__(kind, error, at)

    @property
    def names(self) -> Collection[str]:
        return self._stored.keys()

    def shape(self, name: str) -> TensorShape:
        return self._model.tensors[self._stored[name]].shape[::-1]

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        spec, is_vector = self._model.spec, len(self.shape(name)) == 1
        in_pairs = spec.architecture == "llama" and any(part in name for part in _ROTATED)
        head_dim = spec.layers[0].attention.head_dim_k
        for rows in dequantised_rows(self._file, self._model, self._stored[name], head_dim if in_pairs else 1):
            values = rows.reshape(-1) if is_vector else rows
            if in_pairs:
                values = in_halves(values, head_dim)
            yield torch.from_numpy(values if values.flags.writeable else values.copy())

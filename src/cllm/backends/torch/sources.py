"""Models that torch can run, from Hugging Face directories and from GGUF files: what they are, and their weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType

import torch

from cllm.backends.torch.weights import WeightSource
from cllm.errors import ModelError
from cllm.models.dequantise import DEQUANTISED, dequantised_rows
from cllm.models.features import FEATURES
from cllm.models.gguf import GGUFModel, TensorFile
from cllm.models.gguf_decoder import decoder_spec, unsupported_reason
from cllm.models.gguf_decoder import stored_tensors as tensors_of_gguf
from cllm.models.hf_directory import HFModel
from cllm.models.hf_tensors import is_unused, stored_tensors
from cllm.models.json_file import FETCH_AGAIN
from cllm.models.spec import ModelSpec
from cllm.models.tensors import TensorSpec
from cllm.models.unchanged_file import UnchangedFile

_PIECE_BYTES = 16 << 20
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def unsupported(model: GGUFModel | HFModel) -> str | None:
    """Why torch cannot run this model, as one clause; None if it can, unless its files are damaged."""
    if isinstance(model, HFModel):
        wrong = next((name for name, tensor in model.tensors.items() if tensor.dtype not in _DTYPES), None)
        return None if wrong is None else f"its tensor {wrong} is of type {model.tensors[wrong].dtype}"
    return unsupported_reason(model, DEQUANTISED, FEATURES)


def spec_of(model: GGUFModel | HFModel) -> ModelSpec:
    return model.spec if isinstance(model, HFModel) else decoder_spec(model)


def open_source(model: GGUFModel | HFModel) -> AbstractContextManager[WeightSource]:
    """`with open_source(model) as source:` fails, also at its end, if the files have changed."""
    return DirectorySource(model) if isinstance(model, HFModel) else GGUFSource(model)


class DirectorySource:
    """The safetensors files of a directory."""

    def __init__(self, model: HFModel) -> None:
        self.model = model
        self._files: dict[Path, UnchangedFile] = {}
        self._stack = ExitStack()
        self.label = str(model.path)

    def __enter__(self) -> DirectorySource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, at)

    def tensors(self, spec: ModelSpec) -> Iterator[TensorSpec]:
        known = set()
        for item, shape in stored_tensors(spec, self.model.architecture):
            stored = self.model.tensors.get(item.name)
            if stored is None:
                raise ModelError(f"{self.label}: the tensor {item.name} is missing; {FETCH_AGAIN}")
            if stored.shape != shape:
                has, should = (" x ".join(map(str, each)) for each in (stored.shape, shape))
                raise ModelError(
                    f"{self.label}: the tensor {item.name} is {has}, but should be {should}; {FETCH_AGAIN}"
                )
            known.add(item.name)
            yield item
        for name in self.model.tensors:
            if name not in known and not is_unused(name, spec):
                raise ModelError(f"{self.label}: the tensor {name} is unknown for this kind of model; use another one")

    def pieces(self, item: TensorSpec) -> Iterator[torch.Tensor]:
        tensor = self.model.tensors[item.name]
        rows, *columns = item.shape
        row_bytes = tensor.size // tensor.shape[0]
        step, file = max(1, _PIECE_BYTES // row_bytes), self._file(tensor.file)
        for first in range(item.first, item.first + rows, step):
            count = min(step, item.first + rows - first)
            raw = file.read_bytes(tensor.offset + first * row_bytes, count * row_bytes, f"the tensor {item.name}")
            piece = torch.from_numpy(raw).view(_DTYPES[tensor.dtype]).view(count, *columns)
            yield self._changed(item, first - item.first, piece)

    def _changed(self, item: TensorSpec, first: int, piece: torch.Tensor) -> torch.Tensor:
        """Rows from `first` on, as `cllm.models.tensors` says what is in them."""
        if item.role == "ssm_a":
            return -torch.exp(piece.float())
        if self.model.architecture.adds_one and item.role.endswith("norm") and item.role != "ssm_norm":
            return piece.float() + 1
        factors = self.model.row_factors.get(item.role)
        if factors is None:
            return piece
        own = factors if len(factors) == 1 else factors[first : first + len(piece)]
        return piece.float() * torch.from_numpy(own).view(-1, 1)

    def _file(self, path: Path) -> UnchangedFile:
        if path not in self._files:
            self._files[path] = self._stack.enter_context(UnchangedFile(path, self.model.stamps[path], FETCH_AGAIN))
        return self._files[path]


class GGUFSource:
    """A GGUF file, dequantised."""

    def __init__(self, model: GGUFModel) -> None:
        self.model = model
        self._file = TensorFile(model)
        self.label = str(model.path)

    def __enter__(self) -> GGUFSource:
        self._file.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.__exit__(kind, error, at)

    def tensors(self, spec: ModelSpec) -> Iterator[TensorSpec]:
        return tensors_of_gguf(self.model, spec)

    def pieces(self, item: TensorSpec) -> Iterator[torch.Tensor]:
        if len(item.shape) == 1:
            (whole,) = dequantised_rows(self._file, self.model, item.name)
            yield torch.from_numpy(whole.ravel()[item.first : item.first + item.cols].copy())
            return
        for rows in dequantised_rows(self._file, self.model, item.name, item.first, item.rows):
            yield torch.from_numpy(rows if rows.flags.writeable else rows.copy())

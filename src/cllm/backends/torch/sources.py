"""Models that torch can run, from Hugging Face directories and from GGUF files: what they are, and their weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from cllm.backends.torch.decoder import Decoder, llama3_divisors
from cllm.backends.torch.weights import HEAD, Shape, Source
from cllm.errors import ModelError
from cllm.models.dequantise import DEQUANTISED, dequantised_rows
from cllm.models.gguf import GGUFModel, TensorFile
from cllm.models.gguf_decoder import read_params, unsupported_reason
from cllm.models.hf_directory import HFModel
from cllm.models.json_file import FETCH_AGAIN
from cllm.models.unchanged_file import UnchangedFile

_PIECE_BYTES = 16 << 20
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ROPE_FREQS = "rope_freqs.weight"
_GGUF_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": HEAD,
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROTATED = ("self_attn.q_proj.", "self_attn.k_proj.")


def unsupported(model: GGUFModel | HFModel) -> str | None:
    """Why torch cannot run this model, as one clause; None if it can, unless its files are damaged."""
    if isinstance(model, HFModel):
        wrong = next((name for name, tensor in model.tensors.items() if tensor.dtype not in _DTYPES), None)
        return None if wrong is None else f"its tensor {wrong} is of type {model.tensors[wrong].dtype}"
    reason = unsupported_reason(model, DEQUANTISED)
    if reason is not None:
        return reason
    numbers, head_dim = read_params(model), model.shape.head_dim_k
    if numbers.rope_dims != head_dim or head_dim % 2:
        return f"its RoPE rotates {numbers.rope_dims} of {head_dim} dimensions of a head"
    return None


def decoder_of(model: GGUFModel | HFModel) -> Decoder:
    return _decoder_of_directory(model) if isinstance(model, HFModel) else _decoder_of_gguf(model)


def open_source(model: GGUFModel | HFModel) -> AbstractContextManager[Source]:
    """`with open_source(model) as source:` fails, also at its end, if the files have changed."""
    return DirectorySource(model) if isinstance(model, HFModel) else GGUFSource(model)


def _decoder_of_directory(model: HFModel) -> Decoder:
    shape, numbers, stretch = model.shape, model.params, model.params.llama3
    divisors = None
    if stretch is not None:
        divisors = llama3_divisors(
            numbers.rope_base,
            shape.head_dim_k,
            factor=stretch.factor,
            low=stretch.low,
            high=stretch.high,
            trained=stretch.trained,
        )
    return Decoder(
        n_layers=shape.n_layers,
        n_embd=shape.n_embd,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim_k,
        n_ff=numbers.n_ff,
        n_vocab=shape.n_vocab,
        rms_eps=numbers.rms_eps,
        rope_base=numbers.rope_base,
        context_length=shape.context_length,
        rope_scale=numbers.rope_scale,
        rope_divisors=divisors,
        qkv_bias=numbers.qkv_bias,
        output_bias=numbers.output_bias,
        head_norm=numbers.head_norm,
        tied=HEAD not in model.tensors if numbers.tied is None else numbers.tied,
    )


def _decoder_of_gguf(model: GGUFModel) -> Decoder:
    shape, numbers = model.shape, read_params(model)
    return Decoder(
        n_layers=shape.n_layers,
        n_embd=shape.n_embd,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim_k,
        n_ff=numbers.n_ff,
        n_vocab=shape.n_vocab,
        rms_eps=numbers.rms_eps,
        rope_base=numbers.rope_base,
        context_length=shape.context_length,
        rope_scale=1.0 / numbers.rope_frequency_scale,
        rope_divisors=_read_divisors(model, numbers.rope_dims // 2) if _ROPE_FREQS in model.tensors else None,
        qkv_bias="blk.0.attn_q.bias" in model.tensors,
        head_norm=shape.architecture == "qwen3",
        tied="output.weight" not in model.tensors,
    )


def _read_divisors(model: GGUFModel, pairs: int) -> tuple[float, ...]:
    with TensorFile(model) as file:
        (values,) = dequantised_rows(file, model, _ROPE_FREQS)
    if values.shape != (1, pairs) or not (values > 0).all():
        raise ModelError(f"{model.path}: the tensor {_ROPE_FREQS} must have {pairs} positive factors; {FETCH_AGAIN}")
    return tuple(values[0].tolist())


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

    def shape(self, name: str) -> Shape:
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
        self._stored = {_hugging_face_name(name): name for name in model.tensors if name != _ROPE_FREQS}
        self.label = str(model.path)

    def __enter__(self) -> GGUFSource:
        self._file.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.__exit__(kind, error, at)

    @property
    def names(self) -> Collection[str]:
        return self._stored.keys()

    def shape(self, name: str) -> Shape:
        return self._model.tensors[self._stored[name]].shape[::-1]

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        shape, is_vector = self._model.shape, len(self.shape(name)) == 1
        in_pairs = shape.architecture == "llama" and any(part in name for part in _ROTATED)
        head_dim = shape.head_dim_k
        for rows in dequantised_rows(self._file, self._model, self._stored[name], head_dim if in_pairs else 1):
            values = rows.reshape(-1) if is_vector else rows
            if in_pairs:
                values = _in_halves(values, head_dim)
            yield torch.from_numpy(values if values.flags.writeable else values.copy())


def _hugging_face_name(name: str) -> str:
    """The name of a tensor that `unsupported` knows; others, in damaged files, are unknown under any name."""
    if name in _GGUF_OUTER:
        return _GGUF_OUTER[name]
    _, layer, rest = name.split(".", 2)
    role, _, kind = rest.rpartition(".")
    return f"model.layers.{layer}.{_GGUF_LAYER[role]}.{kind}"


def _in_halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Dimensions that are rotated together are neighbours in the file, and half a head apart in the model."""
    heads = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)

"""Real shapes, and the types their matrices have in a file.

What a step costs depends on shape and types, not on the values.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cllm.models.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, Rotation
from cllm_bench.errors import BenchError
from cllm_bench.kernels.layered import LAYERED, LayeredShape, Vector
from cllm_bench.random_blocks import BLOCK_TYPES, BlockType, fitting
from cllm_bench.random_vocabulary import SILENT

if TYPE_CHECKING:
    from cllm.models.gguf import GGUFModel

RMS_EPS = 1e-5
ROPE_BASE = 5e5
CONTEXT = 8192
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama."""

    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_ff: int
    n_vocab: int

    def spec(self, *, qk_norm: bool = False) -> ModelSpec:
        rotation = Rotation(ROPE_BASE, self.head_dim, neox=False)
        heads = self.n_heads, self.n_kv_heads, self.head_dim, self.head_dim
        layer = LayerSpec(
            AttentionSpec(*heads, rotation, qk_norm="head" if qk_norm else ""), FeedForwardSpec(self.n_ff)
        )
        return ModelSpec("llama", self.n_embd, self.n_vocab, 8192, (layer,) * self.n_layers, rms_eps=RMS_EPS, tied=True)

    @property
    def layered(self) -> LayeredShape:
        queries, keys = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        layer = {
            "attn_q": (queries, self.n_embd),
            "attn_k": (keys, self.n_embd),
            "attn_v": (keys, self.n_embd),
            "attn_output": (self.n_embd, queries),
            "ffn_gate": (self.n_ff, self.n_embd),
            "ffn_up": (self.n_ff, self.n_embd),
            "ffn_down": (self.n_embd, self.n_ff),
        }
        metadata = {
            "context_length": CONTEXT,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.n_heads,
            "attention.head_count_kv": self.n_kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": RMS_EPS,
            "rope.freq_base": ROPE_BASE,
            "rope.dimension_count": self.head_dim,
        }
        layers = range(self.n_layers)
        names = ["output_norm", *(f"blk.{n}.{role}_norm" for n in layers for role in ("attn", "ffn"))]
        vectors = [Vector(f"{name}.weight", (self.n_embd,)) for name in names]
        return LayeredShape("llama", self.n_embd, self.n_vocab, metadata, [layer] * self.n_layers, vectors)


_LLAMAS = {
    "135M": Shape(n_layers=30, n_embd=576, n_heads=9, n_kv_heads=3, head_dim=64, n_ff=1536, n_vocab=49152),
    "1B": Shape(n_layers=16, n_embd=2048, n_heads=32, n_kv_heads=8, head_dim=64, n_ff=8192, n_vocab=128256),
    "3B": Shape(n_layers=28, n_embd=3072, n_heads=24, n_kv_heads=8, head_dim=128, n_ff=8192, n_vocab=128256),
    "8B": Shape(n_layers=32, n_embd=4096, n_heads=32, n_kv_heads=8, head_dim=128, n_ff=14336, n_vocab=128256),
}
SHAPES = {**{name: shape.layered for name, shape in _LLAMAS.items()}, **LAYERED}
"""SmolLM2, Llama 3 in three sizes, and models of other architectures. The head is the embedding in all of them."""


class Mix(NamedTuple):
    """Which types a file has."""

    most: str
    head: str
    some: str
    """The type of the value and down matrices in about half of the layers."""


MIXES = {
    **{name: Mix(name, "q6_k", name) for name in ("q4_0", "q4_1", "q5_0", "q5_1")},
    **{name: Mix(name, name, name) for name in ("q8_0", "q6_k", "f16")},
    "q4_k_m": Mix("q4_k", "q6_k", "q6_k"),
    "q5_k_m": Mix("q5_k", "q6_k", "q6_k"),
}
"""By the names that llama.cpp gives to files, mixed as its quantiser does it."""
DEFAULT_MIX = "q4_k_m"
_VALUES = {"attn_v", "attn_qkv"}
"""Every layer that attends or carries a state has one of them."""
_EMBEDDINGS = {"token_embd", "per_layer_token_embd"}


def pick(shape: str, mix: str) -> tuple[LayeredShape, Mix]:
    """By the names a user gives."""
    if shape not in SHAPES:
        raise BenchError(f"--shape is {shape!r}; it must be one of {', '.join(SHAPES)}")
    if mix not in MIXES:
        raise BenchError(f"--type is {mix!r}; it must be one of {', '.join(MIXES)}")
    return SHAPES[shape], MIXES[mix]


@dataclass(frozen=True, slots=True)
class Matrix:
    layer: int
    """-1 for what is in no layer."""
    role: str
    rows: int
    columns: int
    type: BlockType

    @property
    def name(self) -> str:
        """In a file."""
        return f"blk.{self.layer}.{self.role}.weight" if self.layer >= 0 else f"{self.role}.weight"

    @property
    def bytes(self) -> int:
        return self.type.size(self.rows, self.columns)

    def pieces(self) -> Iterator[NDArray[np.uint8]]:
        """Random rows, always the same ones; activations keep their size from layer to layer. Control tokens and single
        bytes have none, so that answers are words, which are the same tokens when they are read again."""
        random = np.random.default_rng(zlib.crc32(self.name.encode()))
        silent = SILENT if self.role == "token_embd" else 0
        row_blocks = self.columns // self.type.weights
        step = max(1, _PIECE_BYTES // (row_blocks * self.type.bytes))
        for first in range(0, self.rows, step):
            count = min(step, self.rows - first)
            drawn = self.type.draw(random, count * row_blocks, self.columns**-0.5).reshape(count, -1)
            drawn[: max(0, silent - first)] = 0
            yield drawn


def matrices(shape: LayeredShape, mix: Mix) -> Iterator[Matrix]:
    """All of a model, in the order of a file."""
    yield _matrix(-1, "token_embd", (shape.n_vocab, shape.n_embd), mix.head)
    for role, sizes in shape.outer.items():
        yield _matrix(-1, role, sizes, mix.head if role in _EMBEDDINGS else "bf16")
    values = sum(bool(_VALUES & layer.keys()) for layer in shape.layers)
    value = 0
    for index, layer in enumerate(shape.layers):
        more = {"ffn_down": _gets_more_bits(index, len(shape.layers))}
        if here := _VALUES & layer.keys():
            more |= dict.fromkeys(here, _gets_more_bits(value, values))
            value += 1
        for role, sizes in layer.items():
            yield _matrix(index, role, sizes, mix.some if more.get(role) else mix.most)


def _matrix(layer: int, role: str, sizes: tuple[int, int], kind: str) -> Matrix:
    rows, columns = sizes
    return Matrix(layer, role, rows, columns, BLOCK_TYPES[fitting(kind, columns)])


def weight_bytes(shape: LayeredShape, mix: Mix) -> int:
    """The size of all matrices, as a file stores them."""
    return sum(matrix.bytes for matrix in matrices(shape, mix))


def file_weight_bytes(model: GGUFModel) -> float:
    """As the file stores them."""
    return float(sum(tensor.size for tensor in model.tensors.values()))


def file_read_per_token(model: GGUFModel) -> float:
    """Bytes of weights, as the file stores them, that a decoded token reads: of embeddings that are not the head, a row
    is next to nothing."""
    tensors = model.tensors
    unread = ["per_layer_token_embd.weight", *(["token_embd.weight"] if "output.weight" in tensors else [])]
    return file_weight_bytes(model) - sum(tensors[name].size for name in unread if name in tensors)


def file_macs_per_token(model: GGUFModel) -> float:
    """Multiply-adds with weights that a prompt's token takes; without the head, which only the last one needs."""
    heads = ("token_embd.weight", "output.weight", "per_layer_token_embd.weight")
    sizes = [info.shape for name, info in model.tensors.items() if name not in heads and len(info.shape) == 2]
    return float(sum(rows * columns for rows, columns in sizes))


def _gets_more_bits(layer: int, n_layers: int) -> bool:
    """The first and last eighth of the layers, and every third of those between."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2

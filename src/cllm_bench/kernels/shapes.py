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
from cllm_bench.random_blocks import BLOCK_TYPES, BlockType, fitting

if TYPE_CHECKING:
    from cllm.models.gguf import GGUFModel

RMS_EPS = 1e-5
ROPE_BASE = 5e5
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Shape:
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
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of those in each layer, by role."""
        queries, keys = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        return {
            "attn_q": (queries, self.n_embd),
            "attn_k": (keys, self.n_embd),
            "attn_v": (keys, self.n_embd),
            "attn_output": (self.n_embd, queries),
            "ffn_gate": (self.n_ff, self.n_embd),
            "ffn_up": (self.n_ff, self.n_embd),
            "ffn_down": (self.n_embd, self.n_ff),
        }


SHAPES = {
    "135M": Shape(n_layers=30, n_embd=576, n_heads=9, n_kv_heads=3, head_dim=64, n_ff=1536, n_vocab=49152),
    "1B": Shape(n_layers=16, n_embd=2048, n_heads=32, n_kv_heads=8, head_dim=64, n_ff=8192, n_vocab=128256),
    "3B": Shape(n_layers=28, n_embd=3072, n_heads=24, n_kv_heads=8, head_dim=128, n_ff=8192, n_vocab=128256),
    "8B": Shape(n_layers=32, n_embd=4096, n_heads=32, n_kv_heads=8, head_dim=128, n_ff=14336, n_vocab=128256),
}
"""SmolLM2, and Llama 3 in three sizes. The head is the embedding in all of them: each token reads all weights."""


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


def pick(shape: str, mix: str) -> tuple[Shape, Mix]:
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
        """Random rows, always the same ones; activations keep their size from layer to layer."""
        random = np.random.default_rng(zlib.crc32(self.name.encode()))
        row_blocks = self.columns // self.type.weights
        step = max(1, _PIECE_BYTES // (row_blocks * self.type.bytes))
        for first in range(0, self.rows, step):
            count = min(step, self.rows - first)
            yield self.type.draw(random, count * row_blocks, self.columns**-0.5).reshape(count, -1)


def matrices(shape: Shape, mix: Mix) -> Iterator[Matrix]:
    """All of a model, in the order of a file."""
    yield Matrix(-1, "token_embd", shape.n_vocab, shape.n_embd, BLOCK_TYPES[fitting(mix.head, shape.n_embd)])
    for layer in range(shape.n_layers):
        for role, (rows, columns) in shape.matrices.items():
            some = role in ("attn_v", "ffn_down") and _gets_more_bits(layer, shape.n_layers)
            kind = fitting(mix.some if some else mix.most, columns)
            yield Matrix(layer, role, rows, columns, BLOCK_TYPES[kind])


def norms(shape: Shape) -> list[str]:
    """Names of the vectors, all of which are ones."""
    layers = range(shape.n_layers)
    return ["output_norm.weight", *(f"blk.{n}.{role}_norm.weight" for n in layers for role in ("attn", "ffn"))]


def weight_bytes(shape: Shape, mix: Mix) -> int:
    """The size of all matrices, as a file stores them."""
    return sum(matrix.bytes for matrix in matrices(shape, mix))


def file_weight_bytes(model: GGUFModel) -> float:
    """As the file stores them."""
    return float(sum(tensor.size for tensor in model.tensors.values()))


def file_read_per_token(model: GGUFModel) -> float:
    """Bytes of weights, as the file stores them, that a decoded token reads: not those of a separate embedding."""
    tensors = model.tensors
    return file_weight_bytes(model) - (tensors["token_embd.weight"].size if "output.weight" in tensors else 0)


def file_macs_per_token(model: GGUFModel) -> float:
    """Multiply-adds with weights that a prompt's token takes; without the head, which only the last one needs."""
    spec = model.spec
    n_ff = model.get(f"{spec.architecture}.feed_forward_length", 0)
    attended = sum(attention.qkv_size + attention.output_size for attention in spec.attentions)
    return float(spec.n_embd * (attended + spec.n_layers * 3 * n_ff))


def _gets_more_bits(layer: int, n_layers: int) -> bool:
    """The first and last eighth of the layers, and every third of those between."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2

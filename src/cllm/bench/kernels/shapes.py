"""Engines with random weights of real shapes: what a step costs depends on the shape, not on the values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from cllm._native import Engine

_F32, _Q4_0 = 0, 2
_BLOCK, _BLOCK_BYTES = 32, 18
_SCALE = np.float16(0.01)


@dataclass(frozen=True, slots=True)
class Shape:
    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_ff: int
    n_vocab: int

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

    @property
    def macs_per_token(self) -> float:
        """Multiply-adds with weights that a prompt's token takes; without the head, which only the last one needs."""
        return float(self.n_layers * sum(rows * columns for rows, columns in self.matrices.values()))

    @property
    def weight_bytes(self) -> int:
        """About what the engine takes for the weights."""
        weights = int(self.macs_per_token) + self.n_vocab * self.n_embd
        return weights // _BLOCK * _BLOCK_BYTES


SHAPES = {
    "135M": Shape(n_layers=30, n_embd=576, n_heads=9, n_kv_heads=3, head_dim=64, n_ff=1536, n_vocab=49152),
    "1B": Shape(n_layers=16, n_embd=2048, n_heads=32, n_kv_heads=8, head_dim=64, n_ff=8192, n_vocab=128256),
    "8B": Shape(n_layers=32, n_embd=4096, n_heads=32, n_kv_heads=8, head_dim=128, n_ff=14336, n_vocab=128256),
}
"""SmolLM2, and Llama 3 in two sizes. The head is the embedding in all of them, so that each token reads all weights."""


def random_engine(shape: Shape, threads: int, instruction_set: str) -> Engine:
    """Weights of Q4_0. All layers have the same ones, each a copy of its own."""
    from cllm._native import Engine  # names of shapes are of use without it

    engine = Engine(
        instruction_set=instruction_set,
        threads=threads,
        rms_eps=1e-5,
        rope_base=5e5,
        rope_dims=shape.head_dim,
        rope_neox=False,
        rope_frequency_scale=1.0,
        **asdict(shape),
    )
    random = np.random.default_rng(0)
    ones = np.ones(shape.n_embd, np.float32).view(np.uint8)
    for role, (rows, columns) in shape.matrices.items():
        raw = _random_q4_0(random, rows, columns)
        for layer in range(shape.n_layers):
            engine.load(layer, role, _Q4_0, rows, columns, raw)
    for layer in range(shape.n_layers):
        for role in ("attn_norm", "ffn_norm"):
            engine.load(layer, role, _F32, 1, shape.n_embd, ones)
    raw = _random_q4_0(random, shape.n_vocab, shape.n_embd)
    engine.load(-1, "token_embd", _Q4_0, shape.n_vocab, shape.n_embd, raw)
    engine.load(-1, "output_norm", _F32, 1, shape.n_embd, ones)
    engine.seal()
    return engine


def _random_q4_0(random: np.random.Generator, rows: int, columns: int) -> NDArray[np.uint8]:
    """Blocks of a scale and 32 nibbles."""
    blocks = random.integers(0, 256, (rows * columns // _BLOCK, _BLOCK_BYTES), dtype=np.uint8)
    blocks[:, :2] = np.frombuffer(_SCALE.tobytes(), np.uint8)
    return blocks.reshape(-1)

"""The kernels in Triton's interpreter against the plain twin in float64; run by `test_torch_kernels.py`, which sets
TRITON_INTERPRET before anything is imported. Prints the errors found, by name, as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import torch

from cllm.backends.torch import triton_operations
from cllm.backends.torch.arena import Arena
from cllm.backends.torch.batch import StepBatch, make_batch
from cllm.backends.torch.decoder import Decoder
from cllm.backends.torch.model import Layer, Model, Weights
from cllm.backends.torch.operations import PlainOperations
from cllm.backends.torch.triton_operations import TritonOperations
from cllm.kv.ops import BlockGeometry
from torch_kit import BLOCK, chunk

CPU = torch.device("cpu")
TRITON, PLAIN = TritonOperations(), PlainOperations()
# Small tiles, so that small shapes have several of them.
triton_operations.DECODE_SPLIT, triton_operations.DECODE_TILE = 32, 16
triton_operations.PROMPT_QUERIES, triton_operations.PROMPT_TILE = 16, 16


def decoder(*, head_norm: bool = False, group: int = 2, head_dim: int = 16) -> Decoder:
    return Decoder(2, 64, 2 * group, 2, head_dim, 96, 100, 1e-5, 10000.0, 512, head_norm=head_norm)


def batches() -> Iterator[tuple[str, StepBatch]]:
    far = [40, 3, 17, 5, 22, 9]
    mixed = [
        chunk(range(18), 7, [30, 31]),  # a chunk over what is cached
        chunk([9], 80, far),  # three splits
        chunk([9], 0, [41]),
        chunk(range(3), 0, [42]),
        chunk([9], 31, [43, 44]),  # one split, full
        chunk(range(5), 79, far[::-1]),
    ]
    yield "mixed", make_batch(mixed, BLOCK, CPU)
    yield "decode", make_batch([mixed[1], mixed[2], mixed[4]], BLOCK, CPU)
    yield "prompt", make_batch([chunk(range(17), 0, [1, 2])], BLOCK, CPU)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(found).all()
    return float((found.double() - expected).norm() / expected.norm())


def arenas(shape: Decoder, kv_type: str) -> tuple[Arena, Arena]:
    """One filled at random, and the same in float64."""
    arena, exact = (Arena(shape, BlockGeometry(48, BLOCK), kind) for kind in (kv_type, "f32"))
    arena.data.copy_(torch.randn(arena.data.shape))
    exact.data = arena.data.double()
    return arena, exact


def attention(shape: Decoder, batch: StepBatch, dtype: torch.dtype, kv_type: str) -> dict[str, float]:
    torch.manual_seed(0)
    arena, exact = arenas(shape, kv_type)
    qkv = torch.randn(len(batch.tokens), shape.qkv_size).to(dtype)
    norms = [torch.rand(shape.head_dim).to(dtype) if shape.head_norm else None for _ in range(2)]
    rotations = shape.rotations(512)
    queries = TRITON.rotate_and_store(qkv, *norms, shape, rotations, batch, arena, 1)
    wide = [None if norm is None else norm.double() for norm in norms]
    expected = PLAIN.rotate_and_store(qkv.double(), *wide, shape, rotations.double(), batch, exact, 1)
    errors = {"queries": relative(queries, expected), "kv": relative(arena.data, exact.data)}
    errors["attend"] = relative(TRITON.attend(queries, arena, 1, batch), PLAIN.attend(expected, exact, 1, batch))
    return errors


def elementwise(dtype: torch.dtype) -> dict[str, float]:
    torch.manual_seed(1)
    x, residual, weight = (torch.randn(*size).to(dtype) for size in ((5, 72), (5, 72), (72,)))
    gate_up = torch.randn(5, 2 * 1500).to(dtype)
    summed, exact = residual.clone(), residual.double()
    normed = TRITON.add_rms_norm(x, summed, weight, 1e-5)
    expected = PLAIN.add_rms_norm(x.double(), exact, weight.double(), 1e-5)
    return {
        "norm": relative(TRITON.rms_norm(x, weight, 1e-5), PLAIN.rms_norm(x.double(), weight.double(), 1e-5)),
        "add_norm": relative(normed, expected),
        "residual": relative(summed, exact),
        "silu": relative(TRITON.silu_multiply(gate_up), PLAIN.silu_multiply(gate_up.double())),
    }


def whole_step(batch: StepBatch) -> dict[str, float]:
    shape = decoder(head_norm=True)
    torch.manual_seed(2)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns) * columns**-0.5

    def layer() -> Layer:
        norms = [torch.rand(size) for size in (shape.n_embd, shape.head_dim, shape.head_dim, shape.n_embd)]
        bias, output = torch.randn(shape.qkv_size), matrix(shape.n_embd, shape.q_size)
        gate_up, down = matrix(2 * shape.n_ff, shape.n_embd), matrix(shape.n_embd, shape.n_ff)
        return Layer(norms[0], matrix(shape.qkv_size, shape.n_embd), bias, *norms[1:3], output, norms[3], gate_up, down)

    embedding = torch.randn(shape.n_vocab, shape.n_embd)
    weights = Weights(embedding, [layer(), layer()], torch.rand(shape.n_embd), matrix(shape.n_vocab, shape.n_embd))
    arena, other = arenas(shape, "f32")
    found = Model(shape, weights, TRITON, 512).forward(batch, arena)
    expected = Model(shape, weights, PLAIN, 512).forward(batch, other)
    return {"logits": relative(found, expected.double()), "kv": relative(arena.data, other.data)}


def main() -> None:
    errors: dict[str, float] = {}

    def add(label: str, found: dict[str, float]) -> None:
        errors.update({f"{label} {name}": error for name, error in found.items()})

    torch.set_grad_enabled(False)
    shapes = {"plain": decoder(), "norms": decoder(head_norm=True), "group of 3": decoder(group=3, head_dim=32)}
    known = dict(batches())
    mixed = known["mixed"]
    for label, shape in shapes.items():
        add(f"f32 mixed {label}", attention(shape, mixed, torch.float32, "f32"))
    for name in ("decode", "prompt"):
        add(f"f32 {name}", attention(shapes["norms"], known[name], torch.float32, "f32"))
    add("f32 step", whole_step(mixed))
    # The interpreter multiplies matrices of f16, but not of bf16.
    add("f16 mixed", attention(shapes["norms"], mixed, torch.float16, "f16"))
    add("bf16 cache", attention(shapes["plain"], mixed, torch.float16, "bf16"))
    for dtype, label in ((torch.float32, "f32"), (torch.bfloat16, "bf16"), (torch.float16, "f16")):
        add(label, elementwise(dtype))
    json.dump(errors, sys.stdout)


if __name__ == "__main__":
    main()

"""The operations by themselves, those of the fast mode and of the batch-invariant one, against the plain twin in
float64."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from cllm.backends.base import Chunk
from cllm.backends.torch.arena import Arena
from cllm.backends.torch.batch import StepBatch, make_batch
from cllm.backends.torch.device import choose_operations
from cllm.backends.torch.linear import quantise_rows
from cllm.backends.torch.operations import Operations, PlainOperations
from cllm.backends.torch.rotations import rotation_table
from cllm.backends.torch.shared_prefixes import SharedPrefixes, find_shared
from cllm.kv.ops import BlockGeometry
from cllm.models.spec import ModelSpec
from cllm_bench.kernels.shapes import Shape

from .work import Keep, Measures, Place

TYPES = {"f32": (torch.float32, 2e-3), "bf16": (torch.bfloat16, 1e-2), "f16": (torch.float16, 2e-3)}
"""Activation types, and how far a result may be from the twin's, relative to its size; the GPU takes f32 as tf32."""
KV_LIMITS = {"f32": 0.0, "bf16": 0.0, "f16": 0.0, "fp8": 8e-2, "int8": 2e-2}
"""What a type of K and V adds to that, where the twin has its own, exact ones."""
BLOCK = 16
ROWS_IN_FP8 = 4e-2
"""What it adds that rows are in fp8, too, where they meet weights that are."""
POOL_BLOCKS = 256
ALIKE = 1040
"""Tokens that rows begin with alike."""
EPS = 1e-5
PLAIN = PlainOperations()

Case = tuple[str, float, torch.Tensor, torch.Tensor]
"""What it is, how far it may be off, what came, what it is compared with."""


async def kernels(place: Place, keep: Keep) -> None:
    device = torch.device(place.device)
    if not place.on_gpu:
        torch.set_num_threads(1)
    with torch.inference_mode():
        keep("kernels", check_all(device, tiny=place.tiny))


def check_all(device: torch.device, *, tiny: bool) -> Measures:
    """The errors of all operations; `wrong` names those that are too large, and what fails altogether. `tiny`: of a
    few, quickly."""
    torch.manual_seed(0)
    fast = choose_operations(device)
    errors: dict[str, float] = {}
    wrong: list[str] = []
    for mode, operations in (("fast", fast), ("invariant", fast.invariant())):
        for name, cases in _cases(operations, device, tiny=tiny):
            try:
                for label, limit, found, expected in cases:
                    error = errors[f"{mode} {name} {label}"] = _relative(found, expected)
                    if not error <= limit:
                        wrong.append(f"{mode} {name} {label}: {error:.2g}, of {limit:g} at most")
            except Exception as failure:  # noqa: PERF203 - one that does not compile says nothing of the others
                wrong.append(f"{mode} {name}: {' '.join(str(failure).split())[-300:]}")
    largest = max(errors.values(), default=0.0)
    return {"compared": len(errors), "largest": largest, "wrong": wrong, "errors": errors}


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    if not torch.isfinite(found.float()).all():
        return float("nan")
    return float((found.double() - expected).norm() / expected.norm())


def _cases(operations: Operations, device: torch.device, *, tiny: bool) -> Iterator[tuple[str, Iterator[Case]]]:
    width = 256 if tiny else 4096
    for name in ("bf16",) if tiny else TYPES:
        dtype, limit = TYPES[name]
        some = partial(_some, device=device, dtype=dtype)
        yield name, _elementwise(operations, some, width, limit)
        yield name, _products(operations, some, width, limit)
        for kv_type in dict.fromkeys((name, "fp8", "int8")):
            for head_norm in (True,) if tiny else (False, True):
                spec = Shape(2, 512, 8, 2, 64, 512, 1000).spec(qk_norm=head_norm)
                label = f"{name}, K/V {kv_type}{', head norms' if head_norm else ''}"
                yield label, _attention(operations, spec, some, kv_type, limit)


Some = partial[torch.Tensor]


def _some(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _elementwise(operations: Operations, some: Some, width: int, limit: float) -> Iterator[Case]:
    x, residual, weight, gate_up = some(37, width), some(37, width), some(width), some(37, 7 * width)
    yield "rms_norm", limit, operations.rms_norm(x, weight, EPS), PLAIN.rms_norm(x.double(), weight.double(), EPS)
    summed, exact = residual.clone(), residual.double()
    found = operations.add_rms_norm(x, summed, weight, EPS)
    yield "add_rms_norm", limit, found, PLAIN.add_rms_norm(x.double(), exact, weight.double(), EPS)
    yield "residual", limit, summed, exact
    yield "silu_multiply", limit, operations.silu_multiply(gate_up), PLAIN.silu_multiply(gate_up.double())


def _products(operations: Operations, some: Some, width: int, limit: float) -> Iterator[Case]:
    weight, bias = some(width // 2, width) * width**-0.5, some(width // 2)
    forms: list[tuple[str, torch.Tensor, torch.Tensor | None]] = [("", weight, None)]
    if weight.dtype == torch.bfloat16:  # what models with weights in fp8 compute in
        small, scales = quantise_rows(weight)
        forms.append((" in fp8", small, scales))
    for label, stored, scales in forms:
        exact = stored.double() if scales is None else stored.double() * scales.double()[:, None]
        for rows in (1, 5, 64, 300):
            x = some(rows, width)
            found = operations.linear(x, stored, scales, bias)
            exactly = PLAIN.linear(x.double(), exact, None, bias.double())
            yield f"product of {rows} rows{label}", limit + (ROWS_IN_FP8 if scales is not None else 0.0), found, exactly
        if operations.one_row is not None:
            x, residual, norm = some(1, width), some(1, width), some(width)
            found, summed = operations.one_row(
                x, stored, scales=scales, residual=residual, norm=norm, eps=EPS, gated=True
            )
            wide = x.double() + residual.double()
            normed = PLAIN.rms_norm(wide, norm.double(), EPS)
            yield f"fused product{label}", limit, found, PLAIN.silu_multiply(PLAIN.linear(normed, exact, None))
            assert summed is not None
            yield f"sum of the fused product{label}", limit, summed, wide


# -- attention ----------------------------------------------------------------------------------------------------


def _mixed_rows() -> list[Chunk]:
    """A long chunk behind cached tokens, long and short rows of one token, a short prompt."""
    return [
        _chunk(200, 37, range(20, 40)),
        _chunk(1, 1500, range(100, 200)),
        _chunk(1, 0, [50]),
        _chunk(5, 0, [51]),
        _chunk(1, 63, range(60, 64)),
    ]


def _alike_rows() -> list[Chunk]:
    """Rows of one token that begin with the same blocks."""
    own = [range(100 + 3 * row, 103 + 3 * row) for row in range(20)]
    return [_chunk(1, ALIKE + 2 * row, [*range(ALIKE // BLOCK), *blocks]) for row, blocks in enumerate(own)]


def _chunk(tokens: int, start: int, blocks: Sequence[int]) -> Chunk:
    return Chunk(array("i", range(tokens)), start, True, blocks=list(blocks))


def _with_shared(batch: StepBatch) -> StepBatch:
    tables, lengths = batch.tables.cpu().numpy(), batch.lengths.cpu().numpy()
    groups = find_shared(tables, lengths, BLOCK, batch.longest)
    assert groups is not None, "rows that begin alike were not found"
    members, extents, firsts = (torch.from_numpy(part).to(batch.tables.device) for part in groups[:3])
    return replace(batch, shared=SharedPrefixes(members, extents, firsts, groups.split))


def _attention(operations: Operations, spec: ModelSpec, some: Some, kv_type: str, limit: float) -> Iterator[Case]:
    """Both fill their own cache: with what the rows have behind them, then with this step's tokens."""
    device = some.keywords["device"]
    attention = spec.layers[0].attention
    assert attention.rotation is not None
    rotations = rotation_table(attention.rotation, 4096).to(device)
    norm = some(attention.head_dim_k).sigmoid() if attention.qk_norm else None
    norm64 = None if norm is None else norm.double()
    mixed, alike = _mixed_rows(), _alike_rows()
    behind_alike = [_chunk(ALIKE, 0, alike[0].blocks), *(_chunk(row.start - ALIKE, ALIKE, row.blocks) for row in alike)]
    for rows, behind, what in (
        (mixed, [_chunk(row.start, 0, row.blocks) for row in mixed], ""),
        (alike, behind_alike, ", beginnings shared"),
    ):
        arena = Arena(spec, BlockGeometry(POOL_BLOCKS, BLOCK), kv_type, device)
        exact = Arena(spec, BlockGeometry(POOL_BLOCKS, BLOCK), "f32", device)
        exact.data = exact.data.double()
        batch = make_batch(rows, BLOCK, device)
        for part in (make_batch([chunk for chunk in behind if chunk.tokens], BLOCK, device), batch):
            qkv = some(len(part.tokens), attention.qkv_size)
            q = operations.rotate_and_store(qkv, norm, norm, spec, rotations, part, arena, 1)
            q64 = PLAIN.rotate_and_store(qkv.double(), norm64, norm64, spec, rotations.double(), part, exact, 1)
        if what:
            batch = _with_shared(batch)
        attended = operations.attend(q, arena, 1, batch)
        yield f"queries{what}", limit, q, q64
        yield f"attention to the same{what}", limit, attended, PLAIN.attend(q.double(), arena, 1, batch)
        yield f"attention{what}", limit + KV_LIMITS[kv_type], attended, PLAIN.attend(q64, exact, 1, batch)

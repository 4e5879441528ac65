"""The operations by themselves: against the plain twin in float64, and attention against the memory's bandwidth."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from statistics import median

import torch

from cllm.backends.base import Chunk
from cllm.backends.torch.arena import Arena
from cllm.backends.torch.batch import StepBatch, make_batch
from cllm.backends.torch.decoder import Decoder
from cllm.backends.torch.device import choose_operations
from cllm.backends.torch.operations import Operations, PlainOperations
from cllm.kv.ops import BlockGeometry

from .work import Keep, Measures, Place

BLOCK = 16
TYPES = {"f32": (torch.float32, 2e-3), "bf16": (torch.bfloat16, 1e-2), "f16": (torch.float16, 2e-3)}
"""Of activations, and how far a result may be from the twin's, relative to its size. The GPU multiplies f32 as tf32."""
KV_LIMITS = {"f32": 0.0, "bf16": 0.0, "f16": 0.0, "fp8": 8e-2, "int8": 2e-2}
"""What a type of K and V adds to that, where the twin has its own, exact ones."""
POOL_BLOCKS = 256


async def kernels(place: Place, keep: Keep) -> None:
    device = torch.device(place.device)
    if not place.on_gpu:
        torch.set_num_threads(1)
    with torch.inference_mode():
        keep("kernels", check_all(device))
        keep("attention", attention_alone(place, device))


# -- right --------------------------------------------------------------------------------------------------------


def check_all(device: torch.device) -> Measures:
    """The largest error of each operation, and of which type; `wrong` names those that are too far off."""
    torch.manual_seed(0)
    operations = choose_operations(device)
    errors: dict[str, float] = {}
    wrong: list[str] = []
    for label, limit, found, expected in _cases(operations, device):
        error = _relative(found, expected)
        errors[label] = error
        if not error <= limit:
            wrong.append(f"{label}: {error:.2g}, of {limit:g} at most")
    return {"compared": len(errors), "largest": max(errors.values()), "wrong": wrong, "errors": errors}


Case = tuple[str, float, torch.Tensor, torch.Tensor]


def _cases(operations: Operations, device: torch.device) -> Iterator[Case]:
    for name, (dtype, limit) in TYPES.items():
        yield from _elementwise(operations, device, name, dtype, limit)
        for kv_type in dict.fromkeys((name, "fp8", "int8")):
            for head_norm in (False, True):
                decoder = Decoder(2, 512, 8, 2, 64, 512, 1000, 1e-5, 10000.0, 4096, head_norm=head_norm)
                label = f"{name}, K/V {kv_type}{', head norms' if head_norm else ''}"
                batch = make_batch(_mixed_rows(), BLOCK, device)
                yield from _attention(operations, decoder, batch, (label, dtype, kv_type, limit))


def _elementwise(
    operations: Operations, device: torch.device, name: str, dtype: torch.dtype, limit: float
) -> Iterator[Case]:
    plain = PlainOperations()
    x, residual, gate_up = (torch.randn(37, width, device=device).to(dtype) for width in (4096, 4096, 2 * 14336))
    weight = torch.rand(4096, device=device).to(dtype)
    found, expected = operations.rms_norm(x, weight, 1e-5), plain.rms_norm(x.double(), weight.double(), 1e-5)
    yield f"{name} rms_norm", limit, found, expected
    summed, exact = residual.clone(), residual.double()
    found = operations.add_rms_norm(x, summed, weight, 1e-5)
    yield f"{name} add_rms_norm", limit, found, plain.add_rms_norm(x.double(), exact, weight.double(), 1e-5)
    yield f"{name} residual", limit, summed, exact
    yield f"{name} silu_multiply", limit, operations.silu_multiply(gate_up), plain.silu_multiply(gate_up.double())


def _mixed_rows() -> list[Chunk]:
    """A long chunk behind cached tokens, long and short rows of one token, a short prompt."""
    return [
        _chunk(200, 37, range(20, 40)),
        _chunk(1, 1500, range(100, 200)),
        _chunk(1, 0, [50]),
        _chunk(5, 0, [51]),
        _chunk(1, 63, range(60, 64)),
    ]


def _chunk(tokens: int, start: int, blocks: range | list[int]) -> Chunk:
    return Chunk(array("i", range(tokens)), start, True, blocks=list(blocks))


def _attention(
    operations: Operations, decoder: Decoder, batch: StepBatch, case: tuple[str, torch.dtype, str, float]
) -> Iterator[Case]:
    """Both fill their own cache: with what the rows have behind them, then with this step's tokens."""
    label, dtype, kv_type, limit = case
    device = batch.tokens.device
    arena = Arena(decoder, BlockGeometry(POOL_BLOCKS, BLOCK), kv_type, device)
    exact = Arena(decoder, BlockGeometry(POOL_BLOCKS, BLOCK), "f32", device)
    exact.data = exact.data.double()
    rotations = decoder.rotations(4096).to(device)
    plain = PlainOperations()
    norm = torch.rand(decoder.head_dim, device=device).to(dtype) + 0.5 if decoder.head_norm else None
    norm64 = None if norm is None else norm.double()
    for history in _histories(batch):
        qkv = torch.randn(len(history.tokens), decoder.qkv_size, device=device).to(dtype)
        q = operations.rotate_and_store(qkv, norm, norm, decoder, rotations, history, arena, 1)
        q64 = plain.rotate_and_store(qkv.double(), norm64, norm64, decoder, rotations.double(), history, exact, 1)
    attended = operations.attend(q, arena, 1, batch)
    yield f"{label}: queries", limit, q, q64
    yield f"{label}: attend to the same", limit, attended, plain.attend(q.double(), arena, 1, batch)
    yield f"{label}: attend", limit + KV_LIMITS[kv_type], attended, plain.attend(q64, exact, 1, batch)


def _histories(batch: StepBatch) -> Iterator[StepBatch]:
    """What the rows have cached, as prompts of their own, and then the batch itself."""
    rows = [chunk for chunk in _mixed_rows() if chunk.start]
    before = [Chunk(array("i", range(row.start)), 0, False, blocks=row.blocks) for row in rows]
    yield make_batch(before, BLOCK, batch.tokens.device)
    yield batch


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    if not torch.isfinite(found.float()).all():
        return float("nan")
    return float((found.double() - expected).norm() / expected.norm())


# -- fast ---------------------------------------------------------------------------------------------------------


def attention_alone(place: Place, device: torch.device) -> Measures:
    """One layer's decode attention over K and V that lie scattered, against reading as many bytes in a row."""
    rows, context = place.sizes.some, place.sizes.attended
    heads = (4, 2, 16) if place.tiny else (32, 8, 128)
    n_heads, n_kv_heads, head_dim = heads
    decoder = Decoder(1, n_heads * head_dim, n_heads, n_kv_heads, head_dim, 1, 1, 1e-5, 1e4, context)
    per_row = context // BLOCK
    arena = Arena(decoder, BlockGeometry(rows * per_row, BLOCK), "f16", device)
    arena.data.normal_()
    order = torch.randperm(rows * per_row).tolist()
    tables = [order[row * per_row : (row + 1) * per_row] for row in range(rows)]
    batch = make_batch([_chunk(1, context - 1, table) for table in tables], BLOCK, device)
    dtype = torch.bfloat16 if place.on_gpu else torch.float32
    q = torch.randn(rows, n_heads, head_dim, device=device).to(dtype)
    operations = choose_operations(device)
    seconds = timed(lambda: operations.attend(q, arena, 0, batch), device)
    size = (1 << 22) if place.tiny else (4 << 30)
    big = torch.ones(size // 8, dtype=torch.int64, device=device)
    read = size / timed(big.sum, device)
    reached = arena.data.nbytes / seconds
    return {
        "bytes": arena.data.nbytes,
        "microseconds": seconds * 1e6,
        "tb_per_s": reached / 1e12,
        "read_tb_per_s": read / 1e12,
        "share": reached / read,
    }


def timed(run: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Seconds of one run, as a graph where there is a GPU, so that only what happens there counts."""
    run()
    if device.type != "cuda":
        times = []
        for _ in range(3):
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        return median(times)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)

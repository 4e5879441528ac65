"""Decode attention by itself, against the bandwidth at which memory can be read."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from statistics import median

import torch

from cllm.backends.base import Chunk
from cllm.backends.torch.arena import Arena
from cllm.backends.torch.batch import make_batch
from cllm.backends.torch.device import choose_operations
from cllm.backends.torch.reference import Attention
from cllm.kv.ops import BlockGeometry
from cllm_bench.kernels.shapes import Shape
from cllm_bench.torch_gpu.engines import Place

BLOCK = 16


@torch.inference_mode()
def attention_share(place: Place, rows: int, context: int) -> float:
    """One layer's attention over K and V that lie scattered: its speed over that of reading as many bytes in a row."""
    device = torch.device(place.device)
    n_heads, n_kv_heads, head_dim = (4, 2, 16) if place.tiny else (32, 8, 128)
    spec = Shape(1, n_heads * head_dim, n_heads, n_kv_heads, head_dim, 1, 1).spec()
    per_row = context // BLOCK
    arena = Arena(spec, BlockGeometry(rows * per_row, BLOCK), "f16", device)
    arena.data.normal_()
    order = torch.randperm(rows * per_row).tolist()
    tables = [order[row * per_row : (row + 1) * per_row] for row in range(rows)]
    batch = make_batch([Chunk(array("i", [1]), context - 1, True, blocks=table) for table in tables], BLOCK, device)
    q = torch.randn(rows, n_heads, head_dim, device=device).to(torch.bfloat16 if place.on_gpu else torch.float32)
    operations = choose_operations(device)
    attention = Attention(spec.layers[0].attention, spec.rms_eps, q)
    seconds = _timed(lambda: operations.attend(q, attention, batch, arena.layers[0]), device)
    big = torch.ones((1 << 19) if place.tiny else (1 << 29), dtype=torch.int64, device=device)
    return float(arena.data.nbytes / seconds / (big.nbytes / _timed(big.sum, device)))


def _timed(run: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Seconds of one run, as a graph where there is a GPU, so that only what happens there counts."""
    run()
    times = []
    if device.type != "cuda":
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
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)

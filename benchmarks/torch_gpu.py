"""The torch engine on one GPU: kernels against the plain twin in float64, then speed, with random weights of real shapes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from array import array
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
from cllm.backends.base import Chunk
from cllm.backends.torch.batch import make_batch
from cllm.backends.torch.decoder import Decoder
from cllm.backends.torch.graphs import DecodeGraphs
from cllm.backends.torch.model import Layer, Model, Weights
from cllm.backends.torch.operations import PlainOperations
from cllm.backends.torch.triton_operations import TritonOperations

SHAPES = {
    "8B": Decoder(32, 4096, 32, 8, 128, 14336, 128256, 1e-5, 500000.0, 8192),
    "1B": Decoder(16, 2048, 32, 8, 64, 8192, 128256, 1e-5, 500000.0, 8192),
}
BLOCK = 16


def random_weights(d: Decoder, device, dtype) -> Weights:
    def matrix(rows, cols):
        return torch.randn(rows, cols, device=device, dtype=dtype) * cols**-0.5

    def ones(size):
        return torch.ones(size, device=device, dtype=dtype)

    layers = [
        Layer(
            ones(d.n_embd), matrix(d.qkv_size, d.n_embd), None,
            ones(d.head_dim) if d.head_norm else None, ones(d.head_dim) if d.head_norm else None,
            matrix(d.n_embd, d.q_size), ones(d.n_embd), matrix(2 * d.n_ff, d.n_embd), matrix(d.n_embd, d.n_ff),
        )
        for _ in range(d.n_layers)
    ]  # fmt: skip
    embedding = matrix(d.n_vocab, d.n_embd)
    return Weights(embedding, layers, ones(d.n_embd), embedding)


def timed(run, repeats=20, warm=3):
    for _ in range(warm):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        run()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) / 1e3)
    return float(np.median(times))


def check(device):
    worst = {}
    for norm in (False, True):
        d = Decoder(2, 256, 8, 2, 64, 512, 1000, 1e-5, 10000.0, 4096, head_norm=norm)
        chunks = [
            Chunk(array("i", range(200)), 37, True, 0, list(range(20, 40))),
            Chunk(array("i", [9]), 1500, True, 0, list(range(100, 200))),
            Chunk(array("i", [9]), 0, True, 0, [50]),
            Chunk(array("i", range(5)), 0, True, 0, [51]),
        ]
        for dtype, limit in ((torch.float32, 2e-3), (torch.bfloat16, 1e-2)):
            b = make_batch(chunks, BLOCK, device)
            x = torch.randn(len(b.tokens), d.qkv_size, device=device, dtype=dtype)
            kv = torch.randn(256, 2, 2, 2, BLOCK, 64, device=device, dtype=dtype)
            qn = torch.rand(64, device=device, dtype=dtype) if norm else None
            kn = torch.rand(64, device=device, dtype=dtype) if norm else None
            rot = d.rotations(4096).to(device)
            kv64 = kv.double()
            n64 = None if qn is None else qn.double()
            m64 = None if kn is None else kn.double()
            T, P = TritonOperations(), PlainOperations()
            q = T.rotate_and_store(x, qn, kn, d, rot, b, kv, 1)
            a = T.attend(q, kv, 1, b)
            q64 = P.rotate_and_store(x.double(), n64, m64, d, rot.double(), b, kv64, 1)
            a64 = P.attend(q64, kv64, 1, b)
            for name, got, want in (("q", q, q64), ("kv", kv, kv64), ("attend", a, a64)):
                error = ((got.double() - want).norm() / want.norm()).item()
                worst[f"{name} {dtype} norm={norm}"] = error
                assert error < limit, (name, dtype, error)
    return worst


def attention_alone(device):
    d = SHAPES["8B"]
    rows, context = 64, 4096
    per = context // BLOCK
    kv = torch.randn(rows * per, 1, 2, d.n_kv_heads, BLOCK, d.head_dim, device=device, dtype=torch.bfloat16)
    order = torch.randperm(rows * per).tolist()
    chunks = [Chunk(array("i", [1]), context - 1, True, 0, order[r * per : (r + 1) * per]) for r in range(rows)]
    b = make_batch(chunks, BLOCK, device)
    q = torch.randn(rows, d.n_heads, d.head_dim, device=device, dtype=torch.bfloat16)
    import cllm.backends.torch.triton_operations as t

    results = {}
    for split in (256, 512, 1024):
        for tile in (32, 64, 128):
            t.DECODE_SPLIT, t.DECODE_TILE = split, tile
            ops = TritonOperations()
            seconds = timed(lambda: ops.attend(q, kv, 0, b))
            results[f"split {split} tile {tile}"] = kv.numel() * 2 / seconds / 1e12
    t.DECODE_SPLIT, t.DECODE_TILE = 256, 64
    big = torch.empty(4 << 30, dtype=torch.uint8, device=device)
    seconds = timed(lambda: big.view(torch.int64).sum())
    results["read TB/s (sum)"] = big.numel() / seconds / 1e12
    return results


def gemv_alone(device):
    from cllm.backends.torch import skinny

    results = {}
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for rows, cols, gated in ((6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False), (128256, 4096, False)):
            copies = max(2, (400 << 20) // (rows * cols))
            weights = [torch.randn(rows, cols, device=device, dtype=torch.bfloat16).to(dtype) for _ in range(copies)]
            scales = None if dtype == torch.bfloat16 else torch.rand(rows, device=device)
            x = torch.randn(1, cols, device=device, dtype=torch.bfloat16)
            norm = torch.rand(cols, device=device, dtype=torch.bfloat16)
            best = []
            for tile_rows in (2, 4, 8, 16):
                for tile in (256, 512, 1024, 2048):
                    for warps in (4, 8):
                        if not 1024 <= tile_rows * tile <= 16384:
                            continue
                        skinny.TILE_ROWS, skinny.TILE_COLUMNS, skinny.WARPS = tile_rows, tile, warps
                        def run():
                            for w in weights:
                                skinny.gemv(x, w, norm=norm if cols == 4096 else None, eps=1e-5, gated=gated, scales=scales)
                        run()
                        graph = torch.cuda.CUDAGraph()
                        with torch.cuda.graph(graph):
                            run()
                        seconds = timed(graph.replay, 10) / copies
                        best.append((rows * cols * weights[0].element_size() / seconds / 1e12, seconds * 1e6, tile_rows, tile, warps))
            if dtype == torch.bfloat16:
                def run():
                    for w in weights:
                        torch.nn.functional.linear(x, w)
                run()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    run()
                seconds = timed(graph.replay, 10) / copies
                best.append((rows * cols * 2 / seconds / 1e12, seconds * 1e6, "cublas"))
            results[f"{dtype} {rows}x{cols}"] = [tuple(round(v, 2) if isinstance(v, float) else v for v in b) for b in sorted(best, key=lambda b: -b[0])[:5]] + [b for b in best if b[-1] == "cublas"]
            del weights
    return results


def to_fp8(weights):
    def quantised(w):
        scale = w.float().abs().amax(1) / 448.0
        return (w.float() / scale[:, None]).to(torch.float8_e4m3fn), scale
    for layer in weights.layers:
        layer.scales = {}
        for key in ("qkv", "output", "gate_up", "down"):
            w, layer.scales[key] = quantised(getattr(layer, key))
            setattr(layer, key, w)
    weights.head, weights.head_scales = quantised(weights.head)


def one_stream(name, device):
    from cllm.backends.torch import skinny, triton_operations as t
    d = SHAPES[name]
    weights = random_weights(d, device, torch.bfloat16)
    kv = torch.zeros(600, d.n_layers, 2, d.n_kv_heads, BLOCK, d.head_dim, device=device, dtype=torch.bfloat16)
    batch = make_batch([Chunk(array("i", [5]), 191, True, 0, list(range(12)))], BLOCK, device)
    results = {}
    for kind in ("bf16", "fp8"):
        if kind == "fp8":
            to_fp8(weights)
        model = Model(d, weights, TritonOperations(), 8192)
        plain = model.forward(batch, kv) if kind == "bf16" else None
        model.fuses = True
        for tiles in ((4, 1024, 8), (4, 1024, 4), (8, 512, 8), (8, 512, 4), (4, 512, 4), (2, 1024, 4), (2, 2048, 8)):
            skinny.TILE_ROWS, skinny.TILE_COLUMNS, skinny.WARPS = tiles
            for split in (64, 256):
                t.SHORT_SPLIT = split
                graphs = DecodeGraphs(model, kv, 599, 512)
                seconds = timed(lambda: graphs.run(batch), 20)
                results[f"{kind} tiles {tiles} split {split}"] = 1 / seconds
        if plain is not None:
            got = graphs.run(batch)
            results["fused against plain"] = ((got - plain).norm() / plain.norm()).item()
    return results


def speed(name, device):
    d = SHAPES[name]
    dtype = torch.bfloat16
    weights = random_weights(d, device, dtype)
    model = Model(d, weights, TritonOperations(), 8192)
    blocks = 8 * 2048 // BLOCK + 256 * 20
    kv = torch.zeros(blocks + 1, d.n_layers, 2, d.n_kv_heads, BLOCK, d.head_dim, device=device, dtype=dtype)
    graphs = DecodeGraphs(model, kv, blocks, 8192 // BLOCK)
    results = {}

    def decode(rows, context):
        per = -(-context // BLOCK)
        return [Chunk(array("i", [r % 1000 + 1]), context - 1, True, 0, list(range(r * per, (r + 1) * per))) for r in range(rows)]

    for rows, context in ((1, 192), (8, 192), (64, 192), (128, 192), (256, 192), (64, 1024)):
        if rows * -(-context // BLOCK) > blocks:
            continue
        batch = make_batch(decode(rows, context), BLOCK, device)
        with torch.no_grad():
            eager = timed(lambda: model.forward(batch, kv), 5)
            start = time.perf_counter()
            graphs.run(batch)
            torch.cuda.synchronize()
            capture = time.perf_counter() - start
            seconds = timed(lambda: graphs.run(batch))
            same = (graphs.run(batch) - model.forward(batch, kv)).abs().max().item()
        results[f"decode {rows} x {context}"] = {
            "tok/s": rows / seconds, "ms": seconds * 1e3, "eager ms": eager * 1e3, "capture s": capture, "graph-eager": same,
        }  # fmt: skip
    chunks = [Chunk(array("i", [int(t) for t in np.random.randint(1, 1000, 2048)]), 0, True, 0, list(range(r * 128, (r + 1) * 128))) for r in range(8)]
    batch = make_batch(chunks, BLOCK, device)
    with torch.no_grad():
        seconds = timed(lambda: model.forward(batch, kv), 5)
    results["prefill 8 x 2048"] = {"tok/s": 8 * 2048 / seconds, "ms": seconds * 1e3}
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        graphs.run(make_batch(decode(1, 192), BLOCK, device))
        graphs.run(make_batch(decode(256, 192), BLOCK, device))
        model.forward(batch, kv)
        torch.cuda.synchronize()
    print(prof.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=60))
    return results


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shapes", nargs="*", default=["1B", "8B"])
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda")
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    found = {"device": torch.cuda.get_device_name(), "check": check(device)}
    print(json.dumps(found, indent=1), flush=True)
    found["attention"] = attention_alone(device)
    print(json.dumps(found["attention"], indent=1), flush=True)
    if args.tune:
        found["gemv"] = gemv_alone(device)
        print(json.dumps(found["gemv"], indent=None).replace("], [", "],\n ["), flush=True)
        for name in args.shapes:
            found[name + " one"] = one_stream(name, device)
            print(name, json.dumps(found[name + " one"], indent=1), flush=True)
    for name in args.shapes:
        found[name] = speed(name, device)
        print(name, json.dumps(found[name], indent=1), flush=True)
        torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


main()

"""The kernels against the plain twin in float64: on a GPU, or in Triton's interpreter if TRITON_INTERPRET was set
before anything was imported. Prints the errors found, by name, as JSON. Run by `test_torch_kernels.py`."""

from __future__ import annotations

import json
import os
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from cllm.backends.base import Chunk, StepResult
from cllm.backends.torch import gemv, shared_prefixes, triton_linear, triton_operations
from cllm.backends.torch.arena import KV_DTYPES, Arena, LayerMemory
from cllm.backends.torch.batch import StepBatch, make_batch
from cllm.backends.torch.linear import dequantise, quantise_rows
from cllm.backends.torch.model import Layer, Model, Weights
from cllm.backends.torch.operations import Operations, PlainOperations
from cllm.backends.torch.recurrences import Recurrence
from cllm.backends.torch.reference import Attention
from cllm.backends.torch.rotations import rotation_table, temperature_table
from cllm.backends.torch.shared_prefixes import SharedPrefixes, find_shared
from cllm.backends.torch.state_batch import HostStates, states_on
from cllm.backends.torch.triton_linear import ProductTile
from cllm.backends.torch.triton_operations import TritonOperations
from cllm.backends.torch.weights import Loader
from cllm.kv.ops import BlockGeometry
from cllm.models.spec import (
    AttentionSpec,
    DeltaNetSpec,
    LayerSpec,
    Mamba2Spec,
    ModelSpec,
    RecurrenceSpec,
    Rotation,
    Temperature,
)
from cllm.models.tensors import TensorSpec, all_tensors
from group_kit import GroupedSteps
from spec_kit import make_spec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
BLOCK = 16
BLOCKS = 48
TRITON, PLAIN = TritonOperations(), PlainOperations()
Errors = dict[str, float]


def small_tiles() -> None:
    """So that small shapes have several of them."""
    triton_operations.SHORTEST_SPLIT, triton_operations.LONGEST_SPLIT = 32, 32
    triton_operations.DECODE_TILE, triton_operations.WIDE_DECODE_TILE = 16, 16
    triton_operations.PROMPT_QUERIES, triton_operations.PROMPT_TILE = 16, 16
    triton_operations.INVARIANT_SPLIT, triton_operations.INVARIANT_QUERIES = 16, 16
    triton_operations.INVARIANT_TILE = 16
    triton_operations.STATE_BYTES = 1
    shared_prefixes.SHARED_SPLIT, shared_prefixes.LEAST_TOKENS = 32, 32
    gemv.tile_of = lambda *_: gemv.Tile(8, 32, 4)
    triton_linear.fast_tile = lambda rows: ProductTile(16 if rows < 16 else 32, 32, 64, 4, 2)
    triton_linear.invariant_tile = lambda _: ProductTile(16, 32, 32, 4, 2)


def round_to_fp8_as_torch_does() -> None:
    """The interpreter forgets to carry from the mantissa into the exponent."""
    convert: Callable[..., Any] = interpreter._convert_float

    def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if str(target) != "fp8e4nv" or str(source) != "fp32":
            return convert(values, source, target, rounding)
        floats = torch.from_numpy(np.frombuffer(values.tobytes(), np.float32).copy())
        return floats.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(values.shape)

    interpreter._convert_float = converted


def multiply_row_by_row() -> None:
    """The interpreter leaves matrices to a library whose sums depend on where in the matrix a row is."""

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        products = a.data[:, :, None].astype(d.data.dtype) * b.data[None].astype(d.data.dtype)
        return interpreter.TensorHandle(products.sum(1) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot


def decoder(
    *, norms: bool = False, group: int = 2, head_dim: int = 16, n_layers: int = 2, kv_heads: int = 2, **others: Any
) -> ModelSpec:
    norm = {"qk_norm": "head" if norms else ""}
    return make_spec(n_layers, 64, kv_heads * group, kv_heads, head_dim, 96, 100, **(norm | others))


WINDOW = {"window": 21, "rotation": Rotation(10000.0, 8, neox=True, magnitude=1.3)}
RICH: dict[str, ModelSpec] = {
    "window": decoder(group=3, **WINDOW),
    "cap": decoder(softcap=1.5, scale=0.6, temperature=Temperature(0.4, 16)),
    "sinks": decoder(norms=True, sinks=True),
    "all": decoder(**WINDOW, softcap=1.5, sinks=True, qk_norm="row", v_norm=True),
    "norms last": decoder(norms=True, qk_norm_last=True),
    "values of keys": decoder(norms=True, v_is_k=True, v_norm=True),
    "another's keys": replace(
        decoder(norms=True),
        layers=decoder(norms=True).layers[:1] + decoder(norms=True, kv_from=0, v_norm=True).layers[:1],
    ),
}
"""Attention with more than plain decoders have."""
SIZES = replace(decoder(), layers=(decoder(head_dim=32, kv_heads=1).layers[0], *decoder(head_dim=16).layers))
"""Layers whose heads differ in size."""


def chunk(tokens: Sequence[int], start: int, blocks: Sequence[int]) -> Chunk:
    return Chunk(array("i", tokens), start, True, blocks=list(blocks))


def batch_of(chunks: Sequence[Chunk]) -> StepBatch:
    return make_batch(chunks, BLOCK, DEVICE)


FAR = [40, 3, 17, 5, 22, 9]


def batches() -> Iterator[tuple[str, StepBatch]]:
    mixed = [
        chunk(range(18), 7, [30, 31]),  # a chunk over what is cached
        chunk([9], 80, FAR),  # three splits
        chunk([9], 0, [41]),
        chunk(range(3), 0, [42]),
        chunk([9], 31, [43, 44]),  # one split, full
        chunk(range(5), 79, FAR[::-1]),
    ]
    yield "mixed", batch_of(mixed)
    yield "decode", batch_of([mixed[1], mixed[2], mixed[4]])
    yield "prompt", batch_of([chunk(range(17), 0, [1, 2])])


def sharing_batch() -> StepBatch:
    """Nine rows on two blocks, nine on four of which two are those, and one alone."""
    few = [chunk([9], 40 + row, [40, 3, 10 + row, 20 + row]) for row in range(9)]
    many = [chunk([9], 70, [40, 3, 17, 5, 30 + row]) for row in range(9)]
    batch = batch_of([*few, *many, chunk([9], 80, [6, 7, 8, 45, 46, 47])])
    tables, lengths = (part.cpu().numpy() for part in (batch.tables, batch.lengths))
    found = find_shared(tables, lengths, BLOCK, batch.longest)
    assert found is not None and sorted(found.firsts.tolist()) == [0] + [1] * 9 + [2] * 9
    parts = (torch.from_numpy(part).to(DEVICE) for part in found[:3])
    return replace(batch, shared=SharedPrefixes(*parts, found.split))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(found.float()).all()
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def values_of(arena: Arena, layer: int = 0) -> torch.Tensor:
    """Keys and values of a layer, [cells, 2, KV heads, places, head_dim]."""
    memory = arena.layers[layer]
    planes = [memory.keys.double(), memory.values.double()]
    if memory.key_scales is not None and memory.value_scales is not None:
        planes = [
            planes[0] * memory.key_scales.double()[..., None],
            planes[1] * memory.value_scales.double()[..., None],
        ]
    return torch.stack(planes, 1)


def arenas(spec: ModelSpec, kv_type: str) -> tuple[Arena, Arena]:
    """Two of the same type, filled alike."""
    pair = tuple(Arena(spec, BlockGeometry(BLOCKS, BLOCK), kv_type, DEVICE) for _ in range(2))
    data = torch.randn(pair[0].data.shape)
    for arena in pair:
        arena.data.copy_((data * 40).round() if kv_type == "int8" else data)
        if arena.scales is not None:
            arena.scales.copy_(torch.rand(arena.scales.shape, generator=torch.Generator().manual_seed(1)) / 40)
    return pair[0], pair[1]


def attention_of(own: AttentionSpec, dtype: torch.dtype, *, wide: bool = False) -> Attention:
    """With random norms and sinks; `wide`: the same ones in float64."""
    torch.manual_seed(5)
    sizes = {"row": (own.q_size, own.k_size)}.get(own.qk_norm, (own.head_dim_k,) * 2)
    norms = [torch.rand(size).to(DEVICE, dtype) if own.qk_norm else None for size in sizes]
    sinks = torch.randn(own.n_heads).to(DEVICE, dtype) if own.sinks else None
    tables = [rotation_table(own.rotation, own.head_dim_k, 512).to(DEVICE)]
    tables.append(temperature_table(own.temperature, 512).to(DEVICE) if own.temperature else None)
    parts = [*tables, *norms, sinks]
    return Attention(own, 1e-5, *(part.double() if wide and part is not None else part for part in parts))


def attention(spec: ModelSpec, batch: StepBatch, dtype: torch.dtype, kv_type: str, invariant: bool = False) -> Errors:
    torch.manual_seed(0)
    arena, other = arenas(spec, kv_type)
    own = spec.layers[1].attention
    shared = own.qkv_size if own.kv_from is None else own.q_size
    qkv = torch.randn(len(batch.tokens), shared - own.v_is_k * own.v_size).to(DEVICE, dtype)
    narrow, wide = attention_of(own, dtype), attention_of(own, dtype, wide=True)
    operations = TRITON.invariant() if invariant else TRITON
    queries = operations.rotate_and_store(qkv, narrow, batch, arena.layers[1])
    expected = PLAIN.rotate_and_store(qkv.double(), wide, batch, other.layers[1])
    stored = values_of(arena, 1)
    errors = {"queries": relative(queries, expected), "kv": relative(stored, values_of(other, 1))}
    exact = LayerMemory(stored[:, 0], stored[:, 1], None, None, "f32")
    found = operations.attend(queries, narrow, batch, arena.layers[1])
    errors["attend"] = relative(found, PLAIN.attend(queries.double(), wide, batch, exact))
    return errors


def elementwise(dtype: torch.dtype) -> Errors:
    torch.manual_seed(1)
    x, residual, weight = (torch.randn(*size).to(DEVICE, dtype) for size in ((5, 72), (5, 72), (72,)))
    gate_up = torch.randn(5, 2 * 1500).to(DEVICE, dtype)
    summed, exact = residual.clone(), residual.double()
    normed = TRITON.add_rms_norm(x, summed, weight, 1e-5)
    expected = PLAIN.add_rms_norm(x.double(), exact, weight.double(), 1e-5)
    return {
        "norm": relative(TRITON.rms_norm(x, weight, 1e-5), PLAIN.rms_norm(x.double(), weight.double(), 1e-5)),
        "add_norm": relative(normed, expected),
        "residual": relative(summed, exact),
        "silu": relative(TRITON.gate_multiply(gate_up, "silu"), PLAIN.gate_multiply(gate_up.double(), "silu")),
        "gelu": relative(TRITON.gate_multiply(gate_up, "gelu"), PLAIN.gate_multiply(gate_up.double(), "gelu")),
    }


def products(dtype: torch.dtype) -> Errors:
    """Of one row, few rows and many, with fp8 and without, in both modes."""
    torch.manual_seed(3)
    weight, bias = torch.randn(50, 72).to(DEVICE, dtype), torch.randn(50).to(DEVICE, dtype)
    quantised, scales = quantise_rows(weight)
    errors: Errors = {}
    for rows in (1, 3, 20):
        x = torch.randn(rows, 72).to(DEVICE, dtype)
        plain = x.double() @ weight.double().T + bias.double()
        wide = x.double() @ dequantise(quantised, scales, torch.float64).T + bias.double()
        for mode, operations in (("fast", TRITON), ("invariant", TRITON.invariant())):
            label = f"{rows} rows {mode}"
            errors[label] = relative(operations.linear(x, weight, None, bias), plain)
            errors[f"{label} fp8"] = relative(operations.linear(x, quantised, scales, bias), wide)
    return errors


def quantised_rows() -> Errors:
    """Rows in fp8, as they meet weights in fp8."""
    torch.manual_seed(4)
    x = torch.randn(5, 72).to(DEVICE) * torch.logspace(-3, 3, 5).to(DEVICE)[:, None]
    x[3] = 0
    found, scales = triton_linear.quantise(x)
    expected, expected_scales = quantise_rows(x)
    errors = {"values": relative(found, expected.float()), "scales": relative(scales[:, 0], expected_scales)}
    if not INTERPRETED:
        rows, weight = torch.randn(20, 128).to(DEVICE, torch.bfloat16), torch.randn(96, 128).to(DEVICE)
        quantised, scales = quantise_rows(weight)
        wide = rows.double() @ dequantise(quantised, scales, torch.float64).T
        errors["product"] = relative(TRITON.linear(rows, quantised, scales), wide) / 20  # e4m3 of the rows is 3 % off
    return errors


def random_weights(spec: ModelSpec, dtype: torch.dtype = torch.float32, *, fp8: bool = False) -> Weights:
    torch.manual_seed(2)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns) * columns**-0.5).to(DEVICE, dtype)

    def layer() -> Layer:
        attention, n_ff = spec.layers[0].attention, spec.layers[0].feed_forward.size
        sizes = (spec.n_embd, attention.head_dim_k, attention.head_dim_k, spec.n_embd)
        norms = [torch.rand(size).to(DEVICE, dtype) for size in sizes]
        bias, output = torch.randn(attention.qkv_size).to(DEVICE, dtype), matrix(spec.n_embd, attention.q_size)
        made = Layer(
            qkv=matrix(attention.qkv_size, spec.n_embd),
            output=output,
            gate_up=matrix(2 * n_ff, spec.n_embd),
            down=matrix(spec.n_embd, n_ff),
            qkv_bias=bias,
            attention_norm=norms[0],
            q_norm=norms[1],
            k_norm=norms[2],
            ffn_norm=norms[3],
        )
        if fp8:
            made.scales = {}
            for name in ("qkv", "output", "gate_up", "down"):
                quantised, made.scales[name] = quantise_rows(getattr(made, name))
                setattr(made, name, quantised)
        return made

    embedding = torch.randn(spec.n_vocab, spec.n_embd).to(DEVICE, dtype)
    layers = [layer() for _ in range(spec.n_layers)]
    weights = Weights(embedding, layers, torch.rand(spec.n_embd).to(DEVICE, dtype), embedding * spec.n_embd**-0.5)
    if fp8:
        weights.head, weights.head_scales = quantise_rows(weights.head)
    return weights


def whole_step(batch: StepBatch, *, fp8: bool = False) -> Errors:
    spec = decoder(norms=True)
    weights = random_weights(spec, fp8=fp8)
    arena, other = arenas(spec, "f32")
    found = Model(spec, weights, TRITON, 512, invariant=False).forward(batch, arena)
    expected = Model(spec, weights, PLAIN, 512, invariant=False).forward(batch, other)
    return {"logits": relative(found, expected), "kv": relative(arena.data, other.data)}


def invariance(spec: ModelSpec, dtype: torch.dtype, kv_type: str, *, fp8: bool = False, length: int = 36) -> Errors:
    """Logits near the end of a sequence: generated one by one, as a chunk, in other chunks, among others."""
    model = Model(spec, random_weights(spec, dtype, fp8=fp8), TRITON, 4096, invariant=True)
    sequence = [int(token) for token in np.random.default_rng(0).integers(0, spec.n_vocab, length)]
    size = -(-length // BLOCK)
    blocks, others = list(range(size, 0, -1)), [list(range(size * at, size * (at + 1))) for at in (2, 3)]
    arena = Arena(spec, BlockGeometry(4 * size + 1, BLOCK), kv_type, DEVICE)

    def run(*chunks: Chunk) -> torch.Tensor:
        return model.forward(batch_of(chunks), arena)

    def piece(first: int, last: int) -> Chunk:
        return chunk(sequence[first:last], first, blocks)

    for each in others:
        run(chunk(sequence[::-1][: length - 3], 0, each))
    half, tail = length // 2 - 1, length - 4
    run(piece(0, half))
    run(piece(half, tail))
    alone = torch.cat([run(piece(at, at + 1)) for at in range(tail, length)])
    cached = values_of(arena)[blocks].clone()
    run(piece(0, tail), chunk([7], length - 3, others[0]))
    company = [chunk([7], length - 3, others[0]), chunk([8, 9], length - 3, others[1])]
    among = torch.cat([run(*company, piece(at, at + 1))[2:] for at in range(tail, length)])
    whole = run(piece(0, length))
    split = torch.cat([run(piece(0, half), *company)[:1], run(piece(half, length), *company)[:1]])[1:]
    return {
        "among": float(not torch.equal(alone, among)),
        "as one chunk": float(not torch.equal(alone[-1:], whole)),
        "in two chunks": float(not torch.equal(alone[-1:], split)),
        "kv": float(not torch.equal(cached, values_of(arena)[blocks])),
        "graph": 0.0 if INTERPRETED else float(not torch.equal(alone[-1:], _in_graph(model, arena, piece, length))),
        "nothing": float(not (alone[0] != alone[1]).any()),
    }


def _in_graph(model: Model, arena: Arena, piece: Callable[[int, int], Chunk], length: int) -> torch.Tensor:
    batch = batch_of([piece(length - 1, length)])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model.forward(batch, arena)
    graph.replay()
    torch.cuda.synchronize()
    return logits


# -- layers that differ ------------------------------------------------------------------------------------------------

FULL, WINDOWED = (decoder(norms=True, kv_heads=1, n_layers=1, **more).layers[0] for more in ({}, WINDOW))
GROUPS = replace(decoder(), layers=(WINDOWED, FULL, WINDOWED))


class RandomSource:
    def tensors(self, spec: ModelSpec) -> Iterator[TensorSpec]:
        return all_tensors(spec)

    def pieces(self, item: TensorSpec) -> Iterator[torch.Tensor]:
        values = torch.randn(item.shape, generator=torch.Generator().manual_seed(item.layer + 97 * len(item.role)))
        yield -values.abs() if item.role == "ssm_a" else values * (item.cols**-0.5 if len(item.shape) > 1 else 1.0)


class Stepped:
    """What `GroupedSteps` needs of a backend."""

    def __init__(self, spec: ModelSpec, operations: Any, *, invariant: bool = False) -> None:
        self.spec = spec
        weights = Loader(RandomSource(), torch.float32, DEVICE, None).load(spec)
        self._model = Model(spec, weights, operations, 512, invariant=invariant)
        self._worker: Any = None

    def allocate(self, geometry: BlockGeometry) -> None:
        self._layout = geometry.layout
        arena = Arena(self.spec, geometry, "f32", DEVICE)
        self._worker = SimpleNamespace(context=SimpleNamespace(arena=arena))

    def collect(self, chunks: Sequence[Chunk]) -> StepResult:
        batch = make_batch(chunks, BLOCK, DEVICE, self._layout)
        return StepResult(self._model.forward(batch, self._worker.context.arena).cpu().numpy())


TEXT = [int(token) for token in np.random.default_rng(3).integers(0, 100, 56)]


def groups() -> Errors:
    """Steps of rows of all kinds over layers with windows that are apart, on kernels and in plain torch."""
    found = []
    for operations in (TRITON, PLAIN):
        steps = GroupedSteps(Stepped(GROUPS, operations))
        sequences = [steps.begin(len(TEXT)) for _ in range(3)]
        logits = []
        for counts in ((40, 3, 17), (1, 1, 9)):
            chosen = zip(sequences, counts, strict=True)
            parts = [(each, TEXT[each.done : each.done + count]) for each, count in chosen]
            logits.append(torch.from_numpy(steps.step(*parts)))
        found.append(torch.cat(logits))
    return {"logits": relative(*found)}


def cuts() -> Errors:
    """The last logits of a text that is computed as a whole, and cut, among others."""
    steps = GroupedSteps(Stepped(GROUPS, TRITON, invariant=True))
    expected = steps.run(TEXT, len(TEXT))
    one, other = steps.begin(len(TEXT)), steps.begin(len(TEXT))
    steps.step((other, TEXT[:5]), (one, TEXT[:48]))
    return {"among": float(not np.array_equal(steps.step((other, TEXT[5:6]), (one, TEXT[48:]))[1], expected))}


DELTA, TILED = DeltaNetSpec(1, 2, 12, 20, 4), DeltaNetSpec(2, 4, 8, 8, 2, tiled=True)
MAMBA = Mamba2Spec(4, 8, 16, 2, 3)
WIDE_DELTA, WIDE_MAMBA = DeltaNetSpec(8, 32, 4, 4, 4), Mamba2Spec(32, 2, 16, 1, 3)
"""On a CPU, torch itself gives the last values of a row other bits if they do not fill a vector."""


def state_step(
    spec: RecurrenceSpec,
    arena: Arena,
    operations: Operations,
    given: torch.Tensor,
    rows: Sequence[tuple[int, int, int]],
) -> torch.Tensor:
    """What the tokens give that `given` has, of rows of so many, each with a first cell to read (below 0: it begins)
    and one to write."""
    generator = torch.Generator().manual_seed(1)
    channels, heads, width = (
        (spec.conv_size, spec.n_v_heads, spec.head_dim_v)
        if isinstance(spec, DeltaNetSpec)
        else (spec.conv_size, spec.n_heads, spec.inner_size)
    )
    taps, bias, decay, step, skip, norm = (
        torch.rand(*size, generator=generator).to(DEVICE)
        for size in ((spec.kernel, channels), (channels,), (heads,), (heads,), (heads,), (width,))
    )
    recurrence = Recurrence(spec, 1e-5, taps, bias, -decay, step, skip, norm)
    cells = state_layout(spec).states.cells
    starts = np.cumsum([0, *(count for count, _, _ in rows)]).astype(np.int32)
    reads, writes = (
        np.array([[first + cell if first >= 0 else -1 for cell in range(cells)] for first in firsts], np.int32)
        for firsts in zip(*(row[1:] for row in rows), strict=True)
    )
    on_device = (torch.from_numpy(part).to(DEVICE) for part in (starts, reads, writes))
    batch = states_on(HostStates(reads, writes, starts), *on_device)
    return operations.recur(given.to(DEVICE), recurrence, batch, arena.states[0])


def state_layout(spec: RecurrenceSpec) -> Any:
    layers = replace(decoder(), layers=(LayerSpec(None, None, recurrence=spec),))
    return layers.kv_layout("f32", "f32", BLOCK, apart=True)


def state_arena(spec: RecurrenceSpec) -> Arena:
    layers = replace(decoder(), layers=(LayerSpec(None, None, recurrence=spec),))
    arena = Arena(layers, BlockGeometry(80, BLOCK, state_layout(spec)), "f32", DEVICE)
    arena.data.fill_(255)
    return arena


def states(spec: RecurrenceSpec, width: int) -> Errors:
    """On kernels and in plain torch: rows that begin, chunks and single tokens; then all go on."""
    outs, arenas = [], []
    given = torch.randn(14, width, generator=torch.Generator().manual_seed(2))
    for operations in (TRITON, PLAIN):
        arena = state_arena(spec)
        first = state_step(spec, arena, operations, given[:9], [(1, -1, 0), (5, -1, 20), (3, -1, 40)])
        second = state_step(spec, arena, operations, given[9:], [(1, 0, 60), (1, 20, 0), (3, 40, 20)])
        outs.append(torch.cat((first, second)))
        arenas.append(torch.cat([part.read(torch.arange(20)[None].to(DEVICE), None).flatten() for part in (
            arena.states[0].heads, arena.states[0].inputs)]))  # fmt: skip
    return {"given": relative(*outs), "kept": relative(*arenas)}


def state_bits(spec: RecurrenceSpec, width: int) -> Errors:
    """A text as a whole, and cut, among others."""
    given = torch.randn(5, width, generator=torch.Generator().manual_seed(3))
    arena = state_arena(spec)
    whole = state_step(spec, arena, TRITON.invariant(), given, [(5, -1, 0)])
    parts = [state_step(spec, arena, TRITON.invariant(), torch.cat((given[:1], given[:2])), [(1, -1, 60), (2, -1, 20)])]
    parts.append(state_step(spec, arena, TRITON.invariant(), given[2:3], [(1, 20, 40)]))
    parts.append(state_step(spec, arena, TRITON.invariant(), given[3:], [(2, 40, 20)]))
    return {"cut": float(not torch.equal(torch.cat(parts)[1:], whole))}


def all_errors() -> Iterator[tuple[str, Callable[[], Errors]]]:
    shapes = {"plain": decoder(), "norms": decoder(norms=True), "group of 3": decoder(group=3, head_dim=32)}
    known, f32 = dict(batches()), torch.float32
    mixed, one = known["mixed"], batch_of([chunk([9], 80, FAR)])
    for label, shape in shapes.items():
        yield f"f32 mixed {label}", lambda shape=shape: attention(shape, mixed, f32, "f32")
    for name in ("decode", "prompt"):
        yield f"f32 {name}", lambda name=name: attention(shapes["norms"], known[name], f32, "f32")
    yield "f32 invariant", lambda: attention(shapes["group of 3"], mixed, f32, "f32", True)
    yield "f32 shared", lambda: attention(shapes["group of 3"], sharing_batch(), f32, "f32")
    for kv_type in ("fp8", "int8"):
        yield f"{kv_type} cache fast", lambda kv=kv_type: attention(shapes["plain"], mixed, f32, kv)
        yield (
            f"{kv_type} cache invariant",
            lambda kv=kv_type: attention(shapes["plain"], known["decode"], f32, kv, True),
        )
    yield "int8 cache shared", lambda: attention(shapes["plain"], sharing_batch(), f32, "int8")
    for fp8 in (False, True):
        yield f"f32 one row, fp8 {fp8}", lambda fp8=fp8: whole_step(one, fp8=fp8)
    yield "fp8 rows", quantised_rows
    yield "f32 step", lambda: whole_step(mixed, fp8=True)
    # The interpreter multiplies matrices of f16, but not of bf16.
    half = torch.float16 if INTERPRETED else torch.bfloat16
    for kv_type in ("f16", "bf16") if INTERPRETED else KV_DTYPES:
        yield f"bf16 with {kv_type}", lambda kv=kv_type: attention(shapes["norms"], known["decode"], half, kv)
    for dtype, label in ((f32, "f32"), (torch.bfloat16, "bf16"), (torch.float16, "f16")):
        yield label, lambda dtype=dtype: elementwise(dtype)
        if not (INTERPRETED and dtype == torch.bfloat16):
            yield f"{label} product", lambda dtype=dtype: products(dtype)
    few = [chunk([9], length - 1, FAR) for length in (5, 21, 22, 33, 64, 80)]
    for label, shape in (RICH | {"sizes": SIZES}).items():
        for mode, invariant in (("fast", False), ("invariant", True)):
            yield (
                f"f32 {mode} {label}",
                lambda shape=shape, invariant=invariant: attention(shape, mixed, f32, "f32", invariant),
            )
    for label in ("window", "all"):
        yield f"f32 single {label}", lambda label=label: attention(RICH[label], batch_of(few), f32, "f32")
    for label in ("cap", "sinks"):
        yield f"f32 shared {label}", lambda label=label: attention(RICH[label], sharing_batch(), f32, "f32")
    yield "int8 cache window", lambda: attention(RICH["all"], mixed, f32, "int8")
    yield "f32 groups", groups
    yield "bits groups", cuts
    for label, rule, width in (("delta", DELTA, 108), ("tiled delta", TILED, 104), ("Mamba 2", MAMBA, 132)):
        yield f"f32 {label}", lambda rule=rule, width=width: states(rule, width)
    for label, rule, width in (("delta", WIDE_DELTA, 384), ("Mamba 2", WIDE_MAMBA, 192)):
        yield f"bits {label}", lambda rule=rule, width=width: state_bits(rule, width)
    small = decoder(norms=True, n_layers=1, kv_heads=1)
    yield "bits window", lambda: invariance(decoder(n_layers=1, kv_heads=1, **WINDOW), f32, "f32", length=70)
    yield "bits int8", lambda: invariance(small, f32, "int8", fp8=True)
    thirds = decoder(group=3, n_layers=1, kv_heads=1)
    yield "bits f16", lambda: invariance(thirds, torch.float16, "f16")


def main() -> None:
    torch.set_grad_enabled(False)
    if INTERPRETED:
        round_to_fp8_as_torch_does()
        multiply_row_by_row()
    small_tiles()
    errors = {f"{label} {name}": error for label, check in all_errors() for name, error in check().items()}
    json.dump(errors, sys.stdout)


if __name__ == "__main__":
    main()

"""The operations as Triton kernels. Which tile sizes are fast was measured on an H200."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from cllm.backends.torch import attention_kernels, kernels, reference, triton_states
from cllm.backends.torch.arena import LayerMemory
from cllm.backends.torch.batch import StepBatch
from cllm.backends.torch.gemv import chains, gemv
from cllm.backends.torch.operations import Operations
from cllm.backends.torch.recurrences import Recurrence
from cllm.backends.torch.reference import Attention
from cllm.backends.torch.shared_prefixes import MOST_SPLITS, TOGETHER
from cllm.backends.torch.state_batch import StateBatch
from cllm.backends.torch.state_memory import StateMemory
from cllm.backends.torch.triton_linear import fast_linear, invariant_linear
from cllm.models.spec import Activation

LOG2_E = math.log2(math.e)
SHORTEST_SPLIT = 64
LONGEST_SPLIT = 2048
PROGRAMS = 1024
FEW_SPLITS = 16
"""So many programs keep the GPU busy. Where rows times KV heads are fewer, the context is cut, but not into more than
these, unless splits would become too long."""
DECODE_TILE = 64
WIDE_DECODE_TILE = 128
NARROW_ROW = 128
"""Where a key has no more bytes than this, the wide tile is faster."""
WIDE_ROW = 256
DECODE_WARPS = 4
DECODE_STAGES = 3
PROMPT_QUERIES = 128
PROMPT_TILE = 64
INVARIANT_SPLIT = 512
INVARIANT_QUERIES = 64
INVARIANT_TILE = 64
SMALLEST_DOT = 16
SILU_TILE = 1024
ARRIVALS = 1 << 18
STATE_BYTES = 128 << 20
"""What the invariant mode keeps of splits at a time."""


class TritonOperations(Operations):
    shares = True

    def __init__(self) -> None:
        self.one_row = gemv
        self._arrivals: Tensor | None = None

    def invariant(self) -> Operations:
        return InvariantOperations()

    def linear(self, x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None = None) -> Tensor:
        return fast_linear(x, weight, scales, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _norm(x, x, weight, eps, adds=False)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _norm(x, residual, weight, eps, adds=True)

    def gate_multiply(self, gate_up: Tensor, activation: Activation) -> Tensor:
        if activation == "relu2":  # no model that is known gates with it
            return reference.gate_multiply(gate_up, activation)
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out, gelu = gate_up.new_empty(rows, width), activation == "gelu"
        kernels.gate_kernel[(rows, triton.cdiv(width, SILU_TILE))](gate_up, out, width, tile=SILU_TILE, gelu=gelu)
        return out

    def rotate_and_store(self, qkv: Tensor, attention: Attention, batch: StepBatch, memory: LayerMemory) -> Tensor:
        own = attention.spec
        if own.qk_norm_last or own.kv_from is not None:
            # The kernel normalises before it turns, and has keys and values beside the queries. Few models need this.
            return reference.rotate_and_store(qkv, attention, batch, memory, _norm_rows)
        if own.qk_norm == "row" or own.v_norm or own.v_is_k:
            q, k, v = reference.prepare(qkv, attention, _norm_rows)
            qkv, norms = torch.cat((q, k, v), dim=1).flatten(1), False
        else:
            norms = own.qk_norm == "head"
        q_norm, k_norm = (attention.q_norm, attention.k_norm) if norms else (qkv, qkv)
        kv, tokens, heads, kv_heads, dim = memory.keys, len(qkv), own.n_heads, own.n_kv_heads, own.head_dim_k
        queries, half = qkv.new_empty(tokens, heads, dim), dim // 2
        kernels.rotate_store_kernel[(tokens, heads + 2 * kv_heads)](
            *(qkv, queries, kv, _scales(memory), q_norm, k_norm),
            *(attention.rotations, batch.positions, batch.slots, attention.eps),
            *(0, kv.stride(0), memory.v_offset),
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            half=half,
            padded=triton.next_power_of_2(half),
            size=memory.block_size,
            norms=norms,
            stored=memory.kv_type,
            **_chaining(tokens == 1 and chains(qkv.device)),
            num_warps=1,
        )
        return reference.temper(queries, attention, batch)

    def attend(self, q: Tensor, attention: Attention, batch: StepBatch, memory: LayerMemory) -> Tensor:
        out = torch.empty_like(q)
        if batch.decode_rows:
            self._decode(q, attention, batch, memory, out)
        if batch.longest_chunk:
            _attend_chunks(q, attention, batch, memory, out)
        return out

    def recur(self, given: Tensor, recurrence: Recurrence, batch: StateBatch, memory: StateMemory) -> Tensor:
        return triton_states.recur(given, recurrence, batch, memory, _norm_rows)

    def _decode(self, q: Tensor, attention: Attention, batch: StepBatch, memory: LayerMemory, out: Tensor) -> None:
        kv, rows, heads, dim, window = memory.keys, batch.decode_rows, q.shape[1], q.shape[2], attention.spec.window
        # What rows share is no beginning that all of them see where windows move on.
        shared = None if window else batch.shared
        kv_heads = kv.shape[1]
        group = heads // kv_heads
        longest = min(batch.longest, window or batch.longest)
        split = decode_split(rows * kv_heads, longest) if shared is None else shared.split
        splits = triton.cdiv(longest, split) + (window > 0)  # a window may begin within a split
        states = _states(rows, heads, splits, dim, q.device)
        tile = halved(DECODE_TILE if dim * kv.itemsize > NARROW_ROW else WIDE_DECODE_TILE, q)
        factor, strides = _factor(attention), (0, kv.stride(0), memory.v_offset)
        sizes = {"group": group, "dim": dim, "size": memory.block_size, "scaled": memory.key_scales is not None}
        softcap = attention.spec.softcap
        if shared is not None:
            attention_kernels.shared_kernel[(len(shared.members), kv_heads, splits)](
                *(q, kv, _scales(memory), batch.tables, shared.members, shared.extents, *states, factor),
                *(batch.tables.stride(0), *strides, splits, split),
                **sizes,
                heads=heads,
                together=TOGETHER,
                queries=triton.next_power_of_2(TOGETHER * group),
                tile=tile,
                softcap=softcap,
                num_warps=DECODE_WARPS,
                num_stages=DECODE_STAGES,
            )
        attention_kernels.decode_kernel[(rows, kv_heads, splits)](
            *(q, kv, _scales(memory), batch.tables, batch.lengths, batch.lengths if shared is None else shared.firsts),
            *(*states, self._counters(rows * kv_heads, q.device), out, factor),
            *(batch.tables.stride(0), *strides, splits, split),
            **sizes,
            heads=heads,
            kv_heads=kv_heads,
            group_padded=max(SMALLEST_DOT, triton.next_power_of_2(group)),
            tile=tile,
            shared=shared is not None,
            **_chaining(rows == 1 and chains(q.device)),
            window=window,
            softcap=softcap,
            sinks=attention.sinks,
            num_warps=DECODE_WARPS,
            num_stages=DECODE_STAGES,
        )

    def _counters(self, needed: int, device: torch.device) -> Tensor:
        """Zeros, and zeros again after each kernel; graphs know where they are."""
        if self._arrivals is None:
            self._arrivals = torch.zeros(ARRIVALS, dtype=torch.int32, device=device)
        assert needed <= ARRIVALS, "more rows than there are counters"
        return self._arrivals


class InvariantOperations(TritonOperations):
    """Tiles and splits are fixed, whatever the number of rows and whether they are tokens of a prompt or not."""

    shares = False

    def __init__(self) -> None:
        super().__init__()
        self.one_row = None

    def invariant(self) -> Operations:
        return self

    def linear(self, x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None = None) -> Tensor:
        return invariant_linear(x, weight, scales, bias)

    def attend(self, q: Tensor, attention: Attention, batch: StepBatch, memory: LayerMemory) -> Tensor:
        out = torch.empty_like(q)
        heads, dim, kv_heads, window = q.shape[1], q.shape[2], memory.keys.shape[1], attention.spec.window
        splits = triton.cdiv(min(batch.longest, window or batch.longest), INVARIANT_SPLIT) + (window > 0)
        together = max(1, STATE_BYTES // (4 * heads * splits * (dim + 2)))
        for first in range(0, batch.decode_rows, together):
            rows = min(together, batch.decode_rows - first)
            states = _states(rows, heads, splits, dim, q.device)
            grid = rows, kv_heads, splits
            self._launch(q, attention, batch, memory, out, states, first, grid, parted=True)
        if batch.longest_chunk:
            tiles = triton.cdiv(batch.longest_chunk * (heads // kv_heads), INVARIANT_QUERIES)
            grid = tiles, kv_heads, len(batch.lengths) - batch.decode_rows
            self._launch(q, attention, batch, memory, out, (q, q, q), batch.decode_rows, grid, parted=False)
        return out

    def _launch(
        self,
        q: Tensor,
        attention: Attention,
        batch: StepBatch,
        memory: LayerMemory,
        out: Tensor,
        states: tuple[Tensor, Tensor, Tensor],
        first_row: int,
        grid: tuple[int, int, int],
        *,
        parted: bool,
    ) -> None:
        kv, heads, dim = memory.keys, q.shape[1], q.shape[2]
        kv_heads = kv.shape[1]
        attention_kernels.invariant_kernel[grid](
            *(q, kv, _scales(memory), batch.tables, batch.starts, batch.lengths, *states),
            *(self._counters(grid[0] * kv_heads if parted else 0, q.device), out, first_row, _factor(attention)),
            *(batch.tables.stride(0), 0, kv.stride(0), memory.v_offset, grid[2] if parted else 1),
            heads=heads,
            kv_heads=kv_heads,
            group=heads // kv_heads,
            height=INVARIANT_QUERIES,
            dim=dim,
            size=memory.block_size,
            split=INVARIANT_SPLIT,
            tile=halved(INVARIANT_TILE, q),
            scaled=memory.key_scales is not None,
            parted=parted,
            window=attention.spec.window,
            softcap=attention.spec.softcap,
            sinks=attention.sinks,
            num_warps=4,
            num_stages=3,
            enable_fp_fusion=False,  # what is fused is the compiler's choice, and it compiles this twice
        )


def decode_split(programs: int, longest: int) -> int:
    """Positions per split, a power of two, for this many rows times KV heads."""
    wanted = min(FEW_SPLITS, triton.cdiv(PROGRAMS, programs))
    split = int(min(LONGEST_SPLIT, max(SHORTEST_SPLIT, triton.next_power_of_2(triton.cdiv(longest, wanted)))))
    while split * MOST_SPLITS < longest:
        split *= 2
    return split


def halved(tile: int, q: Tensor) -> int:
    """For heads of many bytes: a GPU may have no more than 99 KiB of memory for a program's tiles."""
    times = -(-int(q.shape[2] * q.element_size()) // WIDE_ROW)
    return max(SMALLEST_DOT, tile // times)


def _factor(attention: Attention) -> float:
    """What the kernels multiply scores by: they compute in powers of two, but before a cap."""
    return attention.scale / attention.spec.softcap if attention.spec.softcap else attention.scale * LOG2_E


def _chaining(chained: bool) -> dict[str, bool]:
    return {"chained": True, "launch_pdl": True} if chained else {"chained": False}


def _scales(memory: LayerMemory) -> Tensor:
    return memory.keys if memory.key_scales is None else memory.key_scales


def _states(rows: int, heads: int, splits: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Room for every split's sum of weighted values, sum of weights, and highest score."""
    sums = torch.empty((rows, heads, splits, dim), dtype=torch.float32, device=device)
    totals, peaks = torch.empty((2, rows, heads, splits), dtype=torch.float32, device=device)
    return sums, totals, peaks


def _norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, adds: bool) -> Tensor:
    out = torch.empty_like(x)
    rows, width = x.shape
    kernels.norm_kernel[(rows,)](
        *(x, residual, weight, out, eps), width=width, padded=triton.next_power_of_2(width), adds=adds, num_warps=8
    )
    return out


def _norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A norm of any shape. torch's own sums may be taken in another order where there are more rows."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return _norm(rows, rows, weight, eps, adds=False).view(x.shape)


def _attend_chunks(q: Tensor, attention: Attention, batch: StepBatch, memory: LayerMemory, out: Tensor) -> None:
    kv, heads, dim = memory.keys, q.shape[1], q.shape[2]
    rows = len(batch.lengths) - batch.decode_rows
    queries = halved(PROMPT_QUERIES, q)
    attention_kernels.prompt_kernel[(triton.cdiv(batch.longest_chunk, queries), heads, rows)](
        *(q, kv, _scales(memory), batch.tables, batch.starts, batch.lengths, out, batch.decode_rows),
        *(_factor(attention), batch.tables.stride(0), 0, kv.stride(0), memory.v_offset),
        heads=heads,
        group=heads // kv.shape[1],
        dim=dim,
        size=memory.block_size,
        q_tile=queries,
        tile=halved(PROMPT_TILE, q),
        scaled=memory.key_scales is not None,
        window=attention.spec.window,
        softcap=attention.spec.softcap,
        sinks=attention.sinks,
        num_warps=8,
        num_stages=3,
    )

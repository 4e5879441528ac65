"""The operations as Triton kernels. Which tile sizes are fast was measured on an H200."""

from __future__ import annotations

import math

import torch
import triton

from cllm.backends.torch import kernels
from cllm.backends.torch.arena import Arena
from cllm.backends.torch.batch import StepBatch
from cllm.backends.torch.decoder import Decoder
from cllm.backends.torch.operations import Operations

LOG2_E = math.log2(math.e)
DECODE_SPLIT = 512
SHORT_SPLIT = 64
MANY_PROGRAMS = 128
DECODE_TILE = 64
PROMPT_QUERIES = 128
PROMPT_TILE = 64
SMALLEST_DOT = 16
SILU_TILE = 1024


class TritonOperations(Operations):
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return _norm(x, x, weight, eps, adds=False)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return _norm(x, residual, weight, eps, adds=True)

    def silu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        kernels.silu_kernel[(rows, triton.cdiv(width, SILU_TILE))](gate_up, out, width, tile=SILU_TILE)
        return out

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        decoder: Decoder,
        rotations: torch.Tensor,
        batch: StepBatch,
        arena: Arena,
        layer: int,
    ) -> torch.Tensor:
        kv, tokens, half = arena.data, len(qkv), decoder.head_dim // 2
        queries = qkv.new_empty(tokens, decoder.n_heads, decoder.head_dim)
        kernels.rotate_store_kernel[(tokens, decoder.n_heads + 2 * decoder.n_kv_heads)](
            *(qkv, queries, kv, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm),
            *(rotations, batch.positions, batch.slots, decoder.rms_eps),
            *(layer * kv.stride(1), kv.stride(0), kv.stride(2)),
            heads=decoder.n_heads,
            kv_heads=decoder.n_kv_heads,
            dim=decoder.head_dim,
            half=half,
            padded=triton.next_power_of_2(half),
            size=kv.shape[4],
            norms=q_norm is not None,
            num_warps=1,
        )
        return queries

    def attend(self, q: torch.Tensor, arena: Arena, layer: int, batch: StepBatch) -> torch.Tensor:
        out = torch.empty_like(q)
        if batch.decode_rows:
            _decode(q, arena, layer, batch, out)
        if batch.longest_chunk:
            _attend_chunks(q, arena, layer, batch, out)
        return out


def _norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, adds: bool) -> torch.Tensor:
    out = torch.empty_like(x)
    rows, width = x.shape
    kernels.norm_kernel[(rows,)](
        *(x, residual, weight, out, eps), width=width, padded=triton.next_power_of_2(width), adds=adds, num_warps=8
    )
    return out


def _decode(q: torch.Tensor, arena: Arena, layer: int, batch: StepBatch, out: torch.Tensor) -> None:
    kv, rows, heads, dim = arena.data, batch.decode_rows, q.shape[1], q.shape[2]
    kv_heads = kv.shape[3]
    group = heads // kv_heads
    split = DECODE_SPLIT if rows * kv_heads >= MANY_PROGRAMS else SHORT_SPLIT
    splits = triton.cdiv(batch.longest, split)
    sums = torch.empty((rows, heads, splits, dim), dtype=torch.float32, device=q.device)
    peaks = torch.empty((2, rows, heads, splits), dtype=torch.float32, device=q.device)
    kernels.decode_kernel[(rows, kv_heads, splits)](
        *(q, kv, batch.tables, batch.lengths, sums, peaks[0], peaks[1], dim**-0.5 * LOG2_E, batch.tables.stride(0)),
        *(layer * kv.stride(1), kv.stride(0), kv.stride(2), splits),
        heads=heads,
        kv_heads=kv_heads,
        group=group,
        group_padded=max(SMALLEST_DOT, triton.next_power_of_2(group)),
        dim=dim,
        size=kv.shape[4],
        split=split,
        tile=DECODE_TILE,
        num_warps=4,
        num_stages=3,
    )
    kernels.merge_kernel[(rows, heads)](
        *(sums, peaks[0], peaks[1], batch.lengths, out, splits), heads=heads, dim=dim, split=split, num_warps=1
    )


def _attend_chunks(q: torch.Tensor, arena: Arena, layer: int, batch: StepBatch, out: torch.Tensor) -> None:
    kv, heads, dim = arena.data, q.shape[1], q.shape[2]
    rows = len(batch.lengths) - batch.decode_rows
    kernels.prompt_kernel[(triton.cdiv(batch.longest_chunk, PROMPT_QUERIES), heads, rows)](
        *(q, kv, batch.tables, batch.starts, batch.lengths, out, batch.decode_rows, dim**-0.5 * LOG2_E),
        *(batch.tables.stride(0), layer * kv.stride(1), kv.stride(0), kv.stride(2)),
        heads=heads,
        group=heads // kv.shape[3],
        dim=dim,
        size=kv.shape[4],
        q_tile=PROMPT_QUERIES,
        tile=PROMPT_TILE,
        num_warps=8,
        num_stages=3,
    )

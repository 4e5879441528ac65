"""Attention and matrix kernels, compiled for a GPU that need not be there; run by `test_torch_kernels.py`."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cllm.backends.torch import attention_kernels, gemv, matrix_kernels, state_kernels
from cllm.backends.torch import triton_operations as sizes

INTS = ("tables", "lengths", "firsts", "starts", "arrivals", "members", "extents")
FLOATS = ("sums", "totals", "peaks")
NUMBERS = ("table_stride", "layer", "block_stride", "v_offset", "splits", "split", "first_row", "rows", "columns")
NARROW = {"bf16": "*bf16", "fp8": "*fp8e4nv", "int8": "*i8"}


def compiled(kernel: Any, kinds: dict[str, str], constants: dict[str, Any], warps: int = 4) -> None:
    names = kernel.arg_names
    known = dict.fromkeys(INTS, "*i32") | dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(NUMBERS, "i32") | kinds
    signature = {name: "constexpr" if name in constants else known.get(name, "*bf16") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]


def attention(kv_type: str, dim: int, window: int = 0, softcap: float = 0.0, *, sinks: bool = False) -> None:
    kinds = {"kv": NARROW[kv_type], "scales": "*fp16" if kv_type == "int8" else NARROW[kv_type], "factor": "fp32"}
    common = {"heads": 32, "group": 4, "dim": dim, "size": 16, "scaled": kv_type == "int8", "softcap": softcap}
    more: dict[str, Any] = {"window": window} | ({} if sinks else {"sinks": None})
    for shared in (False, True):
        decode = {"kv_heads": 8, "group_padded": 16, "tile": sizes.DECODE_TILE, "shared": shared, "chained": not shared}
        compiled(attention_kernels.decode_kernel, kinds, common | decode | more)
    together = {"together": 16, "queries": 64, "tile": sizes.WIDE_DECODE_TILE}
    compiled(attention_kernels.shared_kernel, kinds, common | together)
    prompt = {"q_tile": sizes.PROMPT_QUERIES, "tile": sizes.PROMPT_TILE}
    compiled(attention_kernels.prompt_kernel, kinds, common | prompt | more, 8)
    fixed = {"split": sizes.INVARIANT_SPLIT, "tile": sizes.INVARIANT_TILE, "height": sizes.INVARIANT_QUERIES}
    for parted in (False, True):
        compiled(attention_kernels.invariant_kernel, kinds, common | fixed | more | {"kv_heads": 8, "parted": parted})


def products() -> None:
    for weight in ("bf16", "fp8"):
        kinds = {"weight": NARROW[weight], "scales": "*fp32", "eps": "fp32"}
        scaled = weight == "fp8"
        for gated in (False, True):
            tile = gemv.tile_of(1 if scaled else 2, 4096, gated)
            shape = {"width": 4096, "padded": 4096, "tile_rows": tile.rows, "tile": tile.columns}
            flags = {
                "norms": True,
                "adds": True,
                "biased": not gated,
                "scaled": scaled,
                "gated": gated,
                "chained": True,
            }
            compiled(matrix_kernels.gemv_kernel, kinds, shape | flags | {"chained": True}, tile.warps)
        tiles = {"width": 4096, "row_tile": 64, "column_tile": 64, "tile": 64}
        compiled(matrix_kernels.product_kernel, kinds, tiles | {"scaled": scaled, "biased": False})


def states() -> None:
    kinds = dict.fromkeys(("q", "k", "v", "fades", "rates", "out", "arena"), "*fp32")
    kinds |= dict.fromkeys(("places", "reads", "writes"), "*i64") | {"cell_stride": "i64", "cells": "i32"}
    for delta, heads, keys in ((True, 32, 128), (False, 48, 256)):
        sizes = {"heads": heads, "values": 128, "keys": keys, "tile": 16, "padded": keys, "delta": delta}
        compiled(state_kernels.advance_kernel, kinds, sizes, 1)


if __name__ == "__main__":
    attention("bf16", 128)
    attention("int8", 64)
    attention("bf16", 256, window=1024, softcap=50.0)
    attention("bf16", 64, window=128, sinks=True)
    products()
    states()
    print("all")

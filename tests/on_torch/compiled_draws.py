"""The kernels that choose tokens, compiled for a GPU that need not be there; run by `test_torch_drawing.py`."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cllm.backends.torch import sampling_kernels as kernels
from cllm.backends.torch import triton_sampling as sizes

POINTERS = {"totals": "*fp64", "draws": "*fp64", "values": "*fp64", "rates": "*fp64", "found": "*i64"}
INTS = ("bests", "counts", "tokens", "last", "owners", "ids", "starts", "follows", "table", "firsts", "tables")
NUMBERS = ("width", "stride", "parts", "groups", "rank_by_mass", "table_stride")


def compiled(kernel: Any, warps: int, **constants: int) -> None:
    names = kernel.arg_names
    kinds = dict.fromkeys(INTS, "*i32") | dict.fromkeys(NUMBERS, "i32") | POINTERS
    signature = {name: "constexpr" if name in constants else kinds.get(name, "*fp32") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert made.asm["ptx"]


if __name__ == "__main__":
    tile, few = sizes.TILE, sizes.FEW
    compiled(kernels.peak_kernel, 4, tile=sizes.PART, group=64)
    for samples, warps in ((0, 1), (1, 8)):
        options = {"samples": samples, "tile": tile, "parts_padded": 32, "groups_padded": 2048, "few": few}
        compiled(kernels.gather_kernel, warps, **options)
    compiled(kernels.choose_kernel, 8, tile=tile, few=few)
    compiled(kernels.wide_kernel, 16, tile=tile, ways=sizes.WAYS)
    compiled(kernels.bias_kernel, 2, tile=sizes.LIST_TILE)
    compiled(kernels.penalty_kernel, 2, tile=sizes.LIST_TILE)
    compiled(kernels.prepare_kernel, 2, tile=sizes.LIST_TILE)
    print("all")

"""Choosing tokens with the kernels of sampling_kernels.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from cllm.backends.torch import sampling_kernels as kernels
from cllm.backends.torch.sampling import Penalties, Sampler, TokenBiases
from cllm.backends.torch.staging import aligned

PART = 4096
"""Values that one program looks at for the best one."""
TILE = 4096
FEW = 1024
"""Candidates that a truncated row is drawn from, if they are enough."""
RANK = 512
"""Candidates are about as many if only `top_p` says how many are needed."""
GROUPS = 2048
WAYS = 16
LIST_TILE = 256


@dataclass(frozen=True, slots=True)
class _Sizes:
    width: int
    parts: int
    group: int
    groups: int


def _sizes(width: int) -> _Sizes:
    parts = triton.cdiv(width, PART)
    group = min(PART, max(2, triton.next_power_of_2(triton.cdiv(width, GROUPS))))
    return _Sizes(width, parts, group, parts * (PART // group))


class TritonSampler(Sampler):
    def prepare(
        self, tokens: Tensor, follows: Tensor, last: Tensor, table: Tensor, firsts: Tensor, tables: Tensor
    ) -> None:
        kernels.prepare_kernel[(len(follows),)](
            *(tokens, follows, last, table, firsts, tables, tables.stride(0)), tile=LIST_TILE, num_warps=2
        )

    def bias(self, logits: Tensor, listed: TokenBiases) -> None:
        kernels.bias_kernel[(len(logits),)](
            *(logits, listed.ids, listed.values, listed.starts, logits.stride(0)), tile=LIST_TILE, num_warps=2
        )

    def penalise(self, logits: Tensor, seen: Penalties, last: Tensor) -> None:
        kernels.penalty_kernel[(len(logits),)](
            *(logits, seen.ids, seen.counts, seen.starts, seen.rates, seen.follows, last, logits.stride(0)),
            tile=LIST_TILE,
            num_warps=2,
            enable_fp_fusion=False,  # rounded as on the host
        )

    def choose(self, logits: Tensor, params: Tensor | None, owners: Tensor, last: Tensor) -> Tensor:
        rows, width, device = len(logits), logits.shape[1], logits.device
        sizes, room = _sizes(width), aligned(rows)
        ints = torch.empty(room * (sizes.parts + 2), dtype=torch.int32, device=device)
        bests, counts, tokens = ints.split([room * sizes.parts, room, room])
        floats = torch.empty(room * (sizes.parts + sizes.groups + 1), dtype=torch.float32, device=device)
        peaks, maxima, row_peaks = floats.split([room * sizes.parts, room * sizes.groups, room])
        kernels.peak_kernel[(rows, sizes.parts)](
            *(logits, peaks, bests, maxima, width, logits.stride(0), sizes.parts, sizes.groups),
            tile=PART,
            group=sizes.group,
        )
        samples = params is not None
        totals = torch.empty(rows, dtype=torch.float64, device=device) if samples else floats
        found = torch.empty((rows, FEW), dtype=torch.int64, device=device) if samples else ints
        draws = floats if params is None else params
        kernels.gather_kernel[(rows,)](
            *(logits, draws, peaks, bests, maxima, row_peaks, totals, counts, found, tokens, last, owners),
            *(width, logits.stride(0), sizes.parts, sizes.groups, max(1, min(RANK, sizes.groups // 3))),
            samples=samples,
            tile=TILE,
            parts_padded=triton.next_power_of_2(sizes.parts),
            groups_padded=triton.next_power_of_2(sizes.groups),
            few=FEW,
            num_warps=8 if samples else 1,
        )
        if samples:
            ends = (tokens, last, owners, width, logits.stride(0))
            kernels.choose_kernel[(rows,)](
                *(logits, draws, row_peaks, totals, counts, found, *ends), tile=TILE, few=FEW, num_warps=8
            )
            kernels.wide_kernel[(rows,)](*(logits, draws, row_peaks, totals, *ends), tile=TILE, ways=WAYS, num_warps=16)
        return tokens[:rows]

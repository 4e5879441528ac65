"""K and V of all sequences, block by block, in one tensor: a block is one piece of memory.

int8 stores a vector as value = scale * number, with one scale for each token and KV head. fp8 (e4m3) needs none: what a
model's keys and values reach is far below its 448, and what is not is cut off there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cllm.kv.ops import BlockGeometry, Move
from cllm.models.spec import ModelSpec

KV_DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_MOVED_BYTES = 64 << 20
"""A move whose source and target overlap goes through a copy of this many bytes at a time."""


class Arena:
    def __init__(
        self,
        spec: ModelSpec,
        geometry: BlockGeometry,
        kv_type: str,
        device: torch.device | str = "cpu",
        spare_blocks: int = 0,
    ) -> None:
        self.kv_type = kv_type
        self.block_size = geometry.block_size
        self.blocks = geometry.blocks
        """Blocks of the pool; spare ones, which belong to no sequence, come after them."""
        attention = spec.layers[0].attention  # equal in all layers, so far
        places = geometry.blocks + spare_blocks, spec.n_layers, 2, attention.n_kv_heads, geometry.block_size
        self.data = _zeros((*places, attention.head_dim_k), KV_DTYPES[kv_type], torch.device(device))
        """[blocks, layers, keys and values, KV heads, places in the block, head_dim]"""
        self.scales = _zeros(places, torch.float16, torch.device(device)) if kv_type == "int8" else None
        """The same without the last dimension, for int8 alone."""

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return sum(int(part.nbytes) for part in self.parts)

    @property
    def parts(self) -> list[Tensor]:
        """As bytes: not every operation is there for every type."""
        return [part.view(torch.uint8) for part in (self.data, self.scales) if part is not None]

    @property
    def block_bytes(self) -> int:
        return sum(int(part[0].nbytes) for part in self.parts)

    def read(self, blocks: Sequence[int]) -> Tensor:
        """A copy of what they hold, in the host's memory: a row of bytes each."""
        chosen = torch.tensor(list(blocks), device=self.device)
        return torch.cat([part[chosen].flatten(1) for part in self.parts], 1).cpu()

    def write(self, blocks: Sequence[int], content: Tensor) -> None:
        """The opposite of `read`."""
        chosen, content, start = torch.tensor(list(blocks), device=self.device), content.to(self.device), 0
        for part in self.parts:
            size = int(part[0].nbytes)
            part[chosen] = content[:, start : start + size].reshape(-1, *part.shape[1:])
            start += size

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Blocks given as (source, target); all are read before any is written."""
        if pairs:
            sources, targets = torch.tensor(pairs, device=self.device).unbind(1)
            for part in self.parts:
                part[targets] = part[sources]

    def move(self, moves: Sequence[Move]) -> None:
        """One after the other, and each as if it went through a copy of its source."""
        for move in moves:
            for part in self.parts:
                _move(part, *move)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where the system gives out zeros, memory is taken as it is used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * int(dtype.itemsize), np.uint8)).view(dtype).view(shape)


def _move(part: Tensor, source: int, target: int, blocks: int) -> None:
    if abs(source - target) >= blocks:
        part[target : target + blocks].copy_(part[source : source + blocks])
        return
    together = max(1, _MOVED_BYTES // int(part[0].nbytes))
    firsts = range(0, blocks, together)
    # From the end that is not written over before it is read.
    for first in firsts if target < source else reversed(firsts):
        count = min(together, blocks - first)
        part[target + first : target + first + count] = part[source + first : source + first + count].clone()

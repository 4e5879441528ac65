"""K and V of all sequences: one tensor of equal cells. What a block holds of all layers lies in one cell.

Where layers with a window are apart from the others, or layers carry a state, cells are bytes, and what lies where in
them is the layout's (`kv/groups.py`): a block of K and V, or a state, may take several.

A layer knows its part of a cell as views of the memory, with their own sizes and strides, and asks nothing else; it
reads the cells that the tables of the step name. A layer that takes the keys and values of another has its views.

int8 stores a vector as value = scale * number, with one scale for each token and KV head. fp8 (e4m3) needs none: what a
model's keys and values reach is far below its 448, and what is not is cut off there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cllm.backends.torch.state_memory import StateMemory, state_memory
from cllm.kv.groups import STATE_ALIGNMENT, KVLayout
from cllm.kv.ops import BlockGeometry, Move
from cllm.models.spec import AttentionSpec, ModelSpec

KV_DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_MOVED_BYTES = 64 << 20
"""A move whose source and target overlap goes through a copy of this many bytes at a time."""


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """A layer's part of every cell."""

    keys: Tensor
    """[cells, KV heads, places in the block, head_dim], as is `values`"""
    values: Tensor
    key_scales: Tensor | None
    """The same without the last dimension, for int8 alone."""
    value_scales: Tensor | None
    kv_type: str
    table: int = 0
    """Which of a step's tables says in which cells its blocks are."""

    @property
    def block_size(self) -> int:
        return int(self.keys.shape[2])

    @property
    def v_offset(self) -> int:
        """Elements from a layer's keys to its values."""
        return int(self.values.storage_offset() - self.keys.storage_offset())


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
        cells, where = geometry.blocks + spare_blocks, torch.device(device)
        self.data: Tensor
        """[cells, elements]: keys and values of every layer that has its own, one after another; or bytes"""
        self.scales: Tensor | None = None
        """[cells, vectors], in the same order, for int8 alone."""
        self.states: dict[int, StateMemory] = {}
        """States, by the numbers of layers that carry one."""
        layout = geometry.layout
        if layout is None or (layout.local is None and layout.states is None):
            own = self._one_after_another(spec, cells, where)
        else:
            own = self._laid_out(spec, layout, cells, where)
        self.layers = own | {
            number: own[layer.attention.kv_from]
            for number, layer in enumerate(spec.layers)
            if layer.attention is not None and layer.attention.kv_from is not None
        }
        """Keys and values, by the numbers of layers that attend."""

    def _one_after_another(self, spec: ModelSpec, cells: int, device: torch.device) -> dict[int, LayerMemory]:
        own = _attentions(spec)
        shapes = [shape for each in own.values() for shape in _shapes(each, self.block_size)]
        self.data = _zeros((cells, sum(map(math.prod, shapes))), KV_DTYPES[self.kv_type], device)
        scales: list[Tensor] | list[None] = [None] * len(shapes)
        if self.kv_type == "int8":
            vectors = [shape[:2] for shape in shapes]
            self.scales = _zeros((cells, sum(map(math.prod, vectors))), torch.float16, device)
            scales = _cut(self.scales, vectors)
        parts = list(zip(_cut(self.data, shapes), scales, strict=True))
        return {
            number: LayerMemory(keys, values, key_scales, value_scales, self.kv_type)
            for number, (keys, key_scales), (values, value_scales) in zip(own, parts[::2], parts[1::2], strict=True)
        }

    def _laid_out(self, spec: ModelSpec, layout: KVLayout, cells: int, device: torch.device) -> dict[int, LayerMemory]:
        own, itemsize = _attentions(spec), int(KV_DTYPES[self.kv_type].itemsize)
        # Kernels go from cell to cell by whole vectors of each layer.
        vectors = {dim * itemsize for each in own.values() for dim in (each.head_dim_k, each.head_dim_v)}
        unit = math.lcm(STATE_ALIGNMENT, *vectors)
        self.data = _zeros((cells, -(-layout.cell_bytes // unit) * unit), torch.uint8, device)
        found = {}
        for table, group in enumerate(layout.groups):
            cell, end = 0, 0
            for number in group.layers:
                each = own[number]
                size = self.block_size * each.kv_bytes_per_token(self.kv_type, self.kv_type)
                if end + size > layout.cell_bytes:
                    cell, end = cell + 1, 0
                found[number] = self._part(_shapes(each, self.block_size), end, table + cell)
                end += size
        if layout.states is not None:
            values = self.data.view(torch.float32)
            for number, places in zip(layout.states.layers, layout.states.places, strict=True):
                recurrence = spec.layers[number].recurrence
                assert recurrence is not None
                self.states[number] = state_memory(values, recurrence, places)
        return found

    def _part(self, shapes: Sequence[tuple[int, ...]], start: int, table: int) -> LayerMemory:
        """A layer's keys, values, and the scales of both, from a byte of every cell on."""
        dtype = KV_DTYPES[self.kv_type]
        kinds = [(shape, dtype) for shape in shapes]
        if self.kv_type == "int8":
            kinds += [(shape[:2], torch.float16) for shape in shapes]
        views = []
        for shape, kind in kinds:
            end = start + math.prod(shape) * int(kind.itemsize)
            views.append(self.data[:, start:end].view(kind).unflatten(1, shape))
            start = end
        keys, values, *scales = views
        key_scales, value_scales = scales or (None, None)
        return LayerMemory(keys, values, key_scales, value_scales, self.kv_type, table)

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


def _attentions(spec: ModelSpec) -> dict[int, AttentionSpec]:
    """Layers that have keys and values of their own."""
    found = ((number, layer.attention) for number, layer in enumerate(spec.layers))
    return {number: own for number, own in found if own is not None and own.kv_from is None}


def _shapes(own: AttentionSpec, block_size: int) -> list[tuple[int, ...]]:
    """What a block has of a layer's keys, and of its values."""
    return [(own.n_kv_heads, block_size, dim) for dim in (own.head_dim_k, own.head_dim_v)]


def _cut(memory: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Views of parts of every cell that follow each other."""
    sizes = list(map(math.prod, shapes))
    parts = memory.split(sizes, dim=1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]


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

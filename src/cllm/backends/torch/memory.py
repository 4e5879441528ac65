"""What a backend has once its memory is allocated; a rebuild makes a new one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cllm.backends.torch.arena import Arena
from cllm.backends.torch.batch import Bounds, Tables
from cllm.backends.torch.graphs import DecodeGraphs
from cllm.backends.torch.model import Model
from cllm.kv.ops import BlockGeometry


@dataclass(slots=True)
class Memory:
    geometry: BlockGeometry
    arena: Arena
    """Where there are graphs, with one block more than the pool."""
    model: Model
    graphs: DecodeGraphs | None
    bounds: Bounds
    last: Tensor
    """The token that each row number drew last, int32."""
    tables: Tables

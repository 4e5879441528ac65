"""The torch backend's K/V memory, and what the cache does with its blocks.

K and V lie in one tensor of blocks on the device. A GPU's is taken whole when it is allocated, a CPU's as it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cllm.backends.torch.arena import Arena
from cllm.backends.torch.faults import DeviceFaults
from cllm.backends.torch.host_rows import Rows
from cllm.errors import BackendError
from cllm.kv.ops import Move

LANDED_AT_ONCE_BYTES = 64 << 20
"""Device memory for this much beside the arena; a load may be larger."""


class BlockMemory:
    """`cllm.kv.ops.BlockOps` and `BlockBytes` over an arena, which a rebuild replaces. Everything is queued in the
    order of the steps; only copies to and from rows in the host's memory go beside them."""

    def __init__(self, faults: DeviceFaults) -> None:
        self._faults = faults
        self._arena: Arena | None = None
        self._host_rows: Rows | None = None

    @property
    def arena(self) -> Arena:
        if self._arena is None:
            raise no_memory()
        return self._arena

    def use(self, arena: Arena) -> None:
        self._arena = arena

    def free(self) -> None:
        """Wait for all copies, then let the arena go."""
        if self._host_rows is not None:
            self._host_rows.drain()
        self._arena = None

    def close(self) -> None:
        rows, self._host_rows = self._host_rows, None
        if rows is not None:
            rows.close()
        self._arena = None  # only now: copies read and write it

    def open_host_rows(self, limit: int) -> Rows:
        """Rows of at most `limit` bytes of host memory, which exist until `close`."""
        self._host_rows = Rows(lambda: self.arena, limit, self._faults)
        return self._host_rows

    # -- blocks on the device ----------------------------------------------------------------------------------

    @property
    def kv_bytes(self) -> int:
        return self.arena.nbytes

    def resident_bytes(self) -> int:
        return self.kv_bytes

    def release_pages(self, first: int, count: int) -> None:
        """The arena is one piece of the device's memory: nothing of it can be given back alone."""

    def prepare_pages(self, first: int, count: int) -> None:
        """The arena is there since it was allocated."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        arena = self._checked([block for pair in pairs for block in pair])
        with self._faults.at(f"copying {len(pairs)} blocks"):
            arena.copy(pairs)

    def move_blocks(self, moves: Sequence[Move]) -> None:
        firsts = [(end, move.blocks) for move in moves for end in (move.source, move.target)]
        arena = self._checked([block for first, count in firsts for block in (first, first + count - 1)])
        with self._faults.at(f"moving {len(moves)} runs of blocks"):
            arena.move(moves)

    # -- blocks as bytes ---------------------------------------------------------------------------------------

    @property
    def reads_wait(self) -> bool:
        return bool(self.arena.device.type != "cpu")

    @property
    def block_bytes(self) -> int:
        return self.arena.block_bytes

    def read_blocks(self, blocks: Sequence[int]) -> list[NDArray[np.uint8]]:
        arena = self._checked(blocks)
        with self._faults.at(f"reading {len(blocks)} blocks"):
            return list(arena.read(blocks).numpy())

    def landing(self, blocks: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Memory of the host: a step that is under way may still write to blocks that were just freed."""
        return list(np.empty((len(blocks), self._checked(blocks).block_bytes), np.uint8))

    def land(self, blocks: Sequence[int], content: Sequence[NDArray[np.uint8]]) -> None:
        arena = self._checked(blocks)
        with self._faults.at(f"writing {len(blocks)} blocks"):
            rows = torch.from_numpy(_as_one(content))
            step = max(1, LANDED_AT_ONCE_BYTES // arena.block_bytes)
            for start in range(0, len(blocks), step):
                arena.write(blocks[start : start + step], rows[start : start + step])

    def _checked(self, blocks: Sequence[int]) -> Arena:
        arena = self.arena
        wrong = next((block for block in blocks if not 0 <= block < arena.blocks), None)
        if wrong is not None:
            raise BackendError(f"block {wrong} does not exist: there are {arena.blocks}")
        return arena


def no_memory() -> BackendError:
    return BackendError("the torch backend has no memory: allocate() was not called, or close() was", fatal=True)


def _as_one(content: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Blocks as rows of one array; the first ones of `landing` are that already, and not copied."""
    rows = content[0].base
    if isinstance(rows, np.ndarray) and rows.ndim == 2 and len(rows) >= len(content):
        own = zip(content, rows, strict=False)
        if all(block.base is rows and _address(block) == _address(row) for block, row in own):
            return rows[: len(content)]
    return np.stack(content)


def _address(memory: NDArray[np.uint8]) -> int:
    address: int = memory.__array_interface__["data"][0]
    return address

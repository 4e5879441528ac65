"""The torch backend's blocks as bytes in host memory, for the slower tiers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cllm.backends.base import Backend
from cllm.backends.torch.arena import Arena
from cllm.backends.torch.host_rows import Rows
from cllm.errors import BackendError

LANDED_AT_ONCE_BYTES = 64 << 20
"""Device memory for this much beside the arena; a load may be larger."""


class BlocksAsBytes(Backend):
    """`cllm.kv.ops.BlockBytes`. What is read and written goes through copies, in the order of the steps; with rows in
    the host's memory, beside them."""

    _host_rows: Rows | None = None

    def open_host_rows(self, limit: int) -> Rows:
        """Rows of at most `limit` bytes of host memory, which exist until `close`."""
        self._host_rows = Rows(self._arena, limit, self._failure)
        return self._host_rows

    def _end_copies(self) -> None:
        """The arena is about to be freed: wait for all copies."""
        if self._host_rows is not None:
            self._host_rows.drain()

    def _close_host_rows(self) -> None:
        rows, self._host_rows = self._host_rows, None
        if rows is not None:
            rows.close()

    @abstractmethod
    def _arena(self) -> Arena: ...

    @abstractmethod
    def _check_blocks(self, blocks: Sequence[int]) -> None: ...

    @abstractmethod
    def _failure(self, error: Exception, doing: str) -> BackendError: ...

    @property
    def reads_wait(self) -> bool:
        return bool(self._arena().device.type != "cpu")

    @property
    def block_bytes(self) -> int:
        return self._arena().block_bytes

    def read_blocks(self, blocks: Sequence[int]) -> list[NDArray[np.uint8]]:
        self._check_blocks(blocks)
        try:
            return list(self._arena().read(blocks).numpy())
        except Exception as error:
            raise self._failure(error, f"reading {len(blocks)} blocks") from error

    def landing(self, blocks: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Memory of the host: a step that is under way may still write to blocks that were just freed."""
        self._check_blocks(blocks)
        return list(np.empty((len(blocks), self.block_bytes), np.uint8))

    def land(self, blocks: Sequence[int], content: Sequence[NDArray[np.uint8]]) -> None:
        self._check_blocks(blocks)
        try:
            arena, rows = self._arena(), torch.from_numpy(_as_one(content))
            step = max(1, LANDED_AT_ONCE_BYTES // self.block_bytes)
            for start in range(0, len(blocks), step):
                arena.write(blocks[start : start + step], rows[start : start + step])
        except Exception as error:
            raise self._failure(error, f"writing {len(blocks)} blocks") from error


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

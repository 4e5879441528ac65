"""The torch backend's blocks: copying and moving them on the device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from cllm.backends.torch.block_bytes import BlocksAsBytes
from cllm.errors import BackendError
from cllm.kv.ops import Move


class Blocks(BlocksAsBytes):
    @abstractmethod
    def _block_count(self) -> int:
        """Blocks of the pool."""

    @property
    def kv_bytes(self) -> int:
        return self._arena().nbytes

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._check_blocks([block for pair in pairs for block in pair])
        try:
            self._arena().copy(pairs)
        except Exception as error:
            raise self._failure(error, f"copying {len(pairs)} blocks") from error

    def move_blocks(self, moves: Sequence[Move]) -> None:
        self._check_blocks([end for move in moves for end in (move.source, move.target)])
        self._check_blocks([end + move.blocks - 1 for move in moves for end in (move.source, move.target)])
        try:
            self._arena().move(moves)
        except Exception as error:
            raise self._failure(error, f"moving {len(moves)} runs of blocks") from error

    def release_pages(self, first: int, count: int) -> None:
        """The arena is one piece of the device's memory: nothing of it can be given back alone."""

    def prepare_pages(self, first: int, count: int) -> None:
        """The arena is there since it was allocated."""

    def resident_bytes(self) -> int:
        return self.kv_bytes

    def _check_blocks(self, blocks: Sequence[int]) -> None:
        count = self._block_count()
        wrong = next((block for block in blocks if not 0 <= block < count), None)
        if wrong is not None:
            raise BackendError(f"block {wrong} does not exist: there are {count}")

"""The arena with its books: which blocks are free, who holds the others, and what follows when blocks move."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cllm.kv.events import KVEvents
from cllm.kv.extents import extent_blocks
from cllm.kv.numbers import Numbers
from cllm.kv.ops import BlockGeometry, BlockOps, Move
from cllm.kv.pool import BlockPool
from cllm.kv.prefixes import Holders, Prefixes
from cllm.kv.radix import Node
from cllm.kv.sequence import KVSequence
from cllm.kv.table import held_by


class Arena:
    """One manager's memory. `clear` makes new books; the rest stays."""

    pool: BlockPool
    holders: Holders
    prefixes: Prefixes
    running: dict[int, KVSequence]
    """By the sequence's number."""

    def __init__(
        self, ops: BlockOps, geometry: BlockGeometry, *, block_bytes: int, policy: str, apart: bool, extent: int | None
    ) -> None:
        self.ops = ops
        self.geometry = geometry
        self.block_bytes = block_bytes
        self.extent_blocks = extent or extent_blocks(geometry.blocks, block_bytes)
        self.pinned = 0
        """Blocks that others read or write beside the steps, and that must stay where they are."""
        self.events = KVEvents()
        self._leaving: Callable[[list[bytes], list[int]], None] | None = None
        self._policy = policy
        self._apart = apart
        self.clear()

    def clear(self) -> None:
        self.pool = BlockPool(self.geometry.blocks, self.extent_blocks, apart=self._apart)
        self.holders = Numbers()
        self.prefixes = Prefixes(
            self.pool,
            self.holders,
            block_size=self.geometry.block_size,
            policy=self._policy,
            events=self.events,
        )
        self.prefixes.leaving = self._leaving
        self.events.cleared()
        self.running = {}

    def keep_leaving(self, keep: Callable[[list[bytes], list[int]], None]) -> None:
        """From now on `keep` is called with the names of blocks that were evicted, and the blocks, before they are used
        again."""
        self._leaving = self.prefixes.leaving = keep

    @property
    def extent_bytes(self) -> int:
        return self.extent_blocks * self.block_bytes

    @property
    def cached_bytes(self) -> int:
        """What no running sequence uses."""
        return self.prefixes.evictable * self.block_bytes

    @property
    def referenced_bytes(self) -> int:
        return (self.pool.total - self.pool.free) * self.block_bytes - self.cached_bytes

    @property
    def taken_bytes(self) -> int:
        """Taken from the OS, as far as we know; in whole extents."""
        return self.pool.extents.taken_count * self.extent_bytes

    def relocate(self, moves: Sequence[Move]) -> None:
        """Move blocks to places that are free, and let everybody who holds them follow."""
        self.ops.move_blocks(moves)
        self.pool.move(moves)
        moved = {move.source + i: move.target + i for move in moves for i in range(move.blocks)}
        holders = self.pool.holders
        touched = {number for _, target, count in moves for number in holders[target : target + count]}
        for number in touched:
            owner = self.holders.owners[number]
            if isinstance(owner, Node):
                owner.value[:] = [moved.get(block, block) for block in owner.value]
        for sequence in self.running.values():
            follow(sequence, touched, moved)


def follow(sequence: KVSequence, touched: set[int], moved: dict[int, int]) -> None:
    """Bring a block table up to date: the shared part from the nodes, which have followed already, and the rest."""
    blocks, held = sequence.blocks, held_by(sequence)
    end = held.indexed
    private = blocks[end:]
    if not moved.keys().isdisjoint(private):
        blocks[end:] = [moved.get(block, block) for block in private]
    for node in held.node.path():
        start = end - len(node.value)
        if node.number in touched:
            blocks[start:end] = node.value
        end = start

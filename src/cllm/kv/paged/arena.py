"""The arena with its pool, prefix cache and running sequences; and moving blocks, with every reference to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cllm.kv.events import KVEvents
from cllm.kv.ops import BlockGeometry, BlockOps, Move
from cllm.kv.paged.block_table import allocation_of
from cllm.kv.paged.extents import extent_blocks
from cllm.kv.paged.holder_ids import HolderIds
from cllm.kv.paged.pool import BlockPool
from cllm.kv.paged.prefix_cache import BlockHolders, PrefixCache
from cllm.kv.radix import Node
from cllm.kv.sequence import KVSequence


class Arena:
    """One manager's memory. `clear` makes it empty again."""

    pool: BlockPool
    holders: BlockHolders
    prefixes: PrefixCache
    running: dict[int, KVSequence]
    """By holder id."""

    def __init__(
        self, ops: BlockOps, geometry: BlockGeometry, *, block_bytes: int, policy: str, apart: bool, extent: int | None
    ) -> None:
        self.ops = ops
        self.geometry = geometry
        self.block_bytes = block_bytes
        self.extent_blocks = extent or extent_blocks(geometry.blocks, block_bytes)
        self.pinned = 0
        """Blocks being read or written in the background, which must not move."""
        self.events = KVEvents()
        self._leaving: Callable[[list[bytes], list[int]], None] | None = None
        self._policy = policy
        self._apart = apart
        self.clear()

    def clear(self) -> None:
        self.pool = BlockPool(self.geometry.blocks, self.extent_blocks, apart=self._apart)
        self.holders = HolderIds()
        self.prefixes = PrefixCache(
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
        """Call `keep` with the names and blocks of everything evicted from now on, before the blocks are reused."""
        self._leaving = self.prefixes.leaving = keep

    @property
    def extent_bytes(self) -> int:
        return self.extent_blocks * self.block_bytes

    @property
    def cached_bytes(self) -> int:
        """Cached, and not used by any sequence or pin."""
        return self.prefixes.evictable * self.block_bytes

    @property
    def referenced_bytes(self) -> int:
        return (self.pool.total - self.pool.free) * self.block_bytes - self.cached_bytes

    @property
    def taken_bytes(self) -> int:
        """Backed by memory of the OS, as far as we know; in whole extents."""
        return self.pool.extents.taken_count * self.extent_bytes

    def relocate(self, moves: Sequence[Move]) -> None:
        """Move blocks to free places, and update the tree and all block tables."""
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
    """Update a block table after a move: the shared part from the nodes, which are up to date, and the private rest."""
    blocks, held = sequence.blocks, allocation_of(sequence)
    end = held.indexed
    private = blocks[end:]
    if not moved.keys().isdisjoint(private):
        blocks[end:] = [moved.get(block, block) for block in private]
    for node in held.node.path():
        start = end - len(node.value)
        if node.number in touched:
            blocks[start:end] = node.value
        end = start

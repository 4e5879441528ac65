"""The arena with its pool, prefix cache and running sequences; and moving blocks, with every reference to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from cllm.kv.events import KVEvents
from cllm.kv.eviction import EvictionClock, EvictionPolicy, make_policy
from cllm.kv.groups import LocalBlock
from cllm.kv.ops import BlockBytes, BlockGeometry, BlockOps, Move
from cllm.kv.paged.block_table import BlockAllocation, BlockNode, allocation_of, own_blocks
from cllm.kv.paged.extents import extent_blocks
from cllm.kv.paged.holder_ids import HolderIds
from cllm.kv.paged.local import LocalMemory, LocalShape, LocalSnapshot, SnapshotCounts
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
    local: LocalMemory | None
    """With layers that have a window."""

    def __init__(
        self,
        ops: BlockOps,
        geometry: BlockGeometry,
        local: LocalShape | None,
        *,
        block_bytes: int,
        policy: str,
        apart: bool,
        extent: int | None,
    ) -> None:
        self.ops = ops
        self.geometry = geometry
        self.block_bytes = block_bytes
        self.extent_blocks = extent or extent_blocks(geometry.blocks, block_bytes)
        self.block_size = geometry.block_size
        self.copying_blocks = self.loading_blocks = 0
        """Blocks being copied to or from host memory, and blocks of loads under way. They must not move."""
        self.loads = 0
        """Loads under way. Each has a sequence among the running ones."""
        self.copied_bytes = 0
        self.events = KVEvents()
        self.snapshots = SnapshotCounts()
        self._policy = policy
        self._apart = apart
        self._local_shape = local
        self.clear()

    def clear(self) -> None:
        self.pool = BlockPool(self.geometry.blocks, self.extent_blocks, apart=self._apart)
        self.holders = HolderIds()
        shape, size = self._local_shape, self.geometry.block_size
        clock = EvictionClock()
        policy: EvictionPolicy[LocalSnapshot] = make_policy("worth" if self._policy == "worth" else "lru", clock)
        self.local = None
        if shape is not None:
            self.local = LocalMemory(shape, size, self.pool, self.holders, policy, clock, self.snapshots)
        self.prefixes = PrefixCache(
            self.pool,
            self.holders,
            self.local,
            block_size=self.geometry.block_size,
            policy=self._policy,
            clock=clock,
            events=self.events,
        )
        self.events.cleared()
        self.running = {}

    @cached_property
    def content(self) -> BlockBytes:
        """Blocks as bytes, with tiers below. Kept: it is asked for in every step, and comparing with a protocol takes
        as long as planning one."""
        assert isinstance(self.ops, BlockBytes)
        return self.ops

    @property
    def extent_bytes(self) -> int:
        return self.extent_blocks * self.block_bytes

    @property
    def evictable(self) -> int:
        """Blocks that are only cached."""
        return self.prefixes.evictable + (0 if self.local is None else self.local.evictable)

    @property
    def cached_bytes(self) -> int:
        """Cached, and not used by any sequence or pin."""
        return self.evictable * self.block_bytes

    @property
    def referenced_bytes(self) -> int:
        return (self.pool.total - self.pool.free) * self.block_bytes - self.cached_bytes

    @property
    def taken_bytes(self) -> int:
        """Backed by memory of the OS, as far as we know; in whole extents."""
        return self.pool.extents.taken_count * self.extent_bytes

    @property
    def pinned(self) -> int:
        """Blocks being read or written in the background, which must not move."""
        return self.copying_blocks + self.loading_blocks

    @property
    def busy(self) -> bool:
        """Whether a sequence runs that is not just being loaded."""
        return len(self.running) > self.loads

    @property
    def referenced(self) -> int:
        """Blocks that sequences and pins use."""
        return self.pool.total - self.pool.free - self.evictable

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def evict(self, count: int) -> int:
        """Free at least `count` evictable blocks, or all, in the order of eviction. Returns how many."""
        return self.prefixes.evict(count) if self.local is None else self._evict(count, self.local, self.local.evict)

    def evict_ahead(self, count: int) -> int:
        """As `evict`, before there is need: snapshots of running sequences stay."""
        if self.local is None:
            return self.prefixes.evict(count)
        return self._evict(count, self.local, self.local.evict_ahead)

    def _evict(self, count: int, local: LocalMemory, evict_snapshot: Callable[[], BlockNode | None]) -> int:
        before, cached, snapshots = self.pool.free, self.prefixes.policy, local.policy
        while (missing := count - (self.pool.free - before)) > 0:
            first = cached.rank() > snapshots.rank() or not len(cached)
            if first and (node := evict_snapshot()) is not None:
                self.prefixes.lost_snapshot(node)
            elif len(cached):
                self.prefixes.evict(min(missing, len(cached.peek().value)))
            else:
                break
        return self.pool.free - before

    # -- running sequences -------------------------------------------------------------------------------------

    def start(self, sequence: KVSequence, held: BlockAllocation) -> int:
        """Add a running sequence; returns its number as a holder of blocks."""
        sequence.allocation = held
        held.number = self.holders.assign(sequence)
        self.running[held.number] = sequence
        return held.number

    def stop(self, sequence: KVSequence) -> None:
        """Remove a running sequence with all it holds."""
        held = allocation_of(sequence)
        del self.running[held.number]
        self.give_up(own_blocks(sequence), sequence)
        self.holders.release(held.number)
        self.prefixes.unlock(held.node)
        sequence.forget_memory()

    def commit(self, sequence: KVSequence) -> None:
        """The blocks that are full by now join the tree."""
        full = sequence.num_computed // self.block_size
        if full > allocation_of(sequence).indexed and sequence.intact:
            self.prefixes.index(sequence, full)

    def copy(self, sources: Sequence[int], copies: Sequence[int]) -> None:
        """Copy blocks. If that fails, the copies are free again."""
        try:
            self.ops.copy_blocks(list(zip(sources, copies, strict=True)))
        except BaseException:
            self.pool.release(copies)
            raise
        self.copied_bytes += len(copies) * self.block_bytes

    def give_up(self, private: list[int], sequence: KVSequence) -> None:
        """A sequence gives up private blocks; those that forked sequences share pass to one of them."""
        self.pool.release(private)
        number, holders = allocation_of(sequence).number, self.pool.holders
        orphans = {block for block in private if holders[block] == number}
        for heir_number, heir in self.running.items():
            if not orphans:
                break
            if heir is not sequence:
                inherited = orphans.intersection(own_blocks(heir))
                self.pool.hand_over(list(inherited), heir_number)
                orphans -= inherited

    # -- moving ------------------------------------------------------------------------------------------------

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
            elif isinstance(owner, LocalBlock):
                owner.cells[:] = [moved.get(cell, cell) for cell in owner.cells]
        for sequence in self.running.values():
            follow(sequence, touched, moved)
            if sequence.local is not None:
                sequence.local.refresh()


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

"""Operations on a sequence's block table: remove a range, shift, truncate.

Full blocks belong to the tree, and a path in the tree has no holes. So a sequence that drops tokens from its middle
leaves the tree after the tokens it keeps: it gets private copies of the later blocks it still needs. The tree itself
does not change, and what the sequence computes from then on is never shared.
"""

from __future__ import annotations

from abc import abstractmethod

from cllm.kv.manager import KVManager
from cllm.kv.operations import check_removal, check_shift, check_truncation, close_hole, open_hole
from cllm.kv.paged.arena import Arena
from cllm.kv.paged.block_table import allocation_of
from cllm.kv.paged.pool import BlockPool
from cllm.kv.paged.prefix_cache import PrefixCache
from cllm.kv.sequence import KVSequence


class PagedOperations(KVManager):
    block_size: int
    _arena: Arena
    _pool: BlockPool
    _prefixes: PrefixCache
    _copied_bytes: int

    @abstractmethod
    def _available(self) -> int: ...

    @abstractmethod
    def _make_room(self, count: int) -> None: ...

    @abstractmethod
    def _taken(self, blocks: list[int] | None) -> list[int]: ...

    @abstractmethod
    def _evict(self, count: int) -> None: ...

    @abstractmethod
    def _pins_give_way(self, running: int) -> bool: ...

    @abstractmethod
    def _limit_sequences(self) -> None: ...

    @abstractmethod
    def _leave(self, private: list[int], sequence: KVSequence) -> None: ...

    # -- operations --------------------------------------------------------------------------------------------

    def remove_range(self, sequence: KVSequence, start: int, end: int) -> bool:
        check_removal(sequence, start, end, self.block_size)
        first, last = start // self.block_size, end // self.block_size
        if first < allocation_of(sequence).indexed and not self._leave_tree(sequence, first, last):
            return False
        gone = sequence.blocks[first:last]
        del sequence.blocks[first:last]
        sequence.room = 0
        self._leave(gone, sequence)
        open_hole(sequence, start, end)
        return True

    def shift(self, sequence: KVSequence, start: int, delta: int) -> None:
        """Only bookkeeping: positions are places in the block table, which is closed up already; keys keep their
        rotation."""
        check_shift(sequence, start, delta)
        close_hole(sequence)

    def truncate(self, sequence: KVSequence, length: int) -> int:
        check_truncation(sequence, length)
        size, shared = self.block_size, allocation_of(sequence).indexed
        lost = sequence.dropped + sequence.hole
        held = length - lost
        if held < shared * size:
            # A block of the tree is read-only, so one that would be half full is given up.
            held -= held % size
            self._prefixes.shorten(sequence, held // size)
            self._limit_sequences()
            del sequence.blocks[held // size : shared]
        blocks = -(-held // size)
        gone = sequence.blocks[blocks:]
        del sequence.blocks[blocks:]
        sequence.room = 0
        self._leave(gone, sequence)
        sequence.num_computed = held + lost
        return sequence.num_computed

    # -- inside ------------------------------------------------------------------------------------------------

    def _leave_tree(self, sequence: KVSequence, first: int, last: int) -> bool:
        """Make all blocks from `first` on private; those before `last` will not be needed.

        The tree keeps its blocks if there is free room to copy them. Otherwise the sequence takes them out of the tree
        if nobody else uses them; if somebody does, cached blocks are evicted to make room for the copies.
        """
        shared = allocation_of(sequence).indexed
        wanted = sequence.blocks[last:shared]
        if len(wanted) > self._pool.free and self._prefixes.take_out(sequence, first):
            return True
        if len(wanted) > self._available():
            self._evict(self._prefixes.evictable)  # branches off the path may be all that keeps it in the tree
            if self._prefixes.take_out(sequence, first):
                return True
            return self._pins_give_way(running=1) and self._leave_tree(sequence, first, last)
        copies = self._copies(wanted, sequence)
        for block in sequence.blocks[first : min(last, shared)]:
            self._pool.share(block)  # for the caller to give up
        sequence.blocks[last:shared] = copies
        self._prefixes.shorten(sequence, first)
        self._limit_sequences()
        return True

    def _copies(self, blocks: list[int], sequence: KVSequence) -> list[int]:
        self._make_room(len(blocks))
        copies = self._taken(self._pool.allocate(len(blocks), allocation_of(sequence).number))
        try:
            self._arena.ops.copy_blocks(list(zip(blocks, copies, strict=True)))
        except BaseException:
            self._pool.release(copies)
            raise
        self._copied_bytes += len(blocks) * self._arena.block_bytes
        return copies

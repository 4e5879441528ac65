"""Sequence operations of the paged manager: what of a block table leaves the tree, and how.

Full blocks that a sequence computed are the tree's, and a path of the tree has no holes. So a sequence that drops
tokens from its middle leaves the tree behind the tokens it keeps: what followed them there and is still needed becomes
its own. Nothing in the tree is ever written or moved for it, and what it computes from then on is never shared.
"""

from __future__ import annotations

from abc import abstractmethod

from cllm.kv.arena import Arena
from cllm.kv.manager import KVManager
from cllm.kv.operations import check_removal, check_shift, check_truncation, close_hole, open_hole
from cllm.kv.pool import BlockPool
from cllm.kv.prefixes import Prefixes
from cllm.kv.sequence import KVSequence
from cllm.kv.table import held_by


class PagedOperations(KVManager):
    block_size: int
    _arena: Arena
    _pool: BlockPool
    _prefixes: Prefixes
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
    def _leave(self, private: list[int], sequence: KVSequence) -> None: ...

    # -- operations --------------------------------------------------------------------------------------------

    def remove_range(self, sequence: KVSequence, start: int, end: int) -> bool:
        check_removal(sequence, start, end, self.block_size)
        first, last = start // self.block_size, end // self.block_size
        if first < held_by(sequence).indexed and not self._leave_tree(sequence, first, last):
            return False
        gone = sequence.blocks[first:last]
        del sequence.blocks[first:last]
        sequence.room = 0
        self._leave(gone, sequence)
        open_hole(sequence, start, end)
        return True

    def shift(self, sequence: KVSequence, start: int, delta: int) -> None:
        """Positions are places in the block table, which has closed up already; keys keep their rotation."""
        check_shift(sequence, start, delta)
        close_hole(sequence)

    def truncate(self, sequence: KVSequence, length: int) -> int:
        check_truncation(sequence, length)
        size, shared = self.block_size, held_by(sequence).indexed
        lost = sequence.dropped + sequence.hole
        held = length - lost
        if held < shared * size:
            # A block of the tree cannot be written to, so one that would be half full is given up.
            held -= held % size
            self._prefixes.shorten(sequence, held // size)
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
        """Make all blocks from `first` on the sequence's own; those before `last` will not be needed.

        What the tree has stays there for others if there is free room for a copy. Otherwise the sequence takes along
        what nobody else uses, and if somebody does, cached blocks make room for the copy.
        """
        shared = held_by(sequence).indexed
        wanted = sequence.blocks[last:shared]
        if len(wanted) > self._pool.free and self._prefixes.take_out(sequence, first):
            return True
        if len(wanted) > self._available():
            self._evict(self._prefixes.evictable)  # what branches off the path may be all that holds it
            if self._prefixes.take_out(sequence, first):
                return True
            return self._pins_give_way(running=1) and self._leave_tree(sequence, first, last)
        copies = self._copies(wanted, sequence)
        for block in sequence.blocks[first : min(last, shared)]:
            self._pool.share(block)  # for the caller to give up
        sequence.blocks[last:shared] = copies
        self._prefixes.shorten(sequence, first)
        return True

    def _copies(self, blocks: list[int], sequence: KVSequence) -> list[int]:
        self._make_room(len(blocks))
        copies = self._taken(self._pool.allocate(len(blocks), held_by(sequence).number))
        try:
            self._arena.ops.copy_blocks(list(zip(blocks, copies, strict=True)))
        except BaseException:
            self._pool.release(copies)
            raise
        self._copied_bytes += len(blocks) * self._arena.block_bytes
        return copies

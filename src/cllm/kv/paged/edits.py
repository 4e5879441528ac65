"""Edits of a sequence's block table: remove a range, shift, truncate.

Full blocks belong to the tree, and a path in the tree has no holes. So a sequence that drops tokens from its middle
leaves the tree after the tokens it keeps: it gets private copies of the later blocks it still needs. The tree itself
does not change, and what the sequence computes from then on is never shared.
"""

from __future__ import annotations

from cllm.errors import UnsupportedOperationError
from cllm.kv.operations import check_removal, check_shift, check_truncation, close_hole, open_hole
from cllm.kv.paged.arena import Arena
from cllm.kv.paged.block_table import allocation_of
from cllm.kv.paged.local_tables import LocalTables
from cllm.kv.paged.pins import BlockPins
from cllm.kv.paged.room import Room
from cllm.kv.sequence import KVSequence


class BlockEdits:
    def __init__(self, arena: Arena, room: Room, pins: BlockPins, local: LocalTables | None) -> None:
        self._arena = arena
        self._room = room
        self._pins = pins
        self._local = local

    def remove_range(self, sequence: KVSequence, start: int, end: int) -> bool:
        size = self._arena.block_size
        if sequence.in_parts:
            what = "have a window of their own" if sequence.state is None else "carry a state, which has seen them"
            raise UnsupportedOperationError(
                f"cannot remove positions [{start}, {end}): some layers of this model {what}"
            )
        check_removal(sequence, start, end, size)
        first, last = start // size, end // size
        if first < allocation_of(sequence).indexed and not self._leave_tree(sequence, first, last):
            return False
        gone = sequence.blocks[first:last]
        del sequence.blocks[first:last]
        sequence.room = 0
        self._arena.give_up(gone, sequence)
        open_hole(sequence, start, end)
        return True

    def shift(self, sequence: KVSequence, start: int, delta: int) -> None:
        """Only bookkeeping: positions are places in the block table, which is closed up already; keys keep their
        rotation."""
        check_shift(sequence, start, delta)
        close_hole(sequence)

    def truncate(self, sequence: KVSequence, length: int) -> int:
        check_truncation(sequence, length)
        if self._local is not None:
            length = self._local.go_back(sequence, length)
        size, shared = self._arena.block_size, allocation_of(sequence).indexed
        lost = sequence.dropped + sequence.hole
        held = length - lost
        if held < shared * size:
            # A block of the tree is read-only, so one that would be half full is given up.
            held -= held % size
            self._shorten(sequence, held // size)
            del sequence.blocks[held // size : shared]
        blocks = -(-held // size)
        gone = sequence.blocks[blocks:]
        del sequence.blocks[blocks:]
        sequence.room = 0
        self._arena.give_up(gone, sequence)
        sequence.num_computed = held + lost
        if self._local is not None:
            self._local.cut_end(sequence, blocks)
        return sequence.num_computed

    def _shorten(self, sequence: KVSequence, blocks: int) -> None:
        """Leave the tree after so many blocks."""
        self._arena.prefixes.shorten(sequence, blocks)
        self._room.limit_sequences()

    def _leave_tree(self, sequence: KVSequence, first: int, last: int) -> bool:
        """Make all blocks from `first` on private; those before `last` will not be needed.

        The tree keeps its blocks if there is free room to copy them. Otherwise the sequence takes them out of the tree
        if nobody else uses them; if somebody does, cached blocks are evicted to make room for the copies.
        """
        pool, prefixes = self._arena.pool, self._arena.prefixes
        shared = allocation_of(sequence).indexed
        wanted = sequence.blocks[last:shared]
        if len(wanted) > pool.free and prefixes.take_out(sequence, first):
            return True
        if len(wanted) > self._room.available:
            self._room.evict(self._arena.evictable)  # branches off the path may be all that keeps it in the tree
            if prefixes.take_out(sequence, first):
                return True
            return self._pins.give_way(running=1) and self._leave_tree(sequence, first, last)
        copies = self._room.for_prompt(len(wanted), allocation_of(sequence).number)
        self._arena.copy(wanted, copies)
        for block in sequence.blocks[first : min(last, shared)]:
            pool.share(block)  # for the caller to give up
        sequence.blocks[last:shared] = copies
        self._shorten(sequence, first)
        return True

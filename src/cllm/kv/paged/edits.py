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
from cllm.kv.paged.pins import BlockPins
from cllm.kv.paged.room import Room
from cllm.kv.sequence import KVSequence


class BlockEdits:
    def __init__(self, arena: Arena, room: Room, pins: BlockPins) -> None:
        self._arena = arena
        self._room = room
        self._pins = pins

    def remove_range(self, sequence: KVSequence, start: int, end: int) -> bool:
        size = self._arena.block_size
        if sequence.local is not None:
            raise UnsupportedOperationError(
                f"cannot remove positions [{start}, {end}): some layers of this model have a window of their own"
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
        if sequence.local is not None:
            length = self._with_window(sequence, length)
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
        if sequence.local is not None and self._arena.local is not None:
            self._arena.local.cut_end(sequence.local, blocks)
        return sequence.num_computed

    def _with_window(self, sequence: KVSequence, length: int) -> int:
        """The longest part, up to `length` tokens, that local layers can go on from: all of it, or as much as was in
        the tree when a snapshot was taken."""
        arena, table, size = self._arena, sequence.local, self._arena.block_size
        assert arena.local is not None and table is not None
        in_tree = min(length // size, allocation_of(sequence).indexed)
        whole = length if length >= allocation_of(sequence).indexed * size else in_tree * size
        if arena.local.first_needed(whole) >= table.first:
            return length
        found = arena.prefixes.continuable(arena.prefixes.find_held(sequence, in_tree), sequence.space)
        snapshot, end = arena.prefixes.snapshot_at(found), found.matched // arena.prefixes.tree.unit_bytes
        arena.local.clear(table)
        sequence.local = arena.local.enter(snapshot if end else None, end)
        return end * size

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

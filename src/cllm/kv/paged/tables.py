"""The block tables of running sequences: given at admission, extended by steps, shared by forks."""

from __future__ import annotations

from cllm.kv.paged.arena import Arena
from cllm.kv.paged.block_table import BlockAllocation, BlockMatch, allocation_of
from cllm.kv.paged.local_tables import LocalTables
from cllm.kv.paged.pins import BlockPins
from cllm.kv.paged.resizing import ArenaResizer
from cllm.kv.paged.room import Room
from cllm.kv.paged.upkeep import Upkeep
from cllm.kv.radix import TOKEN_BYTES
from cllm.kv.sequence import KVSequence


class BlockTables:
    """`watermark`: the share of all blocks that new sequences leave to running ones."""

    def __init__(
        self,
        arena: Arena,
        room: Room,
        pins: BlockPins,
        upkeep: Upkeep,
        resizer: ArenaResizer | None,
        *,
        watermark: float,
    ) -> None:
        self.awaits_memory = False
        self._arena = arena
        self._room = room
        self._pins = pins
        self._upkeep = upkeep
        self._resizer = resizer
        self._watermark = watermark
        self.local = None if arena.local is None else LocalTables(arena, room, arena.local.shape, resizer)

    def admit(self, sequence: KVSequence) -> bool:
        """Begin with what is cached. False: there is no room now, and nothing has changed."""
        prefixes, key = self._arena.prefixes, sequence.prefix.tobytes()
        full = prefixes.find_full(key, sequence.space)
        known = full.matched // TOKEN_BYTES
        found, start = self.entrance(full, sequence.space, rebuilds=not sequence.asks_along)
        while not self.room_for(sequence, found, start):
            waits = self._resizer is not None and self._resizer.expects_more
            if waits or not self._pins.give_way(running=0):
                return False
        if self.local is not None:
            self.local.enter(sequence, found, start)  # first, so that the snapshot is not evicted to make room
        self.begin(sequence, found, self._missing(sequence, found))
        sequence.known = known
        if self.local is not None:
            self.local.begin(sequence, known, start)
        return True

    def entrance(self, full: BlockMatch, space: bytes, *, rebuilds: bool = True) -> tuple[BlockMatch, int]:
        """What of a prefix that full layers have is used, and behind how many blocks other layers go on: at the deepest
        snapshot, or where layers with a window must begin to be exact behind all of it, if that is nearer."""
        prefixes, unit = self._arena.prefixes, self._arena.prefixes.tree.unit_bytes
        found = prefixes.continuable(full, space)
        start = found.matched // unit
        if rebuilds and self._arena.local is not None and found.matched < full.matched:
            rebuilt = self._arena.local.rebuilt_from(full.matched // unit)
            if rebuilt > start:
                return full, rebuilt
        return found, start

    def room_for(self, sequence: KVSequence, found: BlockMatch, start: int | None = None) -> bool:
        """`start`: behind how many blocks layers with a window or a state begin, if not behind what was found."""
        arena, room = self._arena, self._room
        if room.all_run:
            return False
        # The watermark reserves room for running sequences to grow; it does not apply when nothing runs.
        reserve = int(arena.pool.total * self._watermark) if arena.running else 0
        wanted = self._missing(sequence, found) + reserve
        if self.local is not None:
            cached = found.matched // arena.prefixes.tree.unit_bytes if start is None else start
            wanted += self.local.cells_for(sequence, cached)
        unused = arena.prefixes.unused_blocks(found)
        if self._resizer is not None and self._better_waits(self._resizer, wanted, unused):
            return False
        return wanted <= room.available - unused

    def room_for_load(self, found: BlockMatch, blocks: int) -> bool:
        """Whether so many blocks can be taken for what is loaded behind what was found."""
        return blocks <= self._room.available - self._arena.prefixes.unused_blocks(found)

    def begin_local(self, holder: KVSequence, cells: int) -> list[int]:
        """Cells for the snapshot behind what is being loaded, which are known to be available."""
        assert self.local is not None
        self.local.begin_load(holder, cells)
        return self.local_cells(holder)

    def local_cells(self, holder: KVSequence) -> list[int]:
        """Cells of what is being loaded, in the order of their names."""
        windows = [] if holder.local is None else holder.local.cells
        return windows if holder.state is None else windows + holder.state.read

    def drop_local(self, holder: KVSequence) -> None:
        if self.local is not None:
            self.local.end(holder)

    def _missing(self, sequence: KVSequence, found: BlockMatch) -> int:
        return self._arena.blocks_for(sequence.needed) - found.matched // self._arena.prefixes.tree.unit_bytes

    def _better_waits(self, resizer: ArenaResizer, count: int, unused: int) -> bool:
        """Whether a new sequence that needs `count` blocks, beside `unused` cached ones it found, should wait: for
        memory that other models are giving back, or because this model must give some back."""
        coming = resizer.want(count, unused)
        self.awaits_memory = resizer.may_grow
        return coming or count > self._room.available - unused - resizer.pending

    def begin(self, sequence: KVSequence, found: BlockMatch, count: int) -> list[int]:
        """Start a sequence with a cached prefix and `count` blocks of its own, which are known to be available; returns
        those."""
        arena = self._arena
        cached = found.matched // arena.prefixes.tree.unit_bytes
        node, blocks = arena.prefixes.enter(found)
        number = self._start(sequence, BlockAllocation(node, cached))
        own = self._room.for_prompt(count, number, blocks[-1] if blocks else -1)
        sequence.blocks = blocks + own
        sequence.num_computed = cached * arena.block_size
        self._set_room(sequence)
        return own

    def _start(self, sequence: KVSequence, held: BlockAllocation) -> int:
        number = self._arena.start(sequence, held)
        self._room.limit_sequences()
        self._upkeep.note_activity()
        return number

    def end(self, sequence: KVSequence) -> None:
        """Take all memory back; what is in the tree stays cached."""
        if self.local is not None:
            self.local.end(sequence)
        self._arena.stop(sequence)
        self._upkeep.note_activity()

    def grow(self, sequence: KVSequence, count: int) -> bool:
        """Make room for `count` more tokens than the table has room for."""
        arena, blocks, held = self._arena, sequence.blocks, allocation_of(sequence)
        missing = arena.blocks_for(sequence.end + count) - len(blocks)
        last = sequence.end // arena.block_size
        writes_shared = last < len(blocks) and last >= held.indexed and arena.pool.is_shared(blocks[last])
        needed = max(missing, 0) + writes_shared
        cells = 0 if self.local is None else self.local.missing(sequence, count)
        if needed or cells:
            if self._resizer is not None:
                self._resizer.want(needed + cells)
            if needed + cells > self._room.available:
                return False
            if self.local is not None and cells:
                self.local.grow(sequence, count)
        if needed:
            own = self._room.for_generation(needed, held.number, blocks[-1] if blocks else -1)
            if writes_shared:
                self._copy_on_write(sequence, last, own)
            blocks += own
        if self.local is not None and cells:
            self.local.take_ahead(sequence)  # last: it takes what is free, which may have been promised above
        self._set_room(sequence)
        return True

    def _set_room(self, sequence: KVSequence) -> None:
        if self.local is not None:
            self.local.set_room(sequence)
        else:
            sequence.room = len(sequence.blocks) * self._arena.block_size

    def most_within_free(self, sequence: KVSequence, count: int) -> int:
        """Up to `count` tokens for which the table and free blocks have room."""
        unused = self._arena.pool.free - (0 if self._resizer is None else self._resizer.pending)
        together = 1
        if self.local is not None:
            together += self.local.cells
            if (missing := self.local.states.missing(sequence)) > max(unused, 0):
                return 0
            unused -= missing
        return min(count, sequence.room - sequence.end + max(unused, 0) // together * self._arena.block_size)

    def count_state(self, sequence: KVSequence) -> None:
        """A step has counted."""
        if self.local is not None:
            self.local.states.count(sequence)

    def keep_windows(self, sequence: KVSequence) -> None:
        """Blocks are full: snapshots that are due, and what is behind the window."""
        if self.local is not None:
            self.local.advance(sequence)

    def keep_last_window(self, sequence: KVSequence) -> None:
        """The sequence is about to end: others may go on from there."""
        if self.local is not None:
            self.local.keep_end(sequence)

    def meet(self, running: KVSequence, waiting: KVSequence) -> None:
        if self.local is not None:
            self.local.meet(running, waiting)

    def _copy_on_write(self, sequence: KVSequence, index: int, own: list[int]) -> None:
        """Replace a shared block of the table by a private copy, made in the last of `own`."""
        shared = sequence.blocks[index]
        try:
            self._arena.copy([shared], own[-1:])
        except BaseException:
            self._arena.pool.release(own[:-1])
            raise
        sequence.blocks[index] = own.pop()
        self._arena.give_up([shared], sequence)

    def fork(self, parent: KVSequence, child: KVSequence) -> bool:
        arena = self._arena
        if self._room.all_run or parent.rebuilt:
            return False
        arena.commit(parent)
        held = allocation_of(parent)
        child.blocks = parent.blocks[: arena.blocks_for(parent.held)]
        for block in child.blocks[held.indexed :]:
            arena.pool.share(block)
        arena.prefixes.lock(held.node)
        child.num_computed = parent.num_computed
        child.dropped, child.kept = parent.dropped, parent.kept
        if self.local is not None:
            self.local.fork(parent, child)
        # Both would write to the same block next: the first to do so asks for a copy.
        child.room = parent.room = parent.end
        self._start(child, BlockAllocation(held.node, held.indexed))
        return True

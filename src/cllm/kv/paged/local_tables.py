"""Local blocks of running sequences: taken ahead of what is computed, given up behind the window, kept at places where
others may go on."""

from __future__ import annotations

from bisect import insort

import numpy as np

from cllm.kv.groups import LocalTable
from cllm.kv.paged.arena import Arena
from cllm.kv.paged.block_table import BlockMatch, allocation_of
from cllm.kv.paged.local import LocalMemory
from cllm.kv.paged.resizing import ArenaResizer
from cllm.kv.paged.room import Room
from cllm.kv.sequence import KVSequence


class LocalTables:
    def __init__(self, arena: Arena, room: Room, resizer: ArenaResizer | None) -> None:
        self._arena = arena
        self._room = room
        self._resizer = resizer

    @property
    def cells(self) -> int:
        """Cells of a block."""
        return self._memory().shape.cells

    def cells_for(self, sequence: KVSequence, cached: int) -> int:
        """Cells that a sequence needs of its own when it begins behind `cached` blocks."""
        local = self._memory()
        most = local.first_needed(cached * self._arena.block_size) + local.most_blocks
        return self.cells * (min(self._arena.blocks_for(sequence.needed), most) - cached)

    # -- begin and end -----------------------------------------------------------------------------------------

    def enter(self, sequence: KVSequence, found: BlockMatch) -> None:
        end = found.matched // self._arena.prefixes.tree.unit_bytes
        snapshot = self._arena.prefixes.snapshot_at(found) if end else None
        sequence.local = self._memory().enter(snapshot, end)

    def begin(self, sequence: KVSequence, known: int) -> None:
        """Take blocks for the first chunks. `known`: how many tokens full layers have cached, where it parts from
        others."""
        size, computed = self._arena.block_size, sequence.num_computed
        ends = {place - place % size for place in (*sequence.places, known, len(sequence.tokens) - 1)}
        sequence.marks = sorted((end for end in ends if computed < end <= len(sequence.tokens)), reverse=True)
        wanted = self.cells_for(sequence, computed // size)
        self._add(sequence, self._room.for_prompt(wanted, allocation_of(sequence).number))
        self.set_room(sequence)

    def begin_load(self, holder: KVSequence, cells: int) -> list[int]:
        """The blocks of a snapshot behind the last of the holder's blocks."""
        end = len(holder.blocks)
        holder.local = LocalTable(end - cells // self.cells)
        self._add(holder, self._room.for_prompt(cells, allocation_of(holder).number))
        return holder.local.cells

    def end(self, sequence: KVSequence) -> None:
        if sequence.local is not None:
            self._memory().clear(sequence.local)
            sequence.local = None

    def fork(self, parent: KVSequence, child: KVSequence) -> None:
        assert parent.local is not None
        child.local = self._memory().share(parent.local, self._arena.blocks_for(parent.end))

    # -- growing -----------------------------------------------------------------------------------------------

    def missing(self, sequence: KVSequence, count: int) -> int:
        """Cells to take before `count` more tokens are computed."""
        if sequence.local is None:
            return 0
        blocks = self._arena.blocks_for(sequence.end + count) - sequence.local.end
        return self.cells * (max(0, blocks) + self._writes_shared(sequence))

    def _writes_shared(self, sequence: KVSequence) -> bool:
        """Whether the next token goes into a block that others use or keep."""
        table, end, size = sequence.local, sequence.end, self._arena.block_size
        assert table is not None
        if end % size == 0 or end // size >= table.end:
            return False
        block = table.blocks[end // size - table.first]
        return block.users > 1 or block.kept > 0

    def grow(self, sequence: KVSequence, count: int) -> None:
        """Take what is `missing`, which is known to be available."""
        table, local = sequence.local, self._memory()
        assert table is not None
        number = allocation_of(sequence).number
        if self._writes_shared(sequence):
            index = sequence.end // self._arena.block_size - table.first
            shared, copy = table.blocks[index], self._room.for_generation(self.cells, number, -1)
            self._arena.copy(shared.cells, copy)
            table.blocks[index] = local.new(copy)
            table.refresh()
            local.leave(shared)
        if missing := self.missing(sequence, count):
            self._add(sequence, self._room.for_generation(missing, number, table.cells[-1] if table.cells else -1))

    def take_ahead(self, sequence: KVSequence) -> None:
        """Take blocks for the next chunks of a prompt, as far as some are free."""
        table, local, computed = sequence.local, self._memory(), sequence.num_computed
        assert table is not None
        if len(sequence.tokens) - computed <= 1:
            return
        end = min(self._arena.blocks_for(sequence.needed), local.first_needed(computed) + local.most_blocks)
        unused = self._arena.pool.free - (0 if self._resizer is None else self._resizer.pending)
        count = min(end - table.end, unused // self.cells)
        if count > 0:
            self._add(sequence, self._room.for_prompt(count * self.cells, allocation_of(sequence).number))

    def _add(self, sequence: KVSequence, cells: list[int]) -> None:
        assert sequence.local is not None
        self._memory().add(sequence.local, cells)

    def set_room(self, sequence: KVSequence) -> None:
        blocks = len(sequence.blocks)
        if sequence.local is not None:
            blocks = min(blocks, sequence.local.end)
        sequence.room = blocks * self._arena.block_size

    # -- after a step ------------------------------------------------------------------------------------------

    def advance(self, sequence: KVSequence) -> None:
        table, computed, size = sequence.local, sequence.num_computed, self._arena.block_size
        if table is None:
            return
        local = self._memory()
        while sequence.marks and sequence.marks[-1] <= computed:
            self._keep(sequence, sequence.marks.pop() // size)
        local.slide(table, computed)
        if len(sequence.tokens) - computed > 1:
            self.take_ahead(sequence)
        else:
            local.cut_end(table, computed // size + 2)
        self.set_room(sequence)

    def keep_end(self, sequence: KVSequence) -> None:
        if sequence.local is not None:
            self._keep(sequence, sequence.num_computed // self._arena.block_size)

    def _keep(self, sequence: KVSequence, end: int) -> None:
        """A snapshot behind the first `end` blocks, if they are in the tree."""
        table = sequence.local
        if table is not None and 0 < end <= allocation_of(sequence).indexed:
            found = self._arena.prefixes.find_held(sequence, end)
            inside = found.inside // self._arena.prefixes.tree.unit_bytes
            to_pin = {tokens // self._arena.block_size for tokens in sequence.to_pin}
            self._memory().keep(table, found.node, inside, end, to_pin)

    def meet(self, running: KVSequence, waiting: KVSequence) -> None:
        """`waiting` will go on from what `running` is computing now: keep what that needs where they part."""
        if running.local is None:
            return
        ours, theirs = (np.frombuffer(each.tokens, np.int32)[:-1] for each in (running, waiting))
        common = min(len(ours), len(theirs))
        differing = ours[:common] != theirs[:common]
        parts = int(differing.argmax()) if differing.any() else common
        parts -= parts % self._arena.block_size
        if parts > running.num_computed and parts not in running.marks:
            insort(running.marks, parts, key=lambda mark: -mark)

    def _memory(self) -> LocalMemory:
        local = self._arena.local
        assert local is not None
        return local

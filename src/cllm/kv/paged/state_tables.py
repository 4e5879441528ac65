"""States of running sequences.

    chunk      ├──────────┼──────────┼─────┤        a step reads `current` and writes `next`
    computed                               │
    blocks                         [last]  [current]  [next]

A state never changes once it counts, so a snapshot or a twin is one more user of its block. When a step has counted,
`next` becomes `current`; what was current at the end of a block of tokens stays as `last`, so that somebody can go on
from there; the block that nobody needs any more is the next to write.
"""

from __future__ import annotations

from cllm.kv.groups import LocalBlock, StateTable
from cllm.kv.paged.arena import Arena
from cllm.kv.paged.block_table import allocation_of
from cllm.kv.paged.local import MOST_STATES, LocalMemory
from cllm.kv.paged.room import Room
from cllm.kv.sequence import KVSequence


class StateTables:
    def __init__(self, arena: Arena, room: Room, cells: int) -> None:
        self.cells = cells
        """Cells of a state; 0: there are none."""
        self._arena = arena
        self._room = room

    # -- begin and end -----------------------------------------------------------------------------------------

    def cells_for(self, cached: int) -> int:
        """Cells that a sequence needs of its own when it begins behind `cached` blocks."""
        return self.cells * (MOST_STATES - (cached > 0))

    def enter(self, sequence: KVSequence, state: LocalBlock | None, computed: int) -> None:
        """Begin with the state after so many tokens."""
        if self.cells:
            sequence.state = StateTable(state, computed)
            if state is not None:
                self._memory().use(state)

    def begin(self, sequence: KVSequence, cached: int) -> None:
        """Take what it needs, which is known to be available."""
        table = sequence.state
        if table is not None:
            table.spare = self._new(sequence, MOST_STATES - (cached > 0))
            table.next = table.spare.pop()

    def begin_load(self, holder: KVSequence, computed: int) -> None:
        """Take a block for the state after so many tokens, which is being loaded."""
        if self.cells:
            holder.state = StateTable(self._new(holder, 1)[0], computed)

    def end(self, sequence: KVSequence) -> None:
        if sequence.state is not None:
            for block in sequence.state.blocks:
                self._memory().leave(block)
            sequence.state = None

    def fork(self, parent: KVSequence, child: KVSequence) -> None:
        ours = parent.state
        if ours is None:
            return
        table = child.state = StateTable(ours.current, ours.computed)
        table.last, table.last_computed = ours.last, ours.last_computed
        for block in table.blocks:
            self._memory().use(block)

    # -- steps -------------------------------------------------------------------------------------------------

    def missing(self, sequence: KVSequence) -> int:
        """Cells to take before the next step."""
        table = sequence.state
        return self.cells if table is not None and table.next is None else 0

    def grow(self, sequence: KVSequence) -> None:
        """Take what is `missing`, which is known to be available."""
        table = sequence.state
        if table is not None and table.next is None:
            table.next = self._new(sequence, 1)[0]

    def count(self, sequence: KVSequence) -> None:
        """A step has counted: the state that it wrote is the sequence's."""
        table, computed = sequence.state, sequence.num_computed
        assert table is not None
        if table.computed == computed:
            return
        assert table.next is not None, "a step had no state to write"
        old, before = table.current, table.computed
        table.current, table.computed = table.next, computed
        if old is not None and before % self._arena.block_size == 0:
            old, table.last, table.last_computed = table.last, old, before
        table.next = self._reused(old) or (table.spare.pop() if table.spare else None)
        if table.next is None:
            sequence.room = sequence.end

    def _reused(self, block: LocalBlock | None) -> LocalBlock | None:
        """The same block, if nobody else needs it."""
        if block is None or (block.users == 1 and not block.kept):
            return block
        self._memory().leave(block)
        return None

    # -- earlier states ----------------------------------------------------------------------------------------

    def known_at(self, sequence: KVSequence, computed: int) -> LocalBlock | None:
        """The sequence's own state after so many tokens, if it still has it."""
        table = sequence.state
        if table is None:
            return None
        if table.computed == computed:
            return table.current
        return table.last if table.last_computed == computed else None

    def go_back(self, sequence: KVSequence, state: LocalBlock | None, computed: int) -> None:
        """Go on from an earlier state, that after so many tokens."""
        table, memory = sequence.state, self._memory()
        if table is None or table.computed == computed:
            return
        if state is not None:
            memory.use(state)
        for block in (table.current, table.last):
            if block is not None:
                memory.leave(block)
        table.current, table.computed = state, computed
        table.last, table.last_computed = None, 0

    def _new(self, sequence: KVSequence, count: int) -> list[LocalBlock]:
        memory, size = self._memory(), self.cells
        cells = self._room.for_prompt(count * size, allocation_of(sequence).number)
        return [memory.new(cells[first : first + size], memory.states) for first in range(0, len(cells), size)]

    def _memory(self) -> LocalMemory:
        local = self._arena.local
        assert local is not None
        return local

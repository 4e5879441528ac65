"""Local blocks and states of running sequences: taken ahead of what is computed, given up behind the window, kept at
places where others may go on."""

from __future__ import annotations

from bisect import insort

import numpy as np

from cllm.kv.groups import LocalTable
from cllm.kv.paged.arena import Arena
from cllm.kv.paged.block_table import BlockMatch, allocation_of
from cllm.kv.paged.local import LocalMemory, LocalShape, LocalSnapshot
from cllm.kv.paged.resizing import ArenaResizer
from cllm.kv.paged.room import Room
from cllm.kv.paged.snapshot_places import further, places_for_states
from cllm.kv.paged.state_tables import StateTables
from cllm.kv.sequence import KVSequence


class LocalTables:
    def __init__(self, arena: Arena, room: Room, shape: LocalShape, resizer: ArenaResizer | None) -> None:
        self.states = StateTables(arena, room, shape.state)
        self._limits = shape.limits
        self.cells = shape.cells
        """Cells of a block; 0: there are no layers with a window."""
        self._arena = arena
        self._room = room
        self._resizer = resizer

    def cells_for(self, sequence: KVSequence, cached: int) -> int:
        """Cells that a sequence needs of its own when it begins behind `cached` blocks."""
        return self._window_cells(sequence, cached) + self.states.cells_for(cached)

    def _window_cells(self, sequence: KVSequence, cached: int) -> int:
        if not self.cells:
            return 0
        local = self._memory()
        most = local.first_needed(cached * self._arena.block_size) + local.most_blocks
        return self.cells * (min(self._arena.blocks_for(sequence.needed), most) - cached)

    # -- begin and end -----------------------------------------------------------------------------------------

    def enter(self, sequence: KVSequence, found: BlockMatch, start: int) -> None:
        """Go on behind the first `start` blocks: from the snapshot there, or, where more was found, without one."""
        exact = found.matched == start * self._arena.prefixes.tree.unit_bytes
        self.enter_at(sequence, self._arena.prefixes.snapshot_at(found) if start and exact else None, start)

    def enter_at(self, sequence: KVSequence, snapshot: LocalSnapshot | None, end: int) -> None:
        """Go on from a snapshot behind the first `end` blocks; None: from the beginning."""
        local = self._memory()
        sequence.in_parts = True
        if self.cells:
            sequence.local = local.enter(snapshot, end)
        self.states.enter(sequence, None if snapshot is None else snapshot.state, end * self._arena.block_size)
        if snapshot is not None:
            local.note_use(snapshot)

    def begin(self, sequence: KVSequence, known: int, start: int) -> None:
        """Take blocks for the first chunks, which begin behind `start` blocks. `known`: how many tokens full layers
        have cached, where it parts from others."""
        size = self._arena.block_size
        cached = start
        if start * size < sequence.num_computed:
            sequence.rebuilt, sequence.num_computed = sequence.num_computed, start * size
            cached = known // size - 1  # what is kept before would not be exact
            self._arena.snapshots.rebuilt += 1
        self._mark(sequence, known // size, cached)
        if self.cells:
            wanted = self._window_cells(sequence, start)
            self._add(sequence, self._room.for_prompt(wanted, allocation_of(sequence).number))
        self.states.begin(sequence, start)
        self.set_room(sequence)

    def _mark(self, sequence: KVSequence, known: int, cached: int) -> None:
        size, length = self._arena.block_size, len(sequence.tokens)
        places, end = [place // size for place in sequence.places], (length - 1) // size
        if self.states.cells:
            pins = [place // size for place in sequence.to_pin]
            cells = self.states.cells
            most = self._limits.on_path(end, cells)
            ends = places_for_states((*pins, known), places, cached, end, cells=cells, most=most)
            ends.update(place for place in pins if end < place <= length // size)
        else:
            ends = {place for place in (*places, known, end) if cached < place <= length // size}
        sequence.asked = length
        sequence.marks = sorted((place * size for place in ends), reverse=True)

    def begin_load(self, holder: KVSequence, cells: int) -> None:
        """The blocks of a snapshot behind the last of the holder's blocks."""
        end, windows = len(holder.blocks), cells - self.states.cells
        if self.cells:
            holder.local = LocalTable(end - windows // self.cells)
            self._add(holder, self._room.for_prompt(windows, allocation_of(holder).number))
        self.states.begin_load(holder, end * self._arena.block_size)

    def end(self, sequence: KVSequence) -> None:
        if sequence.local is not None:
            self._memory().clear(sequence.local)
            sequence.local = None
        self.states.end(sequence)

    def fork(self, parent: KVSequence, child: KVSequence) -> None:
        child.in_parts = True
        if parent.local is not None:
            child.local = self._memory().share(parent.local, self._arena.blocks_for(parent.end))
        self.states.fork(parent, child)

    # -- growing -----------------------------------------------------------------------------------------------

    def missing(self, sequence: KVSequence, count: int) -> int:
        """Cells to take before `count` more tokens are computed."""
        return self._window_missing(sequence, count) + self.states.missing(sequence)

    def _window_missing(self, sequence: KVSequence, count: int) -> int:
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
        self.states.grow(sequence)
        table, local = sequence.local, self._memory()
        if table is None:
            return
        number = allocation_of(sequence).number
        if self._writes_shared(sequence):
            index = sequence.end // self._arena.block_size - table.first
            shared, copy = table.blocks[index], self._room.for_generation(self.cells, number, -1)
            self._arena.copy(shared.cells, copy)
            table.blocks[index] = local.new(copy, local.windows)
            table.refresh()
            local.leave(shared)
        if missing := self._window_missing(sequence, count):
            self._add(sequence, self._room.for_generation(missing, number, table.cells[-1] if table.cells else -1))

    def take_ahead(self, sequence: KVSequence) -> None:
        """Take blocks for the next chunks of a prompt, as far as some are free."""
        table, local, computed = sequence.local, self._memory(), sequence.num_computed
        if table is None or len(sequence.tokens) - computed <= 1:
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
        sequence.room = sequence.end if self.states.missing(sequence) else blocks * self._arena.block_size

    # -- after a step ------------------------------------------------------------------------------------------

    def advance(self, sequence: KVSequence) -> None:
        """Blocks of the sequence are full, and in the tree."""
        table, computed, size = sequence.local, sequence.num_computed, self._arena.block_size
        if computed >= sequence.rebuilt:
            sequence.rebuilt = 0
        while sequence.marks and sequence.marks[-1] <= computed:
            self._keep(sequence, sequence.marks.pop() // size)
        if self.states.cells == 1:  # every place of a prefix may as well have one
            self._keep(sequence, computed // size)
        elif self.states.cells and not sequence.marks:  # the prompt is computed
            sequence.marks = [(computed // size + further(computed // size, self.states.cells)) * size]
        if table is None:
            return
        local = self._memory()
        local.slide(table, computed)
        if len(sequence.tokens) - computed > 1:
            self.take_ahead(sequence)
        else:
            local.cut_end(table, computed // size + 2)
        self.set_room(sequence)

    def keep_end(self, sequence: KVSequence) -> None:
        if sequence.local is not None or sequence.state is not None:
            size, state = self._arena.block_size, sequence.state
            self._keep(sequence, (sequence.num_computed if state is None else state.known_at_end(size)) // size)

    def _keep(self, sequence: KVSequence, end: int) -> None:
        """A snapshot behind the first `end` blocks, if they are in the tree and all that it needs is known."""
        if not 0 < end <= allocation_of(sequence).indexed or sequence.rebuilt:
            return
        found, size, local = self._arena.prefixes.find_held(sequence, end), self._arena.block_size, self._memory()
        if (there := self._arena.prefixes.snapshot_at(found)) is not None:
            local.touch(there)
            return
        windows, state = local.windows_behind(sequence.local, end), self.states.known_at(sequence, end * size)
        if windows is None or (state is None and self.states.cells):
            return
        to_pin = {tokens // size for tokens in sequence.to_pin}
        snapshot = LocalSnapshot(found.node, windows, state, end)
        unit = found.inside // self._arena.prefixes.tree.unit_bytes
        local.keep(snapshot, unit, to_pin, of_prompt=end * size <= sequence.asked)

    # -- going back --------------------------------------------------------------------------------------------

    def go_back(self, sequence: KVSequence, length: int) -> int:
        """Go back to the longest part, up to `length` tokens, that all layers can go on from: to where the sequence
        still has what that takes, or to a snapshot on its path. Returns how long it is; the caller cuts the blocks."""
        prefixes, size = self._arena.prefixes, self._arena.block_size
        in_tree = min(length // size, allocation_of(sequence).indexed)
        own = self._own_place(sequence, length)
        found = prefixes.continuable(prefixes.find_held(sequence, in_tree), sequence.space)
        end = found.matched // prefixes.tree.unit_bytes
        if own is not None and own >= end * size:
            self.states.go_back(sequence, self.states.known_at(sequence, own), own)
            return own
        snapshot = prefixes.snapshot_at(found) if end else None
        sequence.rebuilt = 0
        if sequence.local is not None:
            local = self._memory()
            local.clear(sequence.local)
            sequence.local = local.enter(snapshot, end)
        self.states.go_back(sequence, None if snapshot is None else snapshot.state, end * size)
        if snapshot is not None:
            self._memory().note_use(snapshot)
        return end * size

    def _own_place(self, sequence: KVSequence, length: int) -> int | None:
        """The longest part, up to `length` tokens, that the sequence itself can go on from; None: there is none."""
        state, table, size = sequence.state, sequence.local, self._arena.block_size
        if sequence.rebuilt:
            return None
        if state is not None and length < state.computed:
            if state.last is None or length < state.last_computed:
                return None
            length = state.last_computed
        if table is not None:
            in_tree = allocation_of(sequence).indexed * size
            whole = length if length >= in_tree else length - length % size
            if self._memory().first_needed(whole) < table.first:
                return None
        return length

    def cut_end(self, sequence: KVSequence, blocks: int) -> None:
        """Give up local blocks behind the first `blocks`."""
        if sequence.local is not None:
            self._memory().cut_end(sequence.local, blocks)

    def meet(self, running: KVSequence, waiting: KVSequence) -> None:
        """`waiting` will go on from what `running` is computing now: keep what that needs where they part."""
        if not running.in_parts:
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

"""The part of the arena that layers with a window or a state have: blocks inside the window of running sequences, their
states (`state_tables.py`), and snapshots kept by the tree.

    sequence     0 ─────────────────────────────────────────── num_computed
    full          █ █ █ █ █ █ █ █ █ █ █ █ █ █ █ █ █ █ █ █       all blocks, in the tree when they are full
    local                                     [ window ]▒▒       freed behind the window; ▒ taken ahead, not written yet
    snapshots            [ window ]●                [ window ]●   what others need to go on from there, with the state

A snapshot stands in the tree at the end of a block: in `marks` of the node, by its blocks from the edge's beginning. A
cached prefix can be continued from the deepest snapshot on its path: what follows is computed again. Snapshots share
blocks with each other and with running sequences; a full block never changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cllm.kv.block_names import local_names, state_names
from cllm.kv.eviction import EvictionClock, EvictionPolicy, computing
from cllm.kv.groups import BlockTally, LocalBlock, LocalTable
from cllm.kv.ops import BlockGeometry
from cllm.kv.paged.block_table import BlockNode
from cllm.kv.paged.holder_ids import HolderIds
from cllm.kv.paged.pool import BlockPool

FEWEST = 6
"""Snapshots that one sequence's path may always keep: behind a system prompt and a few of the last messages."""

PASSED = 0.05
"""How likely it is that somebody goes on from a snapshot behind which there is another, and from which at most one
prompt has gone on: an earlier message was edited."""

MOST_STATES = 3
"""States that a running sequence has: one to read, one to write, and that at the end of its last full block."""


class SnapshotLimits(NamedTuple):
    """The most snapshots of a path, and how many times the memory of its full layers they may take, beyond the
    fewest."""

    most: int = 32
    share: float = 2.0

    def on_path(self, blocks: int, cells: int) -> int:
        """Snapshots of so many cells on a path of so many blocks."""
        return min(max(int(self.share * blocks) // max(1, cells), FEWEST), self.most)


AHEAD_LOOKS = 8
"""Snapshots to look at when one is evicted before there is need: it is tried again after the next step."""


class LocalShape(NamedTuple):
    """`cells` of a block, and for how many tokens a running sequence has blocks: inside the window, and ahead; cells of
    a state; and `KVGroup.reach`, if windows can be computed again by themselves. No cells of either: there are no such
    layers."""

    window: int = 0
    cells: int = 0
    ahead: int = 0
    state: int = 0
    reach: int | None = None
    limits: SnapshotLimits = SnapshotLimits()


def tokens_within(geometry: BlockGeometry, shape: LocalShape) -> int:
    """The longest sequence that fits: every block of it, local ones for the window and ahead, and its states."""
    blocks = geometry.blocks - MOST_STATES * shape.state
    most = most_blocks(shape, geometry.block_size)
    short = blocks // (1 + shape.cells)
    return max(min(short, most), blocks - most * shape.cells, 0) * geometry.block_size


def most_blocks(shape: LocalShape, block_size: int) -> int:
    """Local blocks that a running sequence may have."""
    if not shape.cells:
        return 0
    return -(-shape.window // block_size) + -(-shape.ahead // block_size) + 1


class SnapshotCounts:
    """Since the start."""

    def __init__(self) -> None:
        self.taken = self.used = self.dropped = 0
        self.rebuilt = 0
        """Sequences whose windows were computed again, because no snapshot was nearer."""


class LocalSnapshot:
    __slots__ = ("blocks", "end", "hits", "node", "passed", "pins", "shared", "state", "windows")

    def __init__(self, node: BlockNode, windows: Sequence[LocalBlock], state: LocalBlock | None, end: int) -> None:
        self.node = node
        self.windows = windows
        self.state = state
        self.blocks = windows if state is None else (*windows, state)
        """All that it keeps."""
        self.end = end
        """How many blocks are before it."""
        self.hits = self.pins = 0
        self.passed = False
        """Whether a prompt has gone on from it to a later one."""
        self.shared = False
        """Whether several prompts have gone on from it, or will because a system prompt ends there."""

    @property
    def likely(self) -> bool:
        """Whether others will go on from it, as far as is known."""
        return self.shared or not self.passed

    @property
    def cells(self) -> int:
        return sum(len(block.cells) for block in self.blocks)


class LocalMemory:
    def __init__(
        self,
        shape: LocalShape,
        block_size: int,
        pool: BlockPool,
        holders: HolderIds,  # type: ignore[type-arg]
        policy: EvictionPolicy[LocalSnapshot],
        clock: EvictionClock,
        counts: SnapshotCounts,
    ) -> None:
        self.shape = shape
        self._clock = clock
        self._counts = counts
        self.policy = policy
        """All snapshots."""
        self.evictable = 0
        """Cells of blocks that are only kept."""
        self.windows, self.states = BlockTally("window", shape.cells), BlockTally("state", shape.state)
        self.kinds = [tally for tally in (self.windows, self.states) if tally.cells]
        self.all: dict[int, LocalBlock] = {}
        """By their ids as holders."""
        self._block_size = block_size
        self._pool = pool
        self._holders = holders
        self.most_blocks = most_blocks(shape, block_size)

    def first_needed(self, position: int) -> int:
        """The first block that the token at this position attends to."""
        return max(0, position - self.shape.window + 1) // self._block_size

    def rebuilt_from(self, known: int) -> int:
        """The block from which layers with a window must be computed so that all are exact behind the first `known`
        blocks and in the window there; 0 where that is the first one, or cannot be."""
        if self.shape.reach is None or self.shape.state:
            return 0
        window = self.first_needed(known * self._block_size) * self._block_size
        return max(0, window - self.shape.reach) // self._block_size

    def cell_names(self, names: Sequence[bytes], end: int) -> list[bytes]:
        """The names of all cells of a snapshot behind the first `end` of the blocks with these names."""
        windows = names[self.first_needed(end * self._block_size) : end] if self.shape.cells else ()
        return local_names(windows, self.shape.cells) + state_names(names[end - 1], self.shape.state)

    # -- blocks ------------------------------------------------------------------------------------------------

    def add(self, table: LocalTable, cells: list[int]) -> None:
        """New blocks at the end of a table, from cells that were just allocated."""
        size = self.shape.cells
        for first in range(0, len(cells), size):
            table.append(self.new(cells[first : first + size], self.windows))

    def new(self, cells: list[int], tally: BlockTally) -> LocalBlock:
        """A block with one user."""
        block = LocalBlock(cells, tally)
        block.users = 1
        block.number = self._holders.assign(block)
        self.all[block.number] = block
        tally.all += 1
        self._pool.hand_over(cells, block.number)
        return block

    def use(self, block: LocalBlock) -> None:
        if block.users == 0:
            self._count_evictable(block, -1)
        block.users += 1

    def leave(self, block: LocalBlock) -> None:
        block.users -= 1
        if block.users == 0:
            self._count_evictable(block, 1)
            if block.kept == 0:
                self._free(block)

    def _free(self, block: LocalBlock) -> None:
        self._count_evictable(block, -1)
        block.tally.all -= 1
        self._pool.release(block.cells)
        self._holders.release(block.number)
        del self.all[block.number]

    def _count_evictable(self, block: LocalBlock, change: int) -> None:
        block.tally.evictable += change
        self.evictable += change * len(block.cells)

    # -- tables ------------------------------------------------------------------------------------------------

    def enter(self, snapshot: LocalSnapshot | None, end: int) -> LocalTable:
        """The table of a sequence that goes on behind its first `end` blocks."""
        if snapshot is None:
            return LocalTable(end)
        table = LocalTable(end - len(snapshot.windows))
        for block in snapshot.windows:
            self.use(block)
            table.append(block)
        return table

    def share(self, table: LocalTable, end: int) -> LocalTable:
        """A twin's table, up to block `end`."""
        twin = LocalTable(table.first)
        for block in table.blocks[: end - table.first]:
            self.use(block)
            twin.append(block)
        return twin

    def slide(self, table: LocalTable, position: int) -> None:
        """Give up what is behind the window of the token at this position."""
        gone = min(self.first_needed(position) - table.first, len(table.blocks))
        if gone > 0:
            self._cut(table, 0, gone)
            table.first += gone

    def cut_end(self, table: LocalTable, end: int) -> None:
        """Give up the blocks from `end` on."""
        keep = max(0, end - table.first)
        if keep < len(table.blocks):
            self._cut(table, keep, len(table.blocks))

    def clear(self, table: LocalTable) -> None:
        self._cut(table, 0, len(table.blocks))

    def _cut(self, table: LocalTable, begin: int, end: int) -> None:
        gone, size = table.blocks[begin:end], self.shape.cells
        del table.blocks[begin:end], table.cells[begin * size : end * size]
        for block in gone:
            self.leave(block)

    # -- snapshots ---------------------------------------------------------------------------------------------

    def windows_behind(self, table: LocalTable | None, end: int) -> tuple[LocalBlock, ...] | None:
        """What a snapshot behind the sequence's first `end` blocks needs of its table; None: that has not all."""
        if table is None:
            return ()
        first = self.first_needed(end * self._block_size)
        if first < table.first or end > table.end:
            return None
        return tuple(table.blocks[first - table.first : end - table.first])

    def keep(self, snapshot: LocalSnapshot, unit: int, to_pin: set[int], *, of_prompt: bool) -> None:
        """A new snapshot, at `unit` blocks of its node's edge. Those behind `to_pin` blocks stay on the path. The next
        prompt will have all `of_prompt`, but of an answer perhaps not all."""
        if of_prompt:
            self._pass(snapshot.node)
            snapshot.shared = self._end_before(snapshot, likely=False) == 0
        for block in snapshot.blocks:
            if block.kept == 0:
                self._clock.advance(len(block.cells) / self._pool.total)
            block.kept += 1
        snapshot.node.marks[unit] = snapshot
        self._counts.taken += 1
        self.policy.add(snapshot, 0, self.worth(snapshot))
        self._thin(snapshot, to_pin)

    def touch(self, snapshot: LocalSnapshot) -> None:
        """It was used."""
        self.policy.remove(snapshot)
        self.policy.add(snapshot, 0, self.worth(snapshot))

    def _pass(self, node: BlockNode) -> None:
        """A prompt has gone on from the snapshots on a node's path."""
        for _, snapshot in on_path(node):
            if snapshot.passed:
                return
            snapshot.passed = True
            self.policy.revalue(snapshot, self.worth(snapshot))

    def worth(self, snapshot: LocalSnapshot) -> float:
        """What would be computed again without it, for each cell that would be free, times how likely that is."""
        size, end, likely = self._block_size, snapshot.end, snapshot.likely
        before = self._end_before(snapshot, likely=likely)
        cells = sum(len(block.cells) for block in snapshot.blocks if block.kept == 1)
        if not snapshot.passed:
            cells += end - before  # without it, the full layers' blocks are of no use
        return (1 if likely else PASSED) * computing(before * size, end * size) / max(1, cells)

    def _end_before(self, snapshot: LocalSnapshot, *, likely: bool) -> int:
        """Where the one before it on its path stands. Behind likely ones, those that are not will be gone."""
        for node in snapshot.node.path():
            marks = node.marks.values()
            ends: list[int] = [mark.end for mark in marks if mark.end < snapshot.end and mark.likely >= likely]
            if ends:
                return max(ends)
        return 0

    def note_use(self, snapshot: LocalSnapshot) -> None:
        """A sequence goes on from it."""
        snapshot.hits += 1
        snapshot.shared |= snapshot.hits > 1
        self.touch(snapshot)
        self._counts.used += 1

    def drop(self, snapshot: LocalSnapshot) -> None:
        marks = snapshot.node.marks
        del marks[next(unit for unit, mark in marks.items() if mark is snapshot)]
        self.policy.remove(snapshot)
        self._counts.dropped += 1
        for block in snapshot.blocks:
            block.kept -= 1
            if block.kept == block.users == 0:
                self._free(block)

    def drop_behind(self, node: BlockNode, units: int) -> None:
        """The blocks of a node's edge behind the first `units` are gone."""
        for unit in [unit for unit in node.marks if unit > units]:
            self.drop(node.marks[unit])

    def pin(self, snapshot: LocalSnapshot) -> int:
        """Returns how many of its cells no other pin uses."""
        more = unpinned_cells(snapshot)
        snapshot.pins += 1
        for block in snapshot.blocks:
            block.pins += 1
            self.use(block)
        return more

    def unpin(self, snapshot: LocalSnapshot) -> int:
        snapshot.pins -= 1
        for block in snapshot.blocks:
            block.pins -= 1
            self.leave(block)
        return unpinned_cells(snapshot)

    def count_pinned(self) -> int:
        return sum(len(block.cells) for block in self.all.values() if block.pins)

    def unused_cells(self, snapshot: LocalSnapshot | None) -> int:
        """Evictable cells that a sequence which enters there would use."""
        return 0 if snapshot is None else sum(len(block.cells) for block in snapshot.blocks if block.users == 0)

    def evict_ahead(self) -> BlockNode | None:
        """As `evict`, before there is need: what running sequences may go back to and leave to others stays, and so
        does the place before the last of a path, which goes with the blocks behind that. None: there is nothing else,
        as far as a short look finds."""
        for _ in range(min(AHEAD_LOOKS, len(self.policy))):
            snapshot = self.policy.peek()
            unused = any(block.users == 0 and block.kept == 1 for block in snapshot.blocks)
            if unused and not snapshot.node.references and not _stands_before_last(snapshot):
                node = snapshot.node
                self.drop(snapshot)
                return node
            self.touch(snapshot)
        return None

    def evict(self) -> BlockNode | None:
        """Drop the next snapshot, if possible one whose blocks nobody else keeps or uses; returns the node that had it.
        None: there is none with blocks that are only kept."""
        if not self.evictable:
            return None
        for _ in range(2 * len(self.policy)):
            snapshot = self.policy.peek()
            rank = self.policy.rank()
            self.policy.revalue(snapshot, self.worth(snapshot))  # others near it may have gone since
            if self.policy.rank() != rank:
                continue
            if any(block.users == 0 and block.kept == 1 for block in snapshot.blocks):
                break
            self.touch(snapshot)  # it is in use
        else:
            unused = next(block for block in self.all.values() if block.users == 0)
            snapshot = next(each for each in self.policy if unused in each.blocks)
        node = snapshot.node
        self.drop(snapshot)
        return node

    def _thin(self, newest: LocalSnapshot, to_pin: set[int]) -> None:
        """Keep a path's snapshots few: drop the one that is worth the least. Places where several prefixes part are
        kept."""
        path = list(on_path(newest.node))
        count = sum(end not in to_pin for end, _ in path)
        if count <= self.shape.limits.on_path(newest.end, newest.cells):
            return
        others = [
            snapshot
            for end, snapshot in path
            if snapshot is not newest and end not in to_pin and not snapshot.pins and not _parts(snapshot)
        ]
        if others:
            self.drop(min(others, key=self.worth))


def unpinned_cells(snapshot: LocalSnapshot) -> int:
    return sum(len(block.cells) for block in snapshot.blocks if not block.pins)


def _stands_before_last(snapshot: LocalSnapshot) -> bool:
    """Whether the next snapshot behind it is the last one there."""
    node, end = snapshot.node, snapshot.end
    behind = [mark for mark in node.marks.values() if mark.end > end]
    behind = behind or [mark for child in node.children.values() for mark in child.marks.values()]
    return bool(behind) and not min(behind, key=lambda mark: mark.end).passed


def on_path(node: BlockNode) -> Iterator[tuple[int, LocalSnapshot]]:
    """The snapshots on the way to a node, deepest first, with the number of blocks before each."""
    parts = list(node.path())
    before = sum(len(part.value) for part in parts)
    for part in parts:
        before -= len(part.value)
        for unit in sorted(part.marks, reverse=True):
            yield before + unit, part.marks[unit]


def _parts(snapshot: LocalSnapshot) -> bool:
    node = snapshot.node
    return len(node.children) > 1 and node.marks.get(len(node.value)) is snapshot

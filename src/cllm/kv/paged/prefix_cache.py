"""The prefix cache: a radix tree of blocks with reference counts and an eviction policy.

Nodes that nobody references are in the eviction policy, which frees their blocks for reuse. Every node has an id, under
which the pool records it as the holder of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

import numpy as np
from numpy.typing import NDArray

from cllm.kv.block_names import chain, root_name
from cllm.kv.events import KVEvents
from cllm.kv.eviction import EvictionClock, EvictionPolicy, make_policy
from cllm.kv.groups import LocalBlock
from cllm.kv.paged.block_table import BlockAllocation, BlockMatch, BlockNode, allocation_of
from cllm.kv.paged.holder_ids import HolderIds
from cllm.kv.paged.local import LocalMemory, LocalSnapshot, unpinned_cells
from cllm.kv.paged.pool import BlockPool
from cllm.kv.radix import COMMON_SPACE, TOKEN_BYTES, PrefixMatch, RadixTree
from cllm.kv.sequence import KVSequence

BlockHolders = HolderIds[BlockNode | KVSequence | LocalBlock]


class PrefixCache:
    def __init__(
        self,
        pool: BlockPool,
        holders: BlockHolders,
        local: LocalMemory | None,
        *,
        block_size: int,
        policy: str,
        clock: EvictionClock,
        events: KVEvents,
    ) -> None:
        """`local`: with local layers, a prefix can be continued only where there is a snapshot of them."""
        self.tree: RadixTree[list[int]] = RadixTree(block_size, [], _split_blocks)
        self.policy: EvictionPolicy[BlockNode] = make_policy(policy, clock)
        self.evictable = 0
        """Blocks that no running sequence or pin uses."""
        self.held = 0
        """Sequences that are only cached: leaves that nobody uses."""
        self.pinned = 0
        """Blocks that pins use."""
        self._clock = clock
        self._events = events
        self._pool = pool
        self._holders = holders
        self._local = local

    # -- finding -----------------------------------------------------------------------------------------------

    def find(self, key: bytes, space: bytes) -> BlockMatch:
        """The longest cached prefix visible to a space that can be continued, in whole blocks, without the last token,
        which is always computed."""
        return self.continuable(self.find_full(key, space), space)

    def find_full(self, key: bytes, space: bytes) -> BlockMatch:
        """The same as far as the full layers are concerned."""
        usable = len(key) - TOKEN_BYTES
        return self.tree.find_for(key[: usable - usable % self.tree.unit_bytes], space)

    def continuable(self, found: BlockMatch, space: bytes) -> BlockMatch:
        """The deepest place at or before the one found from where all layers can go on."""
        if self._local is None or not found.matched:
            return found
        node, inside, matched, unit = (
            found.node,
            found.inside // self.tree.unit_bytes,
            found.matched,
            self.tree.unit_bytes,
        )
        while node.parent is not None:
            place = max((place for place in node.marks if place <= inside), default=0)
            matched -= (inside - place) * unit
            if place:
                return PrefixMatch(node, place * unit, matched)
            node = node.parent
            inside = len(node.value)
        return PrefixMatch(self.tree.root_of(space), 0, 0)

    def snapshot_at(self, found: BlockMatch) -> LocalSnapshot | None:
        snapshot: LocalSnapshot | None = found.node.marks.get(found.inside // self.tree.unit_bytes)
        return snapshot

    def blocks_of(self, key: bytes, space: bytes) -> list[int]:
        """The blocks of the longest cached prefix of `key`. Does not reference them."""
        found = self.tree.find_for(key, space)
        parts = [node.value for node in found.node.path()]
        if parts:
            parts[0] = parts[0][: found.inside // self.tree.unit_bytes]
        return [block for part in reversed(parts) for block in part]

    def snapshot_cells(self, key: bytes, space: bytes) -> list[int]:
        """The cells of the snapshot right behind `key`, if there is one."""
        found = self.tree.find_for(key, space)
        snapshot = self.snapshot_at(found) if found.matched == len(key) else None
        return [] if snapshot is None else [cell for block in snapshot.blocks for cell in block.cells]

    def names_of(self, found: BlockMatch) -> list[bytes]:
        """The names of all blocks up to the one found."""
        parts = [node.names for node in found.node.path()]
        if parts:
            parts[0] = parts[0][: found.inside // self.tree.unit_bytes]
        return [name for part in reversed(parts) for name in part]

    def name_before(self, found: BlockMatch, space: bytes) -> bytes:
        """The parent name of the blocks that a space would add after what was found."""
        inside = found.inside // self.tree.unit_bytes
        return name_before(found.node.names[inside - 1] if inside else b"", found.node.space, space)

    def unused_blocks(self, found: BlockMatch) -> int:
        """Evictable blocks of a matched prefix: using it makes them unevictable."""
        blocks = self._blocks_below(found, lambda node: node.references > 0)
        return blocks if self._local is None else blocks + self._local.unused_cells(self.snapshot_at(found))

    def enter(self, found: BlockMatch) -> tuple[BlockNode, list[int]]:
        """Start a sequence with the matched prefix: reference it, and return its last node and its blocks."""
        node = self._cut(found)
        self.lock(node)
        blocks: list[int] = []
        for part in reversed(list(node.path())):
            part.hits += 1
            blocks += part.value
        return node, blocks

    # -- users -------------------------------------------------------------------------------------------------

    def lock(self, node: BlockNode) -> None:
        for part in node.path():
            self._use(part)

    def unlock(self, node: BlockNode, above: BlockNode | None = None) -> None:
        """Drop a reference to `node` and its ancestors, below `above` if that is given."""
        rank = -inf
        # Deepest first: the eviction policy relies on it, and no node has a lower rank than what is below it.
        for part in node.path():
            if part.children:
                rank = max(rank, part.rank)
            if part is above:
                part.rank = rank
                break
            part.references -= 1
            if part.references == 0:
                rank = part.rank = self.policy.add(part, part.hits, self._worth(part), after=rank)
                self.evictable += len(part.value)
                self.held += not part.children
                self._value_end(part)
            part.rank = rank

    def _worth(self, node: BlockNode) -> float:
        """What each block of an edge saves. With local layers: what the best of its snapshots does; without, all are
        worth the same."""
        if self._local is None:
            return 1.0
        return max((self._local.worth(mark) for mark in node.marks.values() if mark.likely), default=0.0)

    def _value_end(self, node: BlockNode) -> None:
        """The end of a leaf is worth what its snapshot is. Behind the last one it is of no use: it goes first."""
        if self._local is not None and not node.children:
            last = node.marks.get(len(node.value))
            self.policy.revalue(node, 0.0 if last is None else self._local.worth(last), most=node.rank)

    def lost_snapshot(self, node: BlockNode) -> None:
        """One of the node's was evicted."""
        if node in self.policy:
            self._value_end(node)

    # -- pins --------------------------------------------------------------------------------------------------

    def find_held(self, sequence: KVSequence, blocks: int) -> BlockMatch:
        """Where the first `blocks` blocks of a sequence end, on its own path through the tree."""
        held, unit = allocation_of(sequence), self.tree.unit_bytes
        node, begin = held.node, held.indexed - len(held.node.value)
        while begin >= blocks and node.parent is not None:
            node = node.parent
            begin -= len(node.value)
        return PrefixMatch(node, (blocks - begin) * unit, blocks * unit)

    def unpinned_blocks(self, found: BlockMatch) -> int:
        """Blocks of a matched prefix that no pin uses yet."""
        blocks, snapshot = self._blocks_below(found, lambda node: node.pins > 0), self.snapshot_at(found)
        return blocks if snapshot is None else blocks + unpinned_cells(snapshot)

    def _blocks_below(self, found: BlockMatch, is_used: Callable[[BlockNode], bool]) -> int:
        """Blocks of a matched prefix below the last used node. Using a node uses its ancestors, too."""
        node, blocks, below = found.node, found.inside // self.tree.unit_bytes, 0
        while node.parent is not None and not is_used(node):
            below += blocks
            node = node.parent
            blocks = len(node.value)
        return below

    def can_pin(self, found: BlockMatch) -> bool:
        """Whether a sequence could go on from there."""
        return self._local is None or self.snapshot_at(found) is not None

    def pin(self, found: BlockMatch) -> BlockNode:
        snapshot = self.snapshot_at(found)
        node = self._cut(found)
        if self._local is not None and snapshot is not None:
            self.pinned += self._local.pin(snapshot)
        self.lock(node)
        for part in node.path():
            if part.pins == 0:
                self.pinned += len(part.value)
            part.pins += 1
        return node

    def unpin(self, node: BlockNode) -> None:
        snapshot: LocalSnapshot | None = node.marks.get(len(node.value))
        if self._local is not None and snapshot is not None:
            self.pinned -= self._local.unpin(snapshot)
        for part in node.path():
            part.pins -= 1
            if part.pins == 0:
                self.pinned -= len(part.value)
        self.unlock(node)

    # -- leaving the tree --------------------------------------------------------------------------------------

    def shorten(self, sequence: KVSequence, blocks: int) -> None:
        """Drop the sequence's references past its first `blocks` blocks; the tree keeps those blocks."""
        held, above = allocation_of(sequence), self._node_at(sequence, blocks)
        self.unlock(held.node, above)
        held.node, held.indexed = above, blocks

    def take_out(self, sequence: KVSequence, blocks: int) -> bool:
        """Take what follows the sequence's first `blocks` blocks out of the tree and make it private. False: others use
        it, or continue from it."""
        held, above = allocation_of(sequence), self._node_at(sequence, blocks)
        below: BlockNode | None = None
        for node in held.node.path():
            if node is above:
                break
            if node.references > 1 or any(child is not below for child in node.children.values()):
                return False
            below = node
        node = held.node
        while node is not above:
            self._pool.hand_over(node.value, held.number)
            if self._local is not None:
                self._local.drop_behind(node, 0)
            self._holders.release(node.number)
            self._events.removed(node.names)
            node = self.tree.remove(node)
        held.node, held.indexed = above, blocks
        return True

    def _node_at(self, sequence: KVSequence, blocks: int) -> BlockNode:
        """The node of the sequence's path that ends after `blocks` blocks; splits an edge if necessary."""
        return self._cut(self.find_held(sequence, blocks))

    def _use(self, node: BlockNode) -> None:
        if node.references == 0:
            self.evictable -= len(node.value)
            self.held -= not node.children
            # The upper half of an edge that was just split is not in the policy.
            if node in self.policy:
                self.policy.remove(node)
        node.references += 1

    # -- growing -----------------------------------------------------------------------------------------------

    def index(self, sequence: KVSequence, full: int) -> None:
        """Add the sequence's newly full blocks to the tree, or adopt those that are there already."""
        tree, held = self.tree, allocation_of(sequence)
        unit = tree.unit_bytes
        size = unit // TOKEN_BYTES
        key = sequence.tokens[held.indexed * size : full * size].tobytes()
        node, space = held.node, sequence.space
        while (found := self._next(node, key, space)).matched:
            node = held.node = self._adopt(sequence.blocks, held, self._cut(found), found.matched // unit)
            key = key[found.matched :]
        if rest := sequence.blocks[held.indexed : full]:
            before = node.names[-1] if node.names else b""
            goes_on = bool(before) and node.space == space
            start = name_before(before, node.space, space)
            names = chain(start, key, size)
            self._events.stored(before or start, names)
            if goes_on and node.references == 1 and not node.children:
                node.key += key
                node.value += rest
                node.names += names
            else:
                node = tree.add(node, key, rest, space)
                node.names = names
                node.references = 1
                node.number = self._holders.assign(node)
            self._pool.hand_over(rest, node.number)
            self._clock.advance(len(rest) / self._pool.total)
        held.node = node
        held.indexed = full

    def _next(self, node: BlockNode, key: bytes, space: bytes) -> BlockMatch:
        """What follows `node` for a space: its own child, or else a common one."""
        found = self.tree.find(key, node, space)
        return found if found.matched or node.space != COMMON_SPACE else self.tree.find(key, node)

    def _adopt(self, table: list[int], held: BlockAllocation, node: BlockNode, count: int) -> BlockNode:
        """Another sequence computed the same `count` blocks first: use its blocks and free ours."""
        blocks: list[int] = []
        part = node
        parts: list[BlockNode] = []
        while part is not held.node:
            parts.append(part)
            assert part.parent is not None
            part = part.parent
        for part in reversed(parts):
            self._use(part)
            blocks += part.value
        first = held.indexed
        self._pool.release(table[first : first + count])
        table[first : first + count] = blocks
        held.indexed += count
        return node

    def _cut(self, found: BlockMatch) -> BlockNode:
        """The node that ends where `found` does; the upper half of a split edge is a new holder."""
        node = self.tree.cut(found)
        if node is not found.node:
            node.number = self._holders.assign(node)
            self._pool.hand_over(node.value, node.number)
            for snapshot in node.marks.values():
                snapshot.node = node
        return node

    # -- eviction ----------------------------------------------------------------------------------------------

    def evict(self, count: int) -> int:
        """Free at least `count` evictable blocks, or all, in the order of eviction, from the ends of edges."""
        freed = 0
        while freed < count and len(self.policy):
            node = self.policy.peek()
            # With local layers what is behind the last snapshot goes first, and then what that was of use for.
            reach = max((unit for unit in node.marks if unit < len(node.value)), default=0)
            freed += self._shorten_leaf(node, max(len(node.value) - (count - freed), reach))
        return freed

    def evict_leaf(self) -> int:
        """Free the blocks of the leaf to evict next; how many they were."""
        node = self.policy.peek()
        return self._shorten_leaf(node, 0)

    def _shorten_leaf(self, node: BlockNode, keep: int) -> int:
        freed = len(node.value) - keep
        self._pool.release(node.value[keep:])
        self._events.removed(node.names[keep:])
        if self._local is not None:
            self._local.drop_behind(node, keep)
        self.evictable -= freed
        if not keep:
            self.policy.remove(node)
            above = self.tree.remove(node)
            self._holders.release(node.number)
            self.held -= 1 if above.children or above not in self.policy else 0
            return freed
        del node.value[keep:], node.names[keep:]
        del node.key[keep * self.tree.unit_bytes :]
        self._value_end(node)
        return freed

    def next_to_go(self, count: int) -> Iterator[tuple[list[bytes], list[int]]]:
        """Names and blocks of the next `count` blocks to evict, node by node."""
        for node in self.policy:
            if count <= 0:
                return
            keep = max(0, len(node.value) - count)
            count -= len(node.value) - keep
            yield node.names[keep:], node.value[keep:]

    # -- checking ----------------------------------------------------------------------------------------------

    def examine(self, uses: dict[int, int], pins: dict[int, int], held: NDArray[np.int32], piece: int) -> Iterator[int]:
        """Check the tree, and add one to `held` for each of its blocks. `uses` has the references to each node by its
        id, `pins` those of them that are pins."""
        evictable = leaves = 0
        pinned = 0 if self._local is None else self._local.count_pinned()
        blocks: list[int] = []  # checked in batches: numpy is slower than Python for single blocks
        numbers: list[int] = []
        for node in self.tree.examine():
            size = len(node.value)
            if size * self.tree.unit_bytes != len(node.key) or size != len(node.names):
                raise AssertionError("an edge has another number of blocks, or of names, than its tokens need")
            if node.pins != pins.get(node.number, 0):
                raise AssertionError(f"a node counts {node.pins} pins, {pins.get(node.number, 0)} exist")
            if node.references != uses.get(node.number, 0):
                raise AssertionError(f"a node counts {node.references} users, {uses.get(node.number, 0)} exist")
            if (node.references == 0) != (node in self.policy):
                raise AssertionError("a node is evictable and in use, or neither")
            if self._holders.owners.get(node.number) is not node:
                raise AssertionError("a node is not known by its number")
            evictable += size if node.references == 0 else 0
            leaves += not (node.references or node.children)
            pinned += size if node.pins else 0
            if size >= piece:
                for begin in range(0, size, piece):
                    yield self._count(node.value[begin : begin + piece], node.number, held)
                continue
            blocks += node.value
            numbers += [node.number] * size
            if len(blocks) >= piece:
                yield self._count(blocks, numbers, held)
                blocks, numbers = [], []
        yield self._count(blocks, numbers, held)
        if evictable != self.evictable:
            raise AssertionError(f"{evictable} blocks are evictable, {self.evictable} were counted")
        if leaves != self.held:
            raise AssertionError(f"{leaves} sequences are only cached, {self.held} were counted")
        if pinned != self.pinned:
            raise AssertionError(f"{pinned} blocks are pinned, {self.pinned} were counted")

    def _count(self, blocks: list[int], numbers: list[int] | int, held: NDArray[np.int32]) -> int:
        part = np.array(blocks, np.int64)
        np.add.at(held, part, 1)
        if (np.frombuffer(self._pool.holders, np.int32)[part] != numbers).any():
            raise AssertionError("a block of the tree has another holder than its node")
        return len(blocks)


def name_before(last: bytes, last_space: bytes, space: bytes) -> bytes:
    """The parent name of blocks that a space adds after the block `last`, or (`b""`) at its root.

    A space's continuation of a common prefix gets names of its own: the same tokens may be below the space's root as
    well, and no name may be in the tree twice.
    """
    return last if last and last_space == space else root_name(space, last)


def _split_blocks(blocks: list[int], at: int) -> tuple[list[int], list[int]]:
    return blocks[:at], blocks[at:]

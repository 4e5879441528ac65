"""Sequence operations of the paged manager: what of a block table leaves the tree, and how.

Full blocks that a sequence computed are the tree's, and a path of the tree has no holes. So a sequence that drops
tokens from its middle leaves the tree behind the tokens it keeps: what followed them there and is still needed becomes
its own. Nothing in the tree is ever written or moved for it, and what it computes from then on is never shared.
"""

from __future__ import annotations

from abc import abstractmethod

from cllm.kv.eviction import EvictionPolicy
from cllm.kv.manager import KVManager
from cllm.kv.operations import check_removal, check_shift, check_truncation, close_hole, open_hole
from cllm.kv.ops import BlockOps
from cllm.kv.pool import BlockPool
from cllm.kv.radix import Node, RadixTree
from cllm.kv.sequence import KVSequence

BlockNode = Node[list[int]]


class PagedOperations(KVManager):
    block_size: int
    _ops: BlockOps
    _pool: BlockPool
    _tree: RadixTree[list[int]]
    _policy: EvictionPolicy[BlockNode]
    _evictable: int
    _moved_bytes: int
    _bytes_per_block: int

    @abstractmethod
    def _available(self) -> int: ...

    @abstractmethod
    def _allocate(self, count: int) -> list[int]: ...

    @abstractmethod
    def _evict(self, count: int) -> None: ...

    # -- operations --------------------------------------------------------------------------------------------

    def remove_range(self, sequence: KVSequence, start: int, end: int) -> bool:
        check_removal(sequence, start, end, self.block_size)
        first, last = start // self.block_size, end // self.block_size
        if first < sequence.indexed and not self._leave_tree(sequence, first, last):
            return False
        self._pool.release(sequence.blocks[first:last])
        del sequence.blocks[first:last]
        open_hole(sequence, start, end)
        return True

    def shift(self, sequence: KVSequence, start: int, delta: int) -> None:
        """Positions are places in the block table, which has closed up already; keys keep their rotation."""
        check_shift(sequence, start, delta)
        close_hole(sequence)

    def truncate(self, sequence: KVSequence, length: int) -> int:
        check_truncation(sequence, length)
        size = self.block_size
        gone = sequence.dropped + sequence.hole
        held = length - gone
        if held < sequence.indexed * size:
            # A block of the tree cannot be written to, so one that would be half full is given up.
            held -= held % size
            shared = sequence.indexed
            self._shorten_path(sequence, held // size)
            del sequence.blocks[held // size : shared]
        blocks = -(-held // size)
        self._pool.release(sequence.blocks[blocks:])
        del sequence.blocks[blocks:]
        sequence.num_computed = held + gone
        return sequence.num_computed

    def keep(self, sequence: KVSequence) -> None:
        self._evict(self._evictable)

    # -- inside ------------------------------------------------------------------------------------------------

    def _leave_tree(self, sequence: KVSequence, first: int, last: int) -> bool:
        """Make all blocks from `first` on the sequence's own; those before `last` will not be needed.

        What the tree has stays there for others if there is free room for a copy. Otherwise the sequence takes along
        what nobody else uses, and if somebody does, cached blocks make room for the copy.
        """
        shared = sequence.indexed
        wanted = sequence.blocks[last:shared]
        if len(wanted) > self._pool.free and self._takes_along(sequence, first):
            return True
        if len(wanted) > self._available():
            self._evict(self._evictable)  # what branches off the path may be all that holds it
            return self._takes_along(sequence, first)
        copies = self._copies(wanted)
        unwanted = sequence.blocks[first : min(last, shared)]
        for block in unwanted:  # the sequence's own for a moment, for the caller to release
            self._pool.share(block)
        sequence.blocks[last:shared] = copies
        self._shorten_path(sequence, first)
        return True

    def _copies(self, blocks: list[int]) -> list[int]:
        copies = self._allocate(len(blocks))
        try:
            self._ops.copy_blocks(list(zip(blocks, copies, strict=True)))
        except BaseException:
            self._pool.release(copies)
            raise
        self._moved_bytes += len(blocks) * self._bytes_per_block
        return copies

    def _takes_along(self, sequence: KVSequence, first: int) -> bool:
        """Take the sequence's path behind its first blocks out of the tree, if nobody else stands on it."""
        upper = self._node_at(sequence, first)
        node: BlockNode = sequence.node
        below: BlockNode | None = None
        while node is not upper:
            if node.references > 1 or any(child is not below for child in node.children.values()):
                return False
            assert node.parent is not None
            below, node = node, node.parent
        node = sequence.node
        while node is not upper:
            node = self._tree.remove(node)
        sequence.node, sequence.indexed = upper, first
        return True

    def _shorten_path(self, sequence: KVSequence, blocks: int) -> None:
        """The sequence uses only its first `blocks` blocks of the tree from now on; the others stay, for others."""
        upper = self._node_at(sequence, blocks)
        node: BlockNode = sequence.node
        while node is not upper:  # deepest first: the policy relies on it
            node.references -= 1
            if node.references == 0:
                self._policy.add(node, node.hits)
                self._evictable += len(node.value)
            assert node.parent is not None
            node = node.parent
        sequence.node, sequence.indexed = upper, blocks

    def _node_at(self, sequence: KVSequence, blocks: int) -> BlockNode:
        """The node of the sequence's path that ends after so many blocks; an edge is cut for it if need be."""
        key = sequence.tokens[: blocks * self.block_size].tobytes()
        return self._tree.cut(self._tree.find(key))

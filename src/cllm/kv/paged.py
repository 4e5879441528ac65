"""The paged manager: block tables over one pool, prefixes shared through a radix tree, copy on write.

    sequence A   blocks [7, 3, 9, 4]         7 and 3 spell the same tokens for A and B: they are in the tree, once
    sequence B   blocks [7, 3, 5]            9, 4, 5 are private until they are full, then they join the tree

A block is held by the tree, or privately by one table, or (the last, partial block of forked sequences) by several.
Tree nodes that no running sequence uses stand in the eviction policy; taking their blocks back is how cached memory is
reused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm.kv.eviction import EvictionPolicy, make_policy
from cllm.kv.manager import CHECK_SLICE
from cllm.kv.ops import BlockGeometry, BlockOps
from cllm.kv.paged_operations import BlockNode, PagedOperations
from cllm.kv.pool import BlockPool
from cllm.kv.radix import TOKEN_BYTES, Found, RadixTree
from cllm.kv.sequence import KVSequence
from cllm.kv.usage import KVUsage

SPAN_INTERVAL_S = 1.0
EVICT_AT_ONCE = 256


class PagedKVManager(PagedOperations):
    def __init__(
        self,
        ops: BlockOps,
        geometry: BlockGeometry,
        *,
        bytes_per_token: int,
        max_sequences: int | None = None,
        eviction_threshold: float = 1.0,
        eviction_policy: str = "lru",
        watermark: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = self.unit_tokens = geometry.block_size
        self.max_tokens = geometry.tokens
        self._geometry = geometry
        self._ops = ops
        self._bytes_per_block = bytes_per_token * geometry.block_size
        self._max_sequences = max_sequences
        self._policy_name = eviction_policy
        self._threshold_blocks = int(geometry.blocks * eviction_threshold)
        self._watermark_blocks = int(geometry.blocks * watermark)
        self._clock = clock
        self._evictions = self._queried = self._hit = 0
        self._moved_bytes = 0
        self._start_empty()

    def _start_empty(self) -> None:
        self._pool = BlockPool(self._geometry.blocks)
        self._tree: RadixTree[list[int]] = RadixTree(self.block_size, [], _split_blocks)
        self._policy: EvictionPolicy[BlockNode] = make_policy(self._policy_name)
        self._evictable = 0
        self._peak = 0
        self._running: dict[int, KVSequence] = {}
        self._spans = (1, self._geometry.blocks)
        self._spans_at = self._clock()

    # -- admission ---------------------------------------------------------------------------------------------

    def peek(self, key: bytes) -> int:
        return self._tree.find(key[: self._shareable_bytes(len(key))]).matched // TOKEN_BYTES

    def admit(self, sequence: KVSequence) -> int | None:
        key = sequence.prefix.tobytes()
        found = self._tree.find(key[: self._shareable_bytes(len(key))])
        cached_blocks = found.matched // self._tree.unit_bytes
        needed = self._blocks_for(sequence.needed) - cached_blocks
        # The watermark keeps room for running sequences to grow, so it does not apply when there are none.
        reserve = self._watermark_blocks if self._running else 0
        if needed + reserve > self._available() - self._unused_on_path(found):
            return None
        node = self._tree.cut(found)
        self._lock(node)
        own = self._allocate(needed)
        shared: list[int] = []
        for part in reversed(list(node.path())):
            part.hits += 1
            shared += part.value
        sequence.blocks = shared + own
        sequence.node = node
        sequence.indexed = cached_blocks
        sequence.num_computed = cached_blocks * self.block_size
        self._running[id(sequence)] = sequence
        if sequence.counts_as_query:
            self._queried += len(sequence.tokens)
            self._hit += sequence.num_computed
        return sequence.num_computed

    def arrange(self) -> None:
        """Where blocks lie makes no difference to speed."""

    def grow(self, sequence: KVSequence, count: int) -> bool:
        held = sequence.num_computed - sequence.dropped
        blocks = sequence.blocks
        missing = self._blocks_for(held + count) - len(blocks)
        last = held // self.block_size
        writes_shared = last < len(blocks) and last >= sequence.indexed and self._pool.is_shared(blocks[last])
        if missing <= 0 and not writes_shared:
            return True
        needed = max(missing, 0) + writes_shared
        if needed > self._available():
            return False
        own = self._allocate(needed)
        if writes_shared:
            try:
                self._ops.copy_blocks([(blocks[last], own[-1])])
            except BaseException:
                self._pool.release(own)
                raise
            copy = own.pop()
            self._moved_bytes += self._bytes_per_block
            self._pool.release([blocks[last]])
            blocks[last] = copy
        blocks += own
        return True

    def fork(self, parent: KVSequence, child: KVSequence) -> bool:
        self.commit(parent)
        end = self._blocks_for(parent.held)
        child.blocks = parent.blocks[:end]
        for block in child.blocks[parent.indexed :]:
            self._pool.share(block)
        self._lock(parent.node)
        child.node = parent.node
        child.indexed = parent.indexed
        child.num_computed = parent.num_computed
        child.dropped, child.kept = parent.dropped, parent.kept
        self._running[id(child)] = child
        return True

    # -- after a step ------------------------------------------------------------------------------------------

    def commit(self, sequence: KVSequence) -> None:
        full = sequence.num_computed // self.block_size
        if full > sequence.indexed and sequence.intact:
            self._index(sequence, full)

    def verify(self, sequence: KVSequence) -> None:
        """Positions live in the block table alone; there is no second account to compare with."""

    def rewind(self, sequence: KVSequence) -> None:
        """Whatever was written lies in blocks only this sequence holds and is written again."""

    def release(self, sequence: KVSequence, *, keep: bool = True) -> None:
        if keep:
            self.commit(sequence)
        self._pool.release(sequence.blocks[sequence.indexed :])
        self._unlock(sequence.node)
        del self._running[id(sequence)]
        sequence.forget_memory()

    # -- upkeep ------------------------------------------------------------------------------------------------

    def maintain(self, *, idle: bool) -> bool:
        excess = self._threshold_excess()
        if excess > 0:
            self._evict(min(excess, EVICT_AT_ONCE))
        if self._max_sequences is not None:
            while len(self._policy) and self._tree.leaves > self._max_sequences:
                self._evict(len(self._policy.peek().value))
        if self._threshold_excess() > 0:
            return True
        now = self._clock()
        if idle or now - self._spans_at >= SPAN_INTERVAL_S:
            self._spans = self._pool.free_spans()
            self._spans_at = now
        return False

    def reset(self) -> None:
        for sequence in self._running.values():
            sequence.forget_memory()
        self._start_empty()

    def usage(self) -> KVUsage:
        total, free = self._pool.total, self._pool.free
        return KVUsage(
            "paged",
            self.block_size,
            self._bytes_per_block,
            total,
            free,
            self._evictable,
            total - free - self._evictable,
            self._peak,
            len(self._running),
            self._tree.leaves,
            self._spans[0],
            self._spans[1],
            self._evictions,
            self.allocation_failures,
            0,
            self._moved_bytes,
            self._queried,
            self._hit,
        )

    def details(self) -> dict[str, Any]:
        return {
            "block_size": self.block_size,
            "running": [
                {
                    "tokens": len(s.tokens),
                    "computed": s.num_computed,
                    "dropped": s.dropped,
                    "blocks": len(s.blocks),
                    "shared": s.indexed,
                }
                for s in self._running.values()
            ],
            "prefix_nodes_evictable": len(self._policy),
        }

    def examine(self) -> Iterator[int]:
        held = np.zeros(self._pool.total, np.int32)
        uses: dict[int, int] = {}
        for sequence in self._running.values():
            for node in sequence.node.path():
                uses[id(node)] = uses.get(id(node), 0) + 1
            yield from _count(sequence.blocks[sequence.indexed :], held)
        yield from self._examine_tree(uses, held)
        yield from self._pool.examine(held, CHECK_SLICE)
        for sequence in self._running.values():
            self._check_table(sequence)
            yield len(sequence.blocks)

    # -- inside ------------------------------------------------------------------------------------------------

    def _examine_tree(self, uses: dict[int, int], held: NDArray[np.int32]) -> Iterator[int]:
        evictable = 0
        waiting: list[int] = []  # counted together: for single blocks numpy takes longer than Python
        for node in self._tree.examine():
            size = len(node.value)
            if size * self._tree.unit_bytes != len(node.key):
                raise AssertionError("an edge has another number of blocks than its tokens need")
            if node.references != uses.get(id(node), 0):
                raise AssertionError(f"a node counts {node.references} users, {uses.get(id(node), 0)} exist")
            if (node.references == 0) != (node in self._policy):
                raise AssertionError("a node is evictable and in use, or neither")
            evictable += size if node.references == 0 else 0
            if size < CHECK_SLICE:
                waiting += node.value
            else:
                yield from _count(node.value, held)
            if len(waiting) >= CHECK_SLICE:
                yield from _count(waiting, held)
                waiting = []
        yield from _count(waiting, held)
        if evictable != self._evictable:
            raise AssertionError(f"{evictable} blocks are evictable, {self._evictable} were counted")

    def _check_table(self, sequence: KVSequence) -> None:
        spelled = bytearray()
        shared: list[int] = []
        for node in reversed(list(sequence.node.path())):
            spelled += node.key
            shared += node.value
        if shared != sequence.blocks[: sequence.indexed]:
            raise AssertionError("a block table disagrees with the tree")
        if bytes(spelled) != sequence.tokens.tobytes()[: len(spelled)]:
            raise AssertionError("a sequence stands on a path that spells other tokens")
        if len(sequence.blocks) * self.block_size < sequence.held:
            raise AssertionError("a sequence has computed more than its blocks hold")

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _shareable_bytes(self, key_bytes: int) -> int:
        """Whole blocks of a prompt, less its last token, which is always computed for its logits."""
        usable = key_bytes - TOKEN_BYTES
        return usable - usable % self._tree.unit_bytes

    def _threshold_excess(self) -> int:
        return min(self._evictable, self._pool.total - self._pool.free - self._threshold_blocks)

    def _available(self) -> int:
        """Blocks that are free or can be had by evicting."""
        return self._pool.free + self._evictable

    def _unused_on_path(self, found: Found[list[int]]) -> int:
        """Evictable blocks of a prefix that was found: whoever takes it keeps them from being evicted."""
        # Whoever uses a node uses its ancestors, so the first used one ends the way up.
        node, blocks, unused = found.node, found.inside // self._tree.unit_bytes, 0
        while node.parent is not None and node.references == 0:
            unused += blocks
            node = node.parent
            blocks = len(node.value)
        return unused

    def _allocate(self, count: int) -> list[int]:
        """So many blocks, which are known to be available."""
        pool = self._pool
        if count > pool.free:
            self._evict(count - pool.free)
        blocks = pool.allocate(count)
        if blocks is None:
            raise AssertionError(f"{count} blocks were available and could not be had")
        referenced = pool.total - pool.free - self._evictable
        if referenced > self._peak:
            self._peak = referenced
        return blocks

    def _evict(self, count: int) -> None:
        """Free at least `count` evictable blocks, those used longest ago first, from the ends of their edges."""
        started = self._clock()
        freed = 0
        while freed < count and len(self._policy):
            node = self._policy.peek()
            take = min(count - freed, len(node.value))
            keep = len(node.value) - take
            self._pool.release(node.value[keep:])
            freed += take
            if keep:
                del node.value[keep:]
                del node.key[keep * self._tree.unit_bytes :]
            else:
                self._policy.remove(node)
                self._tree.remove(node)
        self._evictable -= freed
        self._evictions += freed
        if freed:
            self._tell_eviction(freed, self._clock() - started)

    def _lock(self, node: BlockNode) -> None:
        for part in node.path():
            self._use(part)

    def _use(self, node: BlockNode) -> None:
        if node.references == 0:
            self._evictable -= len(node.value)
            # The upper half of an edge that was just cut has not been in the policy.
            if node in self._policy:
                self._policy.remove(node)
        node.references += 1

    def _unlock(self, node: BlockNode) -> None:
        # Deepest first: the policy relies on it.
        for part in node.path():
            part.references -= 1
            if part.references == 0:
                self._policy.add(part, part.hits)
                self._evictable += len(part.value)

    def _index(self, sequence: KVSequence, full: int) -> None:
        """Put the sequence's newly completed blocks into the tree, or take over those that are there already."""
        size = self.block_size
        tree = self._tree
        key = sequence.tokens[sequence.indexed * size : full * size].tobytes()
        node: BlockNode = sequence.node
        found = tree.find(key, node)
        if found.matched:
            node = self._adopt(sequence, tree.cut(found), found.matched // tree.unit_bytes)
        if rest := sequence.blocks[sequence.indexed : full]:
            rest_key = key[len(key) - len(rest) * tree.unit_bytes :]
            if node.references == 1 and not node.children and node.parent is not None:
                node.key += rest_key
                node.value += rest
            else:
                node = tree.add(node, rest_key, rest)
                node.references = 1
        sequence.node = node
        sequence.indexed = full

    def _adopt(self, sequence: KVSequence, node: BlockNode, count: int) -> BlockNode:
        """Someone else computed the same `count` blocks first: use theirs, give ours back."""
        blocks: list[int] = []
        part = node
        parts: list[BlockNode] = []
        while part is not sequence.node:
            parts.append(part)
            assert part.parent is not None
            part = part.parent
        for part in reversed(parts):
            self._use(part)
            blocks += part.value
        first = sequence.indexed
        self._pool.release(sequence.blocks[first : first + count])
        sequence.blocks[first : first + count] = blocks
        sequence.indexed += count
        return node


def _split_blocks(blocks: list[int], at: int) -> tuple[list[int], list[int]]:
    return blocks[:at], blocks[at:]


def _count(blocks: list[int], held: NDArray[np.int32]) -> Iterator[int]:
    """Count every block once more in `held`, in pieces."""
    for begin in range(0, len(blocks), CHECK_SLICE):
        piece = blocks[begin : begin + CHECK_SLICE]
        np.add.at(held, piece, 1)
        yield len(piece)

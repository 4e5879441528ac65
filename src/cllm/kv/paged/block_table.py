"""What the paged manager records about a sequence besides its block table."""

from __future__ import annotations

from cllm.kv.radix import Node, PrefixMatch
from cllm.kv.sequence import KVAllocation, KVSequence

BlockNode = Node[list[int]]
BlockMatch = PrefixMatch[list[int]]


class BlockAllocation(KVAllocation):
    """The first `indexed` blocks of the table belong to the tree, on the path to `node`; the others are private.

    `number` is the sequence's id as their holder. The first `offered` blocks were offered to the disk.
    """

    __slots__ = ("indexed", "node", "number", "offered")

    def __init__(self, node: BlockNode, indexed: int) -> None:
        self.node = node
        self.indexed = indexed
        self.number = self.offered = 0


def allocation_of(sequence: KVSequence) -> BlockAllocation:
    allocation = sequence.allocation
    assert isinstance(allocation, BlockAllocation)
    return allocation


def own_blocks(sequence: KVSequence) -> list[int]:
    """The private blocks: those not in the tree."""
    return sequence.blocks[allocation_of(sequence).indexed :]

"""What the paged manager writes down of a sequence beside its block table."""

from __future__ import annotations

from cllm.kv.radix import Node
from cllm.kv.sequence import Holding, KVSequence

BlockNode = Node[list[int]]


class BlocksHeld(Holding):
    """The first `indexed` blocks of the table are the tree's, on the way to `node`; the others are the sequence's own.

    `number` is what the pool knows it by as the holder of those. The first `offered` were offered to the disk.
    """

    __slots__ = ("indexed", "node", "number", "offered")

    def __init__(self, node: BlockNode, indexed: int) -> None:
        self.node = node
        self.indexed = indexed
        self.number = self.offered = 0


def held_by(sequence: KVSequence) -> BlocksHeld:
    holding = sequence.holding
    assert isinstance(holding, BlocksHeld)
    return holding


def own_blocks(sequence: KVSequence) -> list[int]:
    """Those that are not the tree's."""
    return sequence.blocks[held_by(sequence).indexed :]

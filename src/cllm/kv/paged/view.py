"""The view of the paged cache. Made on the engine's thread, so its cost hardly depends on what is cached."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from cllm.kv.groups import GroupKind, LocalBlock
from cllm.kv.paged.arena import Arena
from cllm.kv.paged.block_table import BlockNode, allocation_of
from cllm.kv.paged.local import LocalMemory
from cllm.kv.view import FIRST_TOKENS, MOST_NODES, MOST_PREFIXES, GroupCells, KVView, PrefixView, SequenceView


def paged_view(arena: Arena) -> KVView:
    extents = arena.pool.extents
    size = arena.geometry.block_size
    used = {node.number: node for sequence in arena.running.values() for node in allocation_of(sequence).node.path()}
    return KVView(
        layout="paged",
        cell_tokens=size,
        cell_bytes=arena.block_bytes,
        holders=_holders(arena),
        resident=np.array(extents.taken, np.bool_),
        extent_cells=extents.size,
        prefixes=tuple(_prefix_view(node, size) for node in _largest(arena)),
        prefixes_in_all=len(arena.holders.owners) - len(arena.running) - (len(arena.local.all) if arena.local else 0),
        used_prefixes=frozenset(used),
        sequences=tuple(
            SequenceView(number, s.request_id, len(s.tokens), s.num_computed) for number, s in arena.running.items()
        ),
        groups=() if arena.local is None else _groups(arena.local),
    )


def _groups(local: LocalMemory) -> tuple[GroupCells, ...]:
    blocks = local.all.values()
    return tuple(_cells(tally.kind, [block for block in blocks if block.tally is tally]) for tally in local.kinds)


def _cells(kind: GroupKind, blocks: Iterable[LocalBlock]) -> GroupCells:
    owned = [(cell, block.users > block.pins) for block in blocks for cell in block.cells]
    cells, used = zip(*owned, strict=True) if owned else ((), ())
    return GroupCells(kind, np.array(cells, np.int32), np.array(used, np.bool_))


def _holders(arena: Arena) -> NDArray[np.int32]:
    """Local blocks count as held by the prefix that keeps them, or else by a sequence that uses them."""
    holders = np.array(arena.pool.holders, np.int32)
    if arena.local is not None:
        for number, sequence in arena.running.items():
            if sequence.local is not None:
                holders[sequence.local.cells] = number
            if sequence.state is not None:
                holders[[cell for block in sequence.state.blocks for cell in block.cells]] = number
        for snapshot in arena.local.policy:
            for block in snapshot.blocks:
                holders[block.cells] = snapshot.node.number
    return holders


def _largest(arena: Arena) -> list[BlockNode]:
    """The largest nodes, with their ancestors, an ancestor before its descendants."""
    seen = islice(arena.prefixes.tree.nodes(), MOST_NODES)
    listed: dict[int, BlockNode] = {}
    for node in nlargest(MOST_PREFIXES, seen, key=lambda node: len(node.value)):
        for part in reversed(list(node.path())):
            listed.setdefault(part.number, part)
        if len(listed) >= MOST_PREFIXES:
            break
    return list(listed.values())


def _prefix_view(node: BlockNode, block_size: int) -> PrefixView:
    parent = node.parent.number if node.parent is not None else 0
    first = tuple(memoryview(node.key[: FIRST_TOKENS * 4]).cast("i"))
    users, name = node.references - node.pins, node.names[-1]
    size, snapshots = len(node.value) * block_size, len(node.marks)
    return PrefixView(node.number, parent, size, node.hits, users, first, node.pins, name, snapshots)

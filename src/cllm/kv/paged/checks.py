"""Consistency checks: block tables, tree and pool must agree on every block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cllm.kv.manager import CHECK_SLICE
from cllm.kv.paged.arena import Arena
from cllm.kv.paged.block_table import allocation_of, own_blocks
from cllm.kv.paged.local import MOST_STATES, LocalMemory
from cllm.kv.radix import COMMON_SPACE
from cllm.kv.sequence import KVSequence
from cllm.kv.tiers.loads import LoadingSequence


def examine_tables(arena: Arena, pins: dict[int, int]) -> Iterator[int]:
    """Check everything, yielding the size of each piece; raises AssertionError. `pins`: how many pins use each node, by
    its id."""
    pool, running = arena.pool, arena.running
    held = np.zeros(pool.total, np.int32)
    uses = dict(pins)
    for sequence in running.values():
        for node in allocation_of(sequence).node.path():
            uses[node.number] = uses.get(node.number, 0) + 1
        yield from _count(own_blocks(sequence), held)
    if arena.local is not None:
        yield from _check_local(arena, arena.local, held)
    yield from arena.prefixes.examine(uses, pins, held, CHECK_SLICE)
    yield from pool.examine(held, CHECK_SLICE)
    for number, sequence in running.items():
        if allocation_of(sequence).number != number or arena.holders.owners.get(number) is not sequence:
            raise AssertionError("a sequence is not known by its number")
        _check_table(arena, sequence)
        yield len(sequence.blocks)
    if (np.frombuffer(pool.holders, np.int32, len(held)) != 0).tobytes() != (held != 0).tobytes():
        raise AssertionError("a block in use has no holder, or a free one has")


def _check_local(arena: Arena, local: LocalMemory, held: NDArray[np.int32]) -> Iterator[int]:
    """Every local block has as many users and keepers as it counts, and its cells no other holder."""
    users: Counter[int] = Counter()
    kept: Counter[int] = Counter()
    pins: Counter[int] = Counter()
    for sequence in arena.running.values():
        if sequence.state is not None:
            users.update(block.number for block in sequence.state.blocks)
        if sequence.local is not None:
            users.update(block.number for block in sequence.local.blocks)
            if sequence.local.cells != [cell for block in sequence.local.blocks for cell in block.cells]:
                raise AssertionError("a local table has other cells than its blocks")
        if not isinstance(sequence, LoadingSequence):
            _check_window(sequence, local, arena.block_size)
            _check_states(sequence, local)
    for snapshot in local.policy:
        numbers = [block.number for block in snapshot.blocks]
        kept.update(numbers)
        pins.update(numbers * snapshot.pins)
        if not any(mark is snapshot for mark in snapshot.node.marks.values()):
            raise AssertionError("a snapshot is not where it says it is")
    users.update(pins)
    for number, block in local.all.items():
        counted = (block.users, block.kept, block.pins)
        if counted != (users[number], kept[number], pins[number]) or not (block.users or block.kept):
            raise AssertionError("a local block counts its users or keepers wrong")
        if arena.holders.owners.get(number) is not block or any(arena.pool.holders[i] != number for i in block.cells):
            raise AssertionError("a local block is not the holder of its cells")
        yield from _count(block.cells, held)
    if not users.keys() | kept.keys() <= local.all.keys():
        raise AssertionError("a local block is used that is free")
    if local.evictable != sum(len(block.cells) for block in local.all.values() if not block.users):
        raise AssertionError("evictable local cells are counted wrong")
    for tally in local.kinds:
        blocks = [block for block in local.all.values() if block.tally is tally]
        if (tally.all, tally.evictable) != (len(blocks), sum(not block.users for block in blocks)):
            raise AssertionError("local blocks of a kind are counted wrong")


def _check_window(sequence: KVSequence, local: LocalMemory, block_size: int) -> None:
    table = sequence.local
    if (table is None) != (local.shape.cells == 0):
        raise AssertionError("a sequence has a local table and should not, or has none")
    if table is None:
        return
    first = sequence.end // block_size if sequence.rebuilt else local.first_needed(sequence.end)
    if table.first > first or table.end * block_size < sequence.end:
        raise AssertionError("a sequence lacks local blocks inside its window")


def _check_states(sequence: KVSequence, local: LocalMemory) -> None:
    table = sequence.state
    if (table is None) != (local.shape.state == 0):
        raise AssertionError("a sequence has states and should not, or has none")
    if table is None:
        return
    if len({block.number for block in table.blocks}) > MOST_STATES:
        raise AssertionError("a sequence has more states than it may")
    if table.computed != sequence.num_computed or (table.current is None) != (table.computed == 0):
        raise AssertionError("a sequence's state is not that after what is computed")
    if table.last is not None and not 0 < table.last_computed < max(table.computed, 1):
        raise AssertionError("a sequence's earlier state is not an earlier one")
    for block in table.blocks[(table.current is not None) + (table.last is not None) :]:
        if block.users > 1 or block.kept:
            raise AssertionError("a sequence may write to a state that another one uses, or that is kept")
    if any(mark <= sequence.num_computed for mark in sequence.marks):
        raise AssertionError("a snapshot was due and is not taken")


def _check_table(arena: Arena, sequence: KVSequence) -> None:
    pool, size = arena.pool, arena.geometry.block_size
    spelled = bytearray()
    shared: list[int] = []
    held = allocation_of(sequence)
    for node in reversed(list(held.node.path())):
        spelled += node.key
        shared += node.value
    if not {part.space for part in held.node.path()} <= {sequence.space, COMMON_SPACE}:
        raise AssertionError("a sequence stands in another space than its own")
    if shared != sequence.blocks[: held.indexed]:
        raise AssertionError("a block table disagrees with the tree")
    if bytes(spelled) != sequence.tokens.tobytes()[: len(spelled)]:
        raise AssertionError("a sequence stands on a path that spells other tokens")
    if len(sequence.blocks) * size < sequence.held:
        raise AssertionError("a sequence has computed more than its blocks hold")
    writable = sequence.blocks[max(sequence.end, sequence.rebuilt) // size : -(-sequence.room // size)]
    if sequence.room > sequence.end and any(map(pool.is_shared, writable)):
        raise AssertionError("a sequence may write to a block that another one uses")
    for block in own_blocks(sequence):
        holder = arena.running.get(pool.holders[block])
        if holder is None or block not in own_blocks(holder):
            raise AssertionError(f"block {block} has a holder that does not hold it")


def _count(blocks: list[int], held: NDArray[np.int32]) -> Iterator[int]:
    """Add one to `held` for every block, in pieces."""
    for begin in range(0, len(blocks), CHECK_SLICE):
        piece = blocks[begin : begin + CHECK_SLICE]
        np.add.at(held, piece, 1)
        yield len(piece)

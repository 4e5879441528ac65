"""Stand-in until the managers make pictures of themselves."""

from __future__ import annotations

from typing import Any

import numpy as np

from cllm.kv.view import KVView, PrefixView, SequenceView


def view_of(kv: Any) -> KVView:
    if hasattr(kv, "_pool"):
        return _paged(kv)
    raise NotImplementedError


_numbers: dict[int, int] = {}


def _number(thing: Any) -> int:
    return _numbers.setdefault(id(thing), len(_numbers) + 1)


def _paged(kv: Any) -> KVView:
    total = kv._pool.total
    holders = np.zeros(total, np.int32)
    prefixes = []
    used = set()
    for node in kv._tree.nodes():
        number = _number(node)
        holders[node.value] = number
        parent = _number(node.parent) if node.parent.parent is not None else 0
        if node.references:
            used.add(number)
        first = tuple(np.frombuffer(bytes(node.key[:128]), np.int32).tolist())
        prefixes.append(PrefixView(number, parent, len(node.key) // 4, node.hits, node.references, first))
    sequences = []
    for sequence in kv._running.values():
        number = _number(sequence)
        holders[sequence.blocks[sequence.indexed :]] = number
        sequences.append(
            SequenceView(
                number,
                sequence.request.id,
                len(sequence.tokens),
                sequence.num_computed,
                sequence.indexed * kv.block_size,
            )
        )
    extent = 32
    padded = np.zeros(-(-total // extent) * extent, np.bool_)
    padded[:total] = holders != 0
    resident: Any = padded.reshape(-1, extent).any(axis=1)
    in_all = len(prefixes)
    prefixes.sort(key=lambda p: -p.tokens)
    return KVView(
        "paged",
        kv.block_size,
        kv._bytes_per_block,
        holders,
        resident,
        extent,
        tuple(prefixes[:64]),
        in_all,
        frozenset(used),
        tuple(sequences),
    )

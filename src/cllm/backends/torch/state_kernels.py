"""A Triton kernel of the rules that move states on.

A state stays where the arena has it until a program has read its part, and is written when the row's tokens are done.
Each value of a head evolves by itself, and a row's tokens go one after another: so the bits of a state do not depend on
how a text is cut, or on what else is in a step.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def advance_kernel(
    q, k, v, fades, rates, out, arena, places, reads, writes, starts, cell_stride, cells,
    heads: tl.constexpr, values: tl.constexpr, keys: tl.constexpr, tile: tl.constexpr, padded: tl.constexpr,
    delta: tl.constexpr,
):  # fmt: skip
    """Some values of a head's state, over all tokens of a row. `delta`: what keys find is replaced, by a rate."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    value = tl.program_id(2) * tile + tl.arange(0, tile)
    key = tl.arange(0, padded)
    some, known = value < values, key < keys
    inside = some[:, None] & known[None, :]
    cell = row * cells + tl.load(places + head)
    place = tl.load(places + heads + head) + value[:, None] * keys + key[None, :]
    source = tl.load(reads + cell)
    begun = key < tl.where(source < 0, 0, padded)
    state = tl.load(arena + source * cell_stride + place, mask=inside & begun[None, :], other=0.0)
    first, last = tl.load(starts + row).to(tl.int64), tl.load(starts + row + 1).to(tl.int64)
    for token in range(first, last):
        at = token * heads + head
        own_key = tl.load(k + at * keys + key, mask=known, other=0.0)
        query = tl.load(q + at * keys + key, mask=known, other=0.0)
        change = tl.load(v + at * values + value, mask=some, other=0.0)
        state *= tl.load(fades + at)
        if delta:
            change = (change - tl.sum(state * own_key[None, :], axis=1)) * tl.load(rates + at)
        state += change[:, None] * own_key[None, :]
        tl.store(out + at * values + value, tl.sum(state * query[None, :], axis=1), mask=some)
    tl.store(arena + tl.load(writes + cell) * cell_stride + place, state, mask=inside)

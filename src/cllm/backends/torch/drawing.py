"""Choosing tokens on the device: for the same logits, parameters and random number the token that the host would choose.

A program is a row. It reads the row a few times, from the cache: the best value; if the parameters truncate, the least
value that stays, found sixteen ways at a time over the bits of a key that orders as floats do; and the draw.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

TILE = 4096
WAYS = 16
"""Borders that one reading of the row compares with; a key of 32 bits takes eight readings."""


@triton.jit
def _key(value):
    """An unsigned number that orders as the floats do; equal for both zeros."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def draw_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, uniforms, tokens, width, stride,
    tile: tl.constexpr, ways: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    values = logits + row.to(tl.int64) * stride
    columns = tl.arange(0, tile)
    # The best value, and the first that has it. A NaN is no number to compare with: the row has no best then.
    peak = float("-inf")
    best = width
    broken = 0
    for start in range(0, width, tile):
        at = start + columns
        value = tl.load(values + at, mask=at < width, other=float("-inf"))
        broken += tl.sum((value != value).to(tl.int32), axis=0)
        top = tl.max(value, axis=0)
        if top > peak:
            peak = top
            best = tl.min(tl.where(value == top, at, width), axis=0)
    temperature = tl.load(temperatures + row)
    if (broken > 0) | (peak == float("inf")) | (peak == float("-inf")):
        tl.store(tokens + row, -1)
    elif temperature == 0.0:
        tl.store(tokens + row, best)
    else:
        top_k = tl.load(top_ks + row)
        top_p = tl.load(top_ps + row)
        least = tl.load(min_ps + row)
        inverse = 1.0 / temperature
        cut = tl.full((), 0, tl.uint32)
        at_cut = width  # how many of those with exactly that key stay, lowest ids first
        if (top_k > 0) & (top_k < width):
            cut, at_cut, _ = _search(values, columns, width, peak, inverse, top_k.to(tl.float64), cut, at_cut, False, tile, ways)
        if top_p < 1.0:
            total = _mass(values, columns, width, peak, inverse, cut, at_cut, 0.0, tile)
            cut, at_cut, _ = _search(values, columns, width, peak, inverse, top_p * total, cut, at_cut, True, tile, ways)
        total = _mass(values, columns, width, peak, inverse, cut, at_cut, least, tile)
        wanted = tl.load(uniforms + row) * total
        tl.store(tokens + row, _pick(values, columns, width, peak, inverse, cut, at_cut, least, wanted, best, tile))


@triton.jit
def _weights(values, at, width, peak, inverse, cut, at_cut, seen, least):
    """Weights of a piece of the row, zero for what does not stay; and how many with the cut's key there were."""
    value = tl.load(values + at, mask=at < width, other=float("-inf"))
    key = _key(value)
    weight = tl.exp((value - peak) * inverse)
    equal = (key == cut) & (at < width)
    place = seen + tl.cumsum(equal.to(tl.int32), axis=0)
    stays = (at < width) & ((key > cut) | (equal & (place <= at_cut))) & (weight >= least)
    return tl.where(stays, weight, 0.0), tl.sum(equal.to(tl.int32), axis=0)


@triton.jit
def _mass(values, columns, width, peak, inverse, cut, at_cut, least, tile: tl.constexpr):
    total = tl.full((), 0.0, tl.float64)
    seen = 0
    for start in range(0, width, tile):
        weight, equal = _weights(values, start + columns, width, peak, inverse, cut, at_cut, seen, least)
        total += tl.sum(weight, axis=0).to(tl.float64)
        seen += equal
    return total


@triton.jit
def _search(
    values, columns, width, peak, inverse, wanted, floor, at_floor, by_mass: tl.constexpr, tile: tl.constexpr,
    ways: tl.constexpr,
):  # fmt: skip
    """The largest key such that what is at or above it, and above `floor`, reaches `wanted`: by count or by weight."""
    found = tl.full((), 0, tl.uint32)
    border = tl.arange(0, ways)
    above = tl.full((), 0.0, tl.float64)
    shift = 32
    for _ in range(8):
        shift -= 4
        borders = found + (border.to(tl.uint32) << shift)
        reached = tl.zeros([ways], tl.float64)
        seen = 0
        for start in range(0, width, tile):
            at = start + columns
            weight, equal = _weights(values, at, width, peak, inverse, floor, at_floor, seen, 0.0)
            seen += equal
            key = _key(tl.load(values + at, mask=at < width, other=float("-inf")))
            amount = weight if by_mass else (weight > 0.0).to(tl.float32)
            hits = tl.where(key[None, :] >= borders[:, None], amount[None, :], 0.0)
            reached += tl.sum(hits, axis=1).to(tl.float64)
        # The highest border that still reaches; the first one always does.
        enough = (reached >= wanted) | (border == 0)
        step = tl.max(tl.where(enough, border, 0), axis=0)
        beyond = tl.sum(tl.where(border == step + 1, reached, 0.0), axis=0)
        above = tl.where(step + 1 < ways, beyond, above)
        found += step.to(tl.uint32) << shift
    # `above` is what lies strictly above the key that was found; of those equal to it as many stay as are needed.
    value = _unkey(found)
    each = tl.exp((value - peak) * inverse).to(tl.float64) if by_mass else tl.full((), 1.0, tl.float64)
    missing = tl.where(each > 0.0, tl.ceil((wanted - above) / tl.where(each > 0.0, each, 1.0)), 1.0)
    return found, tl.maximum(missing, 1.0).to(tl.int32), above


@triton.jit
def _unkey(key):
    bits = key.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _pick(values, columns, width, peak, inverse, cut, at_cut, least, wanted, best, tile: tl.constexpr):
    """The first whose running sum passes `wanted`, in the order of ids; the last that weighs something if none does."""
    before = tl.full((), 0.0, tl.float64)
    chosen = -1
    last = best
    seen = 0
    for start in range(0, width, tile):
        at = start + columns
        weight, equal = _weights(values, at, width, peak, inverse, cut, at_cut, seen, least)
        seen += equal
        if chosen < 0:
            running = before + tl.cumsum(weight.to(tl.float64), axis=0)
            passed = tl.min(tl.where((running > wanted) & (weight > 0.0), at, width), axis=0)
            if passed < width:
                chosen = passed
            last = tl.maximum(last, tl.max(tl.where(weight > 0.0, at, -1), axis=0)) if chosen < 0 else last
            before += tl.sum(weight.to(tl.float64), axis=0)
    return tl.where(chosen < 0, last, chosen)


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How each row chooses. A temperature of 0 takes the best, top_k of 0 and top_p of 1 do not truncate."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor
    """Numbers in [0, 1), float64."""


def draw(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """A token for every row, int32; -1 where a row has no finite best."""
    rows, width = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    draw_kernel[(rows,)](
        *(logits, params.temperature, params.top_k, params.top_p, params.min_p, params.uniform, tokens),
        *(width, logits.stride(0)),
        tile=TILE,
        ways=WAYS,
        num_warps=8,
    )
    return tokens

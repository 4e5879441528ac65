"""Triton kernels that choose tokens as `RowSampler` in _native.pyi says; a row never sees another one.

 peak     every part of a row: its best, and the largest of every small group of values
 gather   every row: the best of all, which is the answer if it is greedy. If not: what all weigh together, and, if the
          parameters truncate, the few best values, above a floor that the groups' largest give
 choose   rows that are not greedy: the few in order, cut and drawn from; or, if nothing truncates, all of them
 wide     rows whose few were too few: the cut is searched in the whole row, sixteen borders at a time

Weights are relative to the best, which weighs 1. Those of the few are float64, those of whole rows float32 with sums
in float64. A token of -2 is one that is not chosen yet.
"""

from __future__ import annotations

import triton
import triton.language as tl

PARAMS = tl.constexpr(5)
"""Numbers of a draw, float64: temperature, top_k, top_p, min_p, uniform."""


@triton.jit
def _key(value):
    """A signed number that orders as the floats do; equal for both zeros."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _settle(tokens, last, owners, row, token):
    """The token of a draw; it is what the row that owns the draw, if one does, begins its next step with."""
    tl.store(tokens + row, token)
    owner = tl.load(owners + row)
    if owner >= 0:
        tl.store(last + owner, tl.maximum(token, 0))


@triton.jit
def peak_kernel(logits, peaks, bests, maxima, width, stride, parts, groups, tile: tl.constexpr, group: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * tile + tl.arange(0, tile)
    value = tl.load(logits + row * stride + at, mask=at < width, other=float("-inf"))
    broken = tl.max((value != value).to(tl.int32), axis=0)
    top = tl.max(value, axis=0)
    tl.store(bests + row * parts + part, tl.min(tl.where(value == top, at, width), axis=0))
    tl.store(peaks + row * parts + part, tl.where(broken > 0, float("nan"), top))
    largest = tl.max(tl.reshape(value, [tile // group, group]), axis=1)
    tl.store(maxima + row * groups + part * (tile // group) + tl.arange(0, tile // group), largest)


@triton.jit
def _floor(maxima, groups, rank, padded: tl.constexpr):
    """The key of the `rank`-th largest of the groups' largest values, or one below all."""
    number = tl.arange(0, padded)
    key = _key(tl.load(maxima + number, mask=number < groups, other=float("-inf"))).to(tl.int64)
    low = tl.full((), -(1 << 31), tl.int64)
    high = tl.full((), 1 << 31, tl.int64)
    if rank <= groups:
        for _ in range(32):
            middle = (low + high) >> 1
            reaches = tl.sum(((key >= middle) & (number < groups)).to(tl.int32), axis=0) >= rank
            low = tl.where(reaches, middle, low)
            high = tl.where(reaches, high, middle)
    return low


@triton.jit
def _truncates(draws, row, width):
    top_k = tl.load(draws + row * PARAMS + 1).to(tl.int32)
    return ((top_k > 0) & (top_k < width)) | (tl.load(draws + row * PARAMS + 2) < 1.0)


@triton.jit
def _temperature(draws, row):
    return tl.maximum(tl.load(draws + row * PARAMS), 1.1754943508222875e-38)


@triton.jit
def gather_kernel(
    logits, draws, peaks, bests, maxima, row_peaks, totals, counts, found, tokens, last, owners,
    width, stride, parts, groups, rank_by_mass,
    samples: tl.constexpr, tile: tl.constexpr, parts_padded: tl.constexpr, groups_padded: tl.constexpr,
    few: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, parts_padded)
    peak_of = tl.load(peaks + row * parts + part, mask=part < parts, other=float("-inf"))
    best_of = tl.load(bests + row * parts + part, mask=part < parts, other=0)
    broken = tl.sum((peak_of != peak_of).to(tl.int32), axis=0)
    peak = tl.max(peak_of, axis=0)
    best = tl.min(tl.where(peak_of == peak, best_of, width), axis=0)
    lost = (broken > 0) | (peak == float("-inf")) | (peak == float("inf"))
    if not samples:
        _settle(tokens, last, owners, row, tl.where(lost, -1, best))
    else:
        greedy = tl.load(draws + row * PARAMS) == 0.0
        if greedy | lost:
            _settle(tokens, last, owners, row, tl.where(lost, -1, best))
        else:
            tl.store(tokens + row, -2)
            tl.store(row_peaks + row, peak)
            top_k = tl.load(draws + row * PARAMS + 1).to(tl.int32)
            truncates = _truncates(draws, row, width)
            rank = tl.where((top_k > 0) & (top_k < width), top_k, rank_by_mass)
            floor = _floor(maxima + row * groups, groups, rank, groups_padded)
            floor = tl.where(truncates, floor, 1 << 40)
            least = tl.where(truncates, 0.0, tl.load(draws + row * PARAMS + 3)).to(tl.float32)
            temperature = _temperature(draws, row).to(tl.float32)
            total = tl.full((), 0.0, tl.float64)
            count = tl.full((), 0, tl.int32)
            for start in range(0, width, tile):
                at = start + tl.arange(0, tile)
                value = tl.load(logits + row * stride + at, mask=at < width, other=float("-inf"))
                weight = tl.exp((value - peak) / temperature)
                total += tl.sum(tl.where(weight >= least, weight, 0.0), axis=0).to(tl.float64)
                key = _key(value).to(tl.int64)
                high = (key >= floor) & (value > float("-inf"))
                more = tl.sum(high.to(tl.int32), axis=0)
                if more > 0:
                    place = count + tl.cumsum(high.to(tl.int32), axis=0) - 1
                    entry = (key << 32) | (at ^ 0x7FFFFFFF).to(tl.int64)
                    tl.store(found + row * few + place, entry, mask=high & (place < few))
                count += more
            tl.store(totals + row, total)
            tl.store(counts + row, count)


@triton.jit
def choose_kernel(
    logits, draws, row_peaks, totals, counts, found, tokens, last, owners, width, stride,
    tile: tl.constexpr, few: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(tokens + row) == -2:
        if _truncates(draws, row, width):
            token = _from_few(draws, row, row_peaks, totals, counts, found, width, few)
            if token >= 0:
                _settle(tokens, last, owners, row, token)
        else:
            least = tl.load(draws + row * PARAMS + 3).to(tl.float32)
            wanted = tl.load(draws + row * PARAMS + 4) * tl.load(totals + row)
            temperature = _temperature(draws, row).to(tl.float32)
            peak = tl.load(row_peaks + row)
            cut = tl.full((), -(1 << 40), tl.int64)
            none = tl.full((), 0, tl.int32)
            token = _pick(logits + row * stride, width, peak, temperature, least, cut, none, wanted, tile)
            _settle(tokens, last, owners, row, token)


@triton.jit
def _from_few(draws, row, row_peaks, totals, counts, found, width, few: tl.constexpr):
    """A token from the few best of a row; -1 if they do not reach as far as the parameters do."""
    temperature = _temperature(draws, row)
    top_k = tl.load(draws + row * PARAMS + 1).to(tl.int32)
    top_p = tl.load(draws + row * PARAMS + 2)
    least = tl.load(draws + row * PARAMS + 3)
    peak = tl.load(row_peaks + row).to(tl.float64)
    count = tl.load(counts + row)
    number = tl.arange(0, few)
    by_count = (top_k > 0) & (top_k < width)
    held = tl.minimum(count, few)
    entry = tl.load(found + row * few + number, mask=number < held, other=-(1 << 63))
    entry = tl.sort(entry, descending=True)
    value = _value((entry >> 32).to(tl.int32)).to(tl.float64)
    present = number < tl.where(by_count, tl.minimum(held, top_k), held)
    weight = tl.where(present, tl.exp((tl.where(present, value, peak) - peak) / temperature), 0.0)
    running = tl.cumsum(weight, axis=0)
    sum_ = tl.sum(weight, axis=0)
    mass = top_p * tl.where(by_count, sum_, tl.load(totals + row))
    # Kept: what comes before `mass` is reached, and the one that reaches it.
    open_ended = tl.where(top_p < 1.0, mass, float("inf"))
    within = (running - weight < open_ended) | (number == 0)
    stays = present & within & (weight >= least)
    # Once more in the order of ids.
    id_ = (entry & 0x7FFFFFFF) ^ 0x7FFFFFFF
    low = tl.full((), 0xFFFFFFFF, tl.int64)
    highest = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    bits = value.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64) & low
    entry = tl.sort(tl.where(stays, (id_ << 32) | bits, highest), descending=False)
    stays = entry != highest
    value = (entry & low).to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)
    weight = tl.where(stays, tl.exp((tl.where(stays, value, peak) - peak) / temperature), 0.0)
    running = tl.cumsum(weight, axis=0)
    wanted = tl.load(draws + row * PARAMS + 4) * tl.max(running, axis=0)
    heavy = weight > 0.0
    place = tl.min(tl.where(heavy & (running > wanted), number, few), axis=0)
    place = tl.minimum(place, tl.max(tl.where(heavy, number, 0), axis=0))
    token = tl.sum(tl.where(number == place, (entry >> 32).to(tl.int32), 0), axis=0)
    enough = (count <= few) & (by_count | (sum_ >= mass))
    return tl.where(enough, token, -1)


@triton.jit
def _pick(values, width, peak, temperature, least, cut, at_cut, wanted, tile: tl.constexpr):
    """The first whose running sum passes `wanted`, in the order of ids; the last that weighs something if none does.

    What is above the key `cut` counts, and the first `at_cut` of those that are equal to it.
    """
    before = tl.full((), 0.0, tl.float64)
    chosen = tl.full((), -1, tl.int32)
    last = tl.full((), 0, tl.int32)
    seen = tl.full((), 0, tl.int32)
    for start in range(0, width, tile):
        if chosen < 0:
            at = start + tl.arange(0, tile)
            value = tl.load(values + at, mask=at < width, other=float("-inf"))
            weight = tl.exp((value - peak) / temperature)
            key = _key(value).to(tl.int64)
            equal = (key == cut) & (at < width)
            place = seen + tl.cumsum(equal.to(tl.int32), axis=0)
            stays = ((key > cut) | (equal & (place <= at_cut))) & (weight >= least) & (weight > 0.0)
            weight = tl.where(stays, weight, 0.0)
            seen += tl.sum(equal.to(tl.int32), axis=0)
            sum_ = tl.sum(weight.to(tl.float64), axis=0)
            heaviest = tl.max(tl.where(stays, at, -1), axis=0)
            last = tl.maximum(last, heaviest)
            if before + sum_ > wanted:
                running = before + tl.cumsum(weight.to(tl.float64), axis=0)
                first = tl.min(tl.where(stays & (running > wanted), at, width), axis=0)
                chosen = tl.minimum(first, last)
            before += sum_
    return tl.where(chosen < 0, last, chosen)


@triton.jit
def _search(
    values, width, peak, temperature, wanted, floor, at_floor, by_mass: tl.constexpr, tile: tl.constexpr,
    ways: tl.constexpr,
):  # fmt: skip
    """The largest key such that what is at or above it reaches `wanted`, by count or by weight, and how many that have
    exactly this key it takes. Of those that have the key `floor` only `at_floor` are there, and none below."""
    border = tl.arange(0, ways)
    found = floor
    above = tl.full((), 0.0, tl.float64)
    shift = tl.full((), 32, tl.int64)
    at_least = at_floor.to(tl.float64)
    if by_mass:
        each = tl.exp((_value(floor.to(tl.int32)) - peak) / temperature).to(tl.float64)
        at_least = tl.where(at_floor > 0, at_least * each, 0.0)
    for _ in range(8):
        shift -= 4
        borders = found + (border.to(tl.int64) << shift)
        limits = tl.minimum(borders, 0x7FFFFFFF).to(tl.int32)  # which no number has
        reached = tl.zeros([ways], tl.float64)
        for start in range(0, width, tile):
            at = start + tl.arange(0, tile)
            value = tl.load(values + at, mask=at < width, other=float("-inf"))
            key = _key(value)
            amount = (value > float("-inf")).to(tl.float32)
            if by_mass:
                amount = tl.exp((value - peak) / temperature)
            amount = tl.where(key > floor, amount, 0.0)
            hits = tl.where(key[None, :] >= limits[:, None], amount[None, :], 0.0)
            reached += tl.sum(hits, axis=1).to(tl.float64)
        reached += tl.where(borders <= floor, at_least, 0.0)
        # The highest border that still reaches; the first one always does.
        step = tl.max(tl.where((reached >= wanted) | (border == 0), border, 0), axis=0)
        beyond = tl.sum(tl.where(border == step + 1, reached, 0.0), axis=0)
        above = tl.where(step + 1 < ways, beyond, above)
        found += step.to(tl.int64) << shift
    each = tl.full((), 1.0, tl.float64)
    if by_mass:
        each = tl.exp((_value(found.to(tl.int32)) - peak) / temperature).to(tl.float64)
    missing = tl.where(each > 0.0, tl.ceil((wanted - above) / tl.where(each > 0.0, each, 1.0)), 1.0)
    missing = tl.minimum(tl.maximum(missing, 1.0), 2.0e9).to(tl.int32)
    return found, tl.where(found == floor, tl.minimum(missing, at_floor), missing)


@triton.jit
def wide_kernel(
    logits, draws, row_peaks, totals, tokens, last, owners, width, stride, tile: tl.constexpr, ways: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if tl.load(tokens + row) == -2:
        values = logits + row * stride
        peak = tl.load(row_peaks + row)
        temperature = _temperature(draws, row).to(tl.float32)
        top_k = tl.load(draws + row * PARAMS + 1).to(tl.int32)
        top_p = tl.load(draws + row * PARAMS + 2)
        least = tl.load(draws + row * PARAMS + 3).to(tl.float32)
        cut = tl.full((), -(1 << 31), tl.int64)
        at_cut = tl.full((), 0, tl.int32)
        if (top_k > 0) & (top_k < width):
            cut, at_cut = _search(
                values, width, peak, temperature, top_k.to(tl.float64), cut, at_cut, False, tile, ways
            )
        if top_p < 1.0:
            mass = top_p * _mass(values, width, peak, temperature, 0.0, cut, at_cut, tile)
            cut, at_cut = _search(values, width, peak, temperature, mass, cut, at_cut, True, tile, ways)
        total = _mass(values, width, peak, temperature, least, cut, at_cut, tile)
        wanted = tl.load(draws + row * PARAMS + 4) * total
        token = _pick(values, width, peak, temperature, least, cut, at_cut, wanted, tile)
        _settle(tokens, last, owners, row, token)


@triton.jit
def _mass(values, width, peak, temperature, least, cut, at_cut, tile: tl.constexpr):
    """What weighs at least `least`, above the key `cut`, and `at_cut` of those that are equal to it."""
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, width, tile):
        at = start + tl.arange(0, tile)
        value = tl.load(values + at, mask=at < width, other=float("-inf"))
        weight = tl.exp((value - peak) / temperature)
        stays = (_key(value).to(tl.int64) > cut) & (weight >= least)
        total += tl.sum(tl.where(stays, weight, 0.0), axis=0).to(tl.float64)
    if at_cut > 0:
        each = tl.exp((_value(cut.to(tl.int32)) - peak) / temperature)
        total += at_cut.to(tl.float64) * tl.where(each >= least, each, 0.0).to(tl.float64)
    return total


@triton.jit
def bias_kernel(logits, ids, values, starts, stride, tile: tl.constexpr):
    """Adds in float64, rounded once. A row that is not sound stays so, whatever is forbidden."""
    row = tl.program_id(0).to(tl.int64)
    first, end = tl.load(starts + row), tl.load(starts + row + 1)
    for start in range(first, end, tile):
        at = start + tl.arange(0, tile)
        place = logits + row * stride + tl.load(ids + at, mask=at < end, other=0)
        value = tl.load(place, mask=at < end, other=0.0).to(tl.float64)
        biased = value + tl.load(values + at, mask=at < end, other=0.0)
        tl.store(place, biased.to(tl.float32), mask=at < end)


@triton.jit
def _penalised(value, count, repetition, frequency, presence):
    value = value.to(tl.float64)
    less = tl.where(value > 0.0, value / repetition, value * repetition)
    less -= tl.where(count > 0, frequency * count.to(tl.float64) + presence, 0.0)
    # As likely as can be is all that a tiny repetition penalty asks for; but what is not sound stays so.
    sound = value < float("inf")
    return tl.where(sound, tl.minimum(less, 3.4028234663852886e38), value).to(tl.float32)


@triton.jit
def penalty_kernel(logits, ids, counts, starts, rates, follows, last, stride, tile: tl.constexpr):
    """`rates` are repetition, frequency and presence of each row. A row that follows on a token counts it, too."""
    row = tl.program_id(0).to(tl.int64)
    first, end = tl.load(starts + row), tl.load(starts + row + 1)
    repetition, frequency = tl.load(rates + row * 3), tl.load(rates + row * 3 + 1)
    presence = tl.load(rates + row * 3 + 2)
    owner = tl.load(follows + row)
    # The last token is not penalised in the loop's turn it is met in, but afterwards: nothing is written twice.
    unknown = tl.full((), -1, tl.int32)
    if owner >= 0:
        unknown = tl.load(last + owner)
    times = tl.full((), 0, tl.int32)
    for start in range(first, end, tile):
        at = start + tl.arange(0, tile)
        id_ = tl.load(ids + at, mask=at < end, other=-2)
        count = tl.load(counts + at, mask=at < end, other=0)
        times += tl.sum(tl.where(id_ == unknown, count, 0), axis=0)
        other = (at < end) & (id_ != unknown)
        value = tl.load(logits + row * stride + id_, mask=other, other=0.0)
        less = _penalised(value, count, repetition, frequency, presence)
        tl.store(logits + row * stride + id_, less, mask=other)
    if unknown >= 0:
        place = logits + row * stride + unknown
        tl.store(place, _penalised(tl.load(place), times + 1, repetition, frequency, presence))


@triton.jit(do_not_specialize=["table_stride"])
def prepare_kernel(tokens, follows, last, table, firsts, tables, table_stride, tile: tl.constexpr):
    """A row: its token, if it follows on one that was drawn; its blocks, out of the list of all into the table."""
    row = tl.program_id(0)
    owner = tl.load(follows + row)
    if owner >= 0:
        tl.store(tokens + row, tl.load(last + owner))
    first, end = tl.load(firsts + row), tl.load(firsts + row + 1)
    for start in range(first, end, tile):
        at = start + tl.arange(0, tile)
        block = tl.load(table + at, mask=at < end, other=0)
        tl.store(tables + row.to(tl.int64) * table_stride + at - first, block, mask=at < end)

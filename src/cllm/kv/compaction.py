"""Moving blocks together: plans, which are plain data, and the moves in slices between steps.

    fill     .  A  .  .  B  .  C  D          the highest live blocks go to the lowest free places: the fewest moves
             D  A  C  B  .  .  .  .          that leave no hole

    slide    .  A  .  .  B  .  C  D          every live block goes down, the order is kept: runs stay runs
             A  B  C  D  .  .  .  .

A plan is made anew for every slice, from the map as it is then and no longer than the slice has time for. Place first,
then commit: a call moves blocks only to places that are free until it has succeeded, so one that fails has changed
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from cllm.kv.arena import Arena
from cllm.kv.ops import Move

FIRST_GUESS = 1e9
"""Bytes a second, until moves have been timed."""

LEARNING = 0.25
"""Weight of the newest timing."""

Plan = Callable[[bytes | bytearray, int], list[Move]]
"""From the map of free blocks (1: free) and the most blocks to move, to moves."""


def plan_fill(free: bytes | bytearray, most: int, places: bytes | bytearray | None = None) -> list[Move]:
    """The highest live blocks into the lowest free places, in runs as long as both sides allow.

    `places` is the map without free blocks that are not to be used.
    """
    moves: list[Move] = []
    places = free if places is None else places
    low, high = places.find(1), free.rfind(0) + 1
    while most > 0 and 0 <= low < high:
        live_from = free.rfind(1, low, high) + 1
        free_to = places.find(0, low, high)
        count = min(free_to - low, high - live_from, most)
        moves.append(Move(high - count, low, count))
        most -= count
        # What was moved counts as free above and as live below, without a change to the map.
        high -= count
        if high == live_from:
            high = free.rfind(0, low, high) + 1
        low += count
        if low == free_to:
            low = places.find(1, low, high)
    return moves


def plan_slide(free: bytes | bytearray, most: int) -> list[Move]:
    """Every live block to the low end in the order in which they lie. A move may overlap its own target."""
    moves: list[Move] = []
    target = free.find(1)
    source = target
    while most > 0 and target >= 0:
        source = free.find(0, source)
        if source < 0:
            break
        end = free.find(1, source)
        count = min((len(free) if end < 0 else end) - source, most)
        moves.append(Move(source, target, count))
        most -= count
        source += count
        target += count
    return moves


def plan_lift(free: bytes | bytearray, most: int) -> list[Move]:
    """The opposite of a fill, for measuring: the lowest live blocks into the highest free places of the part of the
    arena that is as large again as what lives in it."""
    end = min(len(free), 2 * free.count(0))
    mirrored = plan_fill(free[:end][::-1], most)
    return [Move(end - source - count, end - target - count, count) for source, target, count in mirrored]


def in_calls(moves: Iterable[Move]) -> Iterator[list[Move]]:
    """The moves, in order, cut so that within a call no target is also a source: whatever happens to a call, all that
    it was to move is still where it was."""
    call: list[Move] = []
    lowest = highest = 0  # between these lie the sources of the call
    for source, target, count in moves:
        step = min(count, abs(source - target))
        if source < target and step < count:
            raise ValueError(f"{count} blocks from {source} up to {target} would overwrite themselves")
        for offset in range(0, count, step):
            part = Move(source + offset, target + offset, min(step, count - offset))
            if call and (lowest < part.target + part.blocks and part.target < highest):
                yield call
                call = []
            if not call:
                lowest, highest = part.source, part.source + part.blocks
            call.append(part)
            lowest, highest = min(lowest, part.source), max(highest, part.source + part.blocks)
    if call:
        yield call


class Compactor:
    """Carries plans out, slice by slice, and knows how fast that is here."""

    def __init__(self, arena: Arena, clock: Callable[[], float]) -> None:
        self.bytes_per_s = FIRST_GUESS
        self.moved_blocks = 0
        self._arena = arena
        self._clock = clock
        self._credit_s = 0.0

    def slice(self, plan: Plan, most: int, budget_s: float) -> int | None:
        """Move up to `most` blocks as `plan` says, for about `budget_s`; returns how many, None if there was no time.

        What a budget leaves over counts for the next slice, up to the time of one block: any budget gets somewhere.
        """
        arena = self._arena
        block_s = arena.block_bytes / self.bytes_per_s
        self._credit_s = min(self._credit_s, block_s) + budget_s
        affordable = min(most, int(self._credit_s / block_s))
        if affordable < 1:
            return None
        moved = 0
        started = now = self._clock()
        for call in in_calls(plan(arena.pool.open_map(), affordable)):
            arena.relocate(call)
            moved += sum(move.blocks for move in call)
            now = self._clock()
            if now - started >= self._credit_s:
                break
        self._credit_s = max(0.0, self._credit_s - (now - started))
        self._learn(moved, now - started)
        return moved

    def _learn(self, blocks: int, seconds: float) -> None:
        self.moved_blocks += blocks
        if blocks and seconds > 0:
            newest = blocks * self._arena.block_bytes / seconds
            self.bytes_per_s += LEARNING * (newest - self.bytes_per_s)

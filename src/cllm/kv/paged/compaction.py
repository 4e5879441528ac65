"""Compaction: plans, which are plain data; carrying them out in slices between steps; and whether that pays.

    fill     .  A  .  .  B  .  C  D          the highest live blocks move to the lowest free places: the fewest moves
             D  A  C  B  .  .  .  .          that leave no hole

    slide    .  A  .  .  B  .  C  D          every live block moves down in order: runs stay runs
             A  B  C  D  .  .  .  .

Every slice makes a new plan, from the current free map and no longer than it has time for. A call moves blocks only to
places that are free, and the bookkeeping follows once it has succeeded: a call that fails has changed nothing.

Does a compaction pay? What it would give back against what it would cost, with a price that learns.

Only whole free extents go back to the OS, so scattered blocks keep more memory than they fill. The gain of moving them
together is the bytes that could then go back; the cost is the bytes to move, at the speed that was measured.

On 4 KiB pages, or moved together, placement makes little difference to speed; blocks scattered over large pages decode
slower (see docs/benchmarks.md, memory-placement). There is no separate term for that: scattered blocks are those that
keep extents which could go back, so moving them together follows from the gain in memory already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from cllm.kv.ops import Move
from cllm.kv.paged.arena import Arena
from cllm.kv.throughput import RecentThroughput

FIRST_GUESS = 1e9
"""Bytes per second, until moves have been timed."""

GIB = float(1 << 30)
FIRST_PRICE, LEAST_PRICE, HIGHEST_PRICE = 1 * GIB, GIB / 4, 64 * GIB
DEARER, CHEAPER = 1.5, 0.8
KEPT = 0.75
"""A compaction kept its promise if at least so much of what it was to free went back."""

MovePlan = Callable[[bytes | bytearray, int], list[Move]]
"""From the free map (1: free) and the most blocks to move, to moves."""


def plan_fill(free: bytes | bytearray, most: int, places: bytes | bytearray | None = None) -> list[Move]:
    """Move the highest live blocks to the lowest free places, in runs as long as both sides allow.

    `places` is the free map without places that must not be filled.
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
        # What was moved counts as free above and as live below, without changing the map.
        high -= count
        if high == live_from:
            high = free.rfind(0, low, high) + 1
        low += count
        if low == free_to:
            low = places.find(1, low, high)
    return moves


def plan_slide(free: bytes | bytearray, most: int) -> list[Move]:
    """Move every live block down, in order. A move may overlap its own target."""
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
    """The opposite of a fill, for measuring: the lowest live blocks move to the highest free places, within twice the
    size of what is live."""
    end = min(len(free), 2 * free.count(0))
    mirrored = plan_fill(free[:end][::-1], most)
    return [Move(end - source - count, end - target - count, count) for source, target, count in mirrored]


def in_calls(moves: Iterable[Move]) -> Iterator[list[Move]]:
    """The moves, in order, cut into calls in which no target is also a source: if a call fails, everything is still
    where it was."""
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
    """Carries out plans, slice by slice, and measures how fast that is."""

    def __init__(self, arena: Arena, clock: Callable[[], float]) -> None:
        self.throughput = RecentThroughput(FIRST_GUESS)
        self.moved_blocks = 0
        self._arena = arena
        self._clock = clock
        self._credit_s = 0.0

    def slice(self, plan: MovePlan, most: int, budget_s: float) -> int | None:
        """Move up to `most` blocks by `plan`, for about `budget_s`; returns how many, None if there was no time.

        Unused time carries over to the next slice, up to the time of one block, so that any budget makes progress.
        """
        arena = self._arena
        block_s = self.throughput.seconds(arena.block_bytes)
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
        self.moved_blocks += moved
        self.throughput.add(moved * arena.block_bytes, now - started)
        return moved


@dataclass(slots=True)
class CompactionEstimate:
    """What a compaction would give and cost."""

    gain_bytes: int
    cost_blocks: int
    cost_s: float


class CompactionTrigger:
    """`price`: the bytes that a second of moving must give back."""

    def __init__(self) -> None:
        self.price = FIRST_PRICE
        self._promised = 0
        self._released_without = 0
        self._judge_at: float | None = None

    def pays(self, estimate: CompactionEstimate) -> bool:
        worth = estimate.gain_bytes > 0 and estimate.cost_blocks > 0
        return worth and estimate.gain_bytes >= self.price * estimate.cost_s

    def promise(self, gain_bytes: int, released_without: int, judge_at: float) -> None:
        """A compaction was begun for that gain. It is judged by what goes back beyond `released_without`: what had been
        released until then, and what was empty and could have been released without any move."""
        self._promised, self._released_without, self._judge_at = gain_bytes, released_without, judge_at

    def judge(self, released_bytes: int, now: float, *, at_once: bool = False) -> None:
        """Compare what came back with what was promised, once it is time."""
        if self._judge_at is None or (now < self._judge_at and not at_once):
            return
        kept = released_bytes - self._released_without >= KEPT * self._promised
        self.price = min(max(self.price * (CHEAPER if kept else DEARER), LEAST_PRICE), HIGHEST_PRICE)
        self._judge_at = None

"""Where snapshots of states are taken.

A step ends at every such place, and a state may take as much memory as the K/V of thousands of tokens, so there are
few: those that others are most likely to go on from, and back from the end at distances that double, so that a prompt
which differs from `x` tokens before the end on computes at most twice as many before them again.

    prompt   0 ─────────●───────────────────●─────────●────●──●─●─● end    answer ──────●───────── …
                        └──── doubling distances ────┘  └ the last messages
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

LAST_PLACES = 6
"""Message ends, counted from the prompt's end, that are kept however close they are."""

LEAST_DISTANCE = 16
"""Blocks between the end and the nearest of the other places, at least: what a step computes at nearly full speed."""


def places_for_states(wanted: Iterable[int], likely: Iterable[int], computed: int, end: int, cells: int) -> set[int]:
    """Numbers of blocks between `computed` and `end`, the prompt's. `wanted`: kept for certain; `likely`: ends of
    messages; `cells`: of a state, each as large as a block of K/V."""
    # The end itself is hardly behind the last message.
    messages = sorted({place for place in likely if computed < place < end - 1})
    chosen = {place for place in (*wanted, end, *messages[-LAST_PLACES:]) if computed < place <= end}
    distance = max(LEAST_DISTANCE, cells)
    while (place := end - distance) > computed:
        before = bisect_right(messages, place)
        message = messages[before - 1] if before else 0
        chosen.add(message if place - message < distance // 2 else place)
        distance *= 2
    return {place for place in chosen if place > computed}


def further(blocks: int, cells: int) -> int:
    """How many blocks an answer goes on behind the first `blocks` until the next one is due."""
    return max(LEAST_DISTANCE, cells, blocks // 4)

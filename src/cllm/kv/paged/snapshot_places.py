"""Where snapshots of states are taken.

A step ends at every such place, and a state may take as much memory as the K/V of thousands of tokens, so there are
few: those that others are most likely to go on from, and back from the end at distances that double, so that a prompt
which differs from `x` tokens before the end on computes at most twice as many before them again.

    prompt   0 ──system──●───────────────────●─────────●────●──●─●─● end    answer ──────●───────── …
                           └──── doubling distances ────┘  └ the last messages
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import chain, zip_longest

LAST_PLACES = 6
"""Message ends, counted from the prompt's end, that are kept however close they are."""

LEAST_DISTANCE = 32
"""Blocks between the end and the nearest of the other places, at least: what a step computes at nearly full speed."""


def places_for_states(
    wanted: Iterable[int], likely: Iterable[int], computed: int, end: int, *, cells: int, most: int
) -> set[int]:
    """Numbers of blocks between `computed` and `end`, the prompt's. `wanted`: kept for certain; `likely`: ends of
    messages; `cells`: of a state, each as large as a block of K/V; `most`: how many of the others there may be."""
    certain = {place for place in (*wanted, end) if computed < place <= end}
    # The end itself is hardly behind the last message. Few prompts differ within their first message.
    messages = sorted({place for place in likely if computed < place < end - 1})
    far = _doubling(messages, messages[0] if messages else computed, end, max(LEAST_DISTANCE, cells))
    nearest = chain.from_iterable(zip_longest(reversed(messages[-LAST_PLACES:]), far))
    others = [place for place in (*messages[:1], *nearest) if place is not None and place not in certain]
    return certain.union(list(dict.fromkeys(others))[: max(0, most - len(certain))])


def _doubling(messages: list[int], begin: int, end: int, distance: int) -> list[int]:
    """Places back from the end, nearest first, behind a message where one ends shortly before."""
    places = []
    while (place := end - distance) > begin:
        before = bisect_right(messages, place)
        message = messages[before - 1] if before else -end
        places.append(message if place - message < distance // 2 else place)
        distance *= 2
    return places


def further(blocks: int, cells: int) -> int:
    """How many blocks an answer goes on behind the first `blocks` until the next one is due."""
    return max(LEAST_DISTANCE, cells, blocks // 4)

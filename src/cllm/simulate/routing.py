"""Which of several equal servers gets a request. A router sees arrivals only, never how far the servers are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import count

from cllm.simulate.settings import Settings
from cllm.simulate.traces import Text, TracedRequest, spell

Router = Callable[[TracedRequest, float], int]

PIECE_TOKENS = 64
"""A router by prefix remembers prompts in pieces of this many tokens."""

IMBALANCE = 1.1
SPARE_TOKENS = 4096
"""A server with this many times the average load and so much more gets nothing more for the sake of its cache."""

FADING_S = 60.0
"""Load is what a server was given lately; after this time, a third of it counts."""

_MAX_PIECES = 4_000_000


def make_router(settings: Settings) -> Router:
    if settings.replicas == 1:
        return lambda traced, moment: 0
    if settings.routing == "round-robin":
        turn = count()
        return lambda traced, moment: next(turn) % settings.replicas
    return PrefixRouter(settings.replicas)


class PrefixRouter:
    """To the server that was given the longest beginning of the same prompt, unless it has much more to do than others.

    The pieces of a prompt are known by a hash of all up to their end, so a dictionary does for a tree.
    """

    def __init__(self, replicas: int) -> None:
        self._given: dict[int, int] = {}
        self._load = [0.0] * replicas
        self._moment = 0.0

    def __call__(self, traced: TracedRequest, moment: float) -> int:
        pieces = list(_pieces(traced.prompt))
        self._fade(moment)
        limit = IMBALANCE * sum(self._load) / len(self._load) + SPARE_TOKENS
        chosen = min(range(len(self._load)), key=self._load.__getitem__)
        known = 0
        for number, piece in enumerate(reversed(pieces)):
            replica = self._given.get(piece)
            if replica is not None and self._load[replica] <= limit:
                chosen, known = replica, len(pieces) - number
                break
        for piece in pieces:
            # Moved to the end of the dictionary: what was not seen for longest is forgotten first.
            self._given.pop(piece, None)
            self._given[piece] = chosen
        while len(self._given) > _MAX_PIECES:
            del self._given[next(iter(self._given))]
        self._load[chosen] += traced.prompt_length - known * PIECE_TOKENS + traced.answer_length
        return chosen

    def _fade(self, moment: float) -> None:
        factor = math.exp((self._moment - moment) / FADING_S)
        self._load = [load * factor for load in self._load]
        self._moment = moment


def _pieces(prompt: Text) -> Iterator[int]:
    tokens = spell(prompt).tobytes()
    size = 4 * PIECE_TOKENS
    hashed = 0
    for start in range(0, len(tokens) - size + 1, size):
        hashed = hash((hashed, tokens[start : start + size]))
        yield hashed

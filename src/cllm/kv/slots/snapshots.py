"""States of sequences, kept where others may go on: for backends whose layers carry a state from token to token.

What a backend holds of such a sequence goes on only behind its last token. A snapshot is its state behind fewer of
them; together with their K/V, which the sequence still has, others go on from there. It never changes, and sequences
that begin with the same tokens share it.

    tokens     [ system ][ user ][ answer ][ user ][ answer ]
    snapshots          ●       ●         ●       ●              the sequence itself goes on from its end
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

import numpy as np

from cllm.kv.ops import SavedKV

MOST = 16
"""Snapshots of a sequence."""

LEAST_APART = 16
"""Tokens that a snapshot saves at least; fewer are computed as fast."""

PATH_SHARE, SHARE = 0.25, 0.5
"""The share of the store that the snapshots of one sequence may take, and all of them."""


_NOTHING: SavedKV = np.empty(0, np.uint8)


class Snapshot:
    __slots__ = ("pins", "saved", "tokens", "users")

    def __init__(self, tokens: int, saved: SavedKV) -> None:
        self.tokens = tokens
        self.saved = saved
        self.users = self.pins = 0


Kept = dict[int, Snapshot]
"""The snapshots of a sequence, by the number of tokens before them."""


class Snapshots:
    """All of them. They are given up when no sequence has them any more, or for lack of memory: the one that was used
    longest ago first."""

    def __init__(self, store_bytes: int, state_bytes: int) -> None:
        self.bytes = 0
        self.taken = self.used = 0
        fitting = int(store_bytes * PATH_SHARE) // max(1, state_bytes)
        self.most = min(MOST, max(fitting, int(2 * state_bytes <= store_bytes)))
        """How many a sequence may have."""
        self.apart = LEAST_APART
        self._limit = max(int(store_bytes * SHARE), state_bytes)
        self._order: OrderedDict[Snapshot, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, snapshot: object) -> bool:
        return snapshot in self._order

    def add(self, kept: Kept, snapshot: Snapshot) -> None:
        """Give a sequence a snapshot, a new one or another's."""
        if snapshot.tokens in kept:
            self.remove(kept, snapshot.tokens)
        if not snapshot.users:
            self.bytes += snapshot.saved.nbytes
            self._order[snapshot] = None
        snapshot.users += 1
        kept[snapshot.tokens] = snapshot

    def share(self, source: Kept, target: Kept, most_tokens: int) -> None:
        for tokens, snapshot in source.items():
            if tokens <= most_tokens and not self.has(target, tokens) and snapshot in self._order:
                self.add(target, snapshot)

    def has(self, kept: Kept, tokens: int) -> bool:
        return tokens in kept and kept[tokens] in self._order

    def remove(self, kept: Kept, tokens: int) -> None:
        snapshot = kept.pop(tokens)
        snapshot.users -= 1
        if not snapshot.users and snapshot in self._order:
            self._forget(snapshot)

    def clear(self, kept: Kept, longer_than: int = -1) -> None:
        for tokens in [tokens for tokens in kept if tokens > longer_than]:
            self.remove(kept, tokens)

    def deepest(self, kept: Kept, most_tokens: int) -> Snapshot | None:
        there = (snapshot for tokens, snapshot in kept.items() if tokens <= most_tokens and snapshot in self._order)
        return max(there, key=lambda snapshot: snapshot.tokens, default=None)

    def use(self, snapshot: Snapshot) -> None:
        """A sequence goes on from it."""
        self._order.move_to_end(snapshot)
        self.used += 1

    def pin(self, kept: Kept) -> None:
        """They are not given up for lack of memory."""
        for snapshot in kept.values():
            snapshot.pins += 1

    def unpin(self, kept: Kept) -> None:
        for snapshot in kept.values():
            snapshot.pins -= 1

    def choose(self, candidates: Collection[int], needed: Collection[int], known: int, tokens: int) -> list[int]:
        """Behind how many of a prompt's `tokens` to take snapshots, the next one last; `known` of them are cached. All
        that are `needed`, the first of the `candidates`, which ends what many prompts begin with, and others at
        distances that grow from the end."""
        chosen = {place for place in needed if known < place <= tokens}
        inner = sorted({place for place in candidates if known + self.apart <= place <= tokens})
        chosen.update(inner[:1])
        last = tokens
        for place in reversed(inner):
            if len(chosen) >= self.most:
                break
            if place == inner[-1] or last - place >= max(self.apart, (tokens - last) // 2):
                chosen.add(place)
                last = place
        return sorted(chosen, reverse=True)

    def thin(self, kept: Kept, protected: Collection[int]) -> None:
        """Give up what a sequence has too many of: those whose neighbours are closest, measured by how far from the end
        they are."""
        for tokens in [tokens for tokens in kept if not self.has(kept, tokens)]:
            self.remove(kept, tokens)
        while len(kept) > self.most:
            places = sorted(kept)
            spare = [i for i in range(len(places) - 1) if places[i] not in protected]
            if not spare:
                return
            before = [0, *places]
            end = places[-1]
            self.remove(kept, places[min(spare, key=lambda i: (places[i + 1] - before[i]) / (end - before[i]))])

    def make_room(self, needed: int) -> bool:
        """Give up the oldest until `needed` more bytes are within their share. False: that was not enough."""
        while self.bytes + needed > self._limit and self.give_up_oldest():
            pass
        return self.bytes + needed <= self._limit

    def give_up_oldest(self) -> bool:
        """Give up the one that was used longest ago: nobody can go on from there any more. False: there is none."""
        oldest = next((snapshot for snapshot in self._order if not snapshot.pins), None)
        if oldest is not None:
            self._forget(oldest)
        return oldest is not None

    def _forget(self, snapshot: Snapshot) -> None:
        del self._order[snapshot]
        self.bytes -= snapshot.saved.nbytes
        snapshot.saved = _NOTHING

    def check(self, all_kept: Collection[Kept]) -> None:
        users: dict[Snapshot, int] = {}
        for kept in all_kept:
            for tokens, snapshot in kept.items():
                if snapshot.tokens != tokens:
                    raise AssertionError("a snapshot is kept at another place than its own")
                users[snapshot] = users.get(snapshot, 0) + 1
        if any(snapshot.users != count for snapshot, count in users.items()):
            raise AssertionError("the users of a snapshot are counted wrong")
        if not users.keys() >= self._order.keys() or sum(each.saved.nbytes for each in self._order) != self.bytes:
            raise AssertionError("the bytes of snapshots are counted wrong")

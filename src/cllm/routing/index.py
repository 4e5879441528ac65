"""Which replicas have which blocks cached, from the events of their prefix caches (kv/events.py).

    held   hash of a block -> the replicas that hold it, as bits of an int

A prompt is a chain of block hashes. A cache that has a block has all before it, so the replicas become fewer along the
chain, and a binary search finds where: a few probes for a prompt of a thousand blocks. The index is exact up to the
last event, with three exceptions, none of which makes an answer wrong: blocks that a replica is about to compute count
for a few seconds (`expect`), blocks beyond the limit are forgotten, and hashes are cut to 60 bits.

A replica is *unknown* after a gap in its events, until its snapshot arrives (`KVManager.held_names`), and *quiet* when
nothing has been heard of it for a while. Neither is found by `lookup`, so a router treats both by their load alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from cllm.kv.block_names import NAME_BYTES
from cllm.kv.events import KVEvent

MOST_BLOCKS = 1_000_000
"""Blocks known of all replicas together, each replica's own count. About 100 bytes each."""

QUIET_S = 10.0
"""A replica of which nothing was heard for this long is left out."""

EXPECTED_S = 5.0
"""Blocks that a replica was asked to compute count as held for this long, or twice as long at most."""

USED = 1
"""The lowest bit of a mask: looked up since eviction last passed. Replicas have the bits above."""

_WAITING_NAMES = 65_536
"""Names in events that wait for a snapshot; with more of them, another snapshot is needed."""
_FORGET_PER_CALL = 256
_DECODED_MASKS = 1024
_WORD = 8
_CUT_BITS = 4


def short_hashes(names: Iterable[bytes]) -> list[int]:
    """The names of blocks (kv/block_names.py), cut to 60 bits: ints of the smallest size that serves."""
    words = np.frombuffer(b"".join(names), dtype="<u8")[:: NAME_BYTES // _WORD]
    shortened: list[int] = (words >> np.uint64(_CUT_BITS)).tolist()
    return shortened


class _Holding:
    """What one replica holds, under one bit. When the replica dies or clears its cache, the holding is retired: its bit
    counts no more, is taken out of the masks a little at a time, and is only then given to another."""

    __slots__ = ("bit", "blocks", "order", "slot")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.bit = 1 << slot
        self.blocks = 0
        self.order: deque[int] = deque()
        """Every hash it holds, oldest first; also some that it no longer holds."""


class _Replica:
    __slots__ = ("heard", "holding", "number", "waiting", "waiting_names")

    def __init__(self, now: float) -> None:
        self.heard = now
        self.number = 0
        """The last event that was applied."""
        self.holding: _Holding | None = None
        """None: unknown."""
        self.waiting: list[KVEvent] = []
        """Events after a gap, which a snapshot may make useful."""
        self.waiting_names = 0


class PrefixIndex:
    def __init__(self, most_blocks: int = MOST_BLOCKS, *, quiet_s: float = QUIET_S) -> None:
        self.most_blocks = most_blocks
        self.blocks = 0
        """Blocks known, counted once for each replica that holds them."""
        self._quiet_s = quiet_s
        self._held: dict[int, int] = {}
        self._replicas: dict[str, _Replica] = {}
        self._names: dict[int, str] = {}
        """Slot -> replica."""
        self._decoded: dict[int, tuple[str, ...]] = {}
        self._retired: deque[_Holding] = deque()
        self._free: list[int] = []
        self._slots = 0
        self._known = 0
        """The bits of replicas that are neither unknown nor quiet, until `_known_until`."""
        self._known_until = -math.inf
        self._expected: tuple[dict[int, int], dict[int, int]] = {}, {}
        """Newer and older."""
        self._expected_since = -math.inf

    # -- replicas ----------------------------------------------------------------------------------------------

    def add(self, replica: str, now: float) -> None:
        """A new replica, unknown until its first snapshot."""
        if replica not in self._replicas:
            self._replicas[replica] = _Replica(now)

    def remove(self, replica: str) -> None:
        """A replica is gone. Takes the same time however much it held."""
        gone = self._replicas.pop(replica, None)
        if gone is not None:
            self._retire(gone)

    def unknown(self) -> list[str]:
        """Replicas whose snapshot is needed."""
        return [name for name, replica in self._replicas.items() if replica.holding is None]

    def knows(self, replica: str, now: float) -> bool:
        """Whether it is neither unknown nor quiet."""
        known = self._replicas.get(replica)
        return known is not None and known.holding is not None and bool(known.holding.bit & self._known_bits(now))

    def blocks_of(self, replica: str) -> int:
        holding = self._replicas[replica].holding
        return holding.blocks if holding is not None else 0

    # -- what replicas report ----------------------------------------------------------------------------------

    def apply(self, replica: str, events: Iterable[KVEvent], now: float) -> None:
        """Events in order; none at all is a sign of life. Those of a replica that is gone are ignored."""
        reporting = self._replicas.get(replica)
        if reporting is None:
            return
        self._hear(reporting, now)
        for event in events:
            self._apply(replica, reporting, event)
        self._forget_retired(_FORGET_PER_CALL)

    def snapshot(self, replica: str, number: int, names: Iterable[bytes], now: float) -> None:
        """All blocks that a replica holds, up to event `number`."""
        reporting = self._replicas.get(replica)
        if reporting is None:
            return
        self._hear(reporting, now)
        if reporting.holding is not None and number < reporting.number:
            return
        self._retire(reporting)
        self._store(self._begin(replica, reporting, number), short_hashes(names))
        waiting, reporting.waiting, reporting.waiting_names = reporting.waiting, [], 0
        for event in waiting:
            self._apply(replica, reporting, event)

    def _hear(self, replica: _Replica, now: float) -> None:
        if now - replica.heard > self._quiet_s:
            self._known_until = -math.inf
        replica.heard = now

    def _apply(self, name: str, replica: _Replica, event: KVEvent) -> None:
        if event.number <= replica.number:
            return
        holding = replica.holding
        if event.kind == "cleared":
            self._retire(replica)
            self._begin(name, replica, event.number)
            replica.waiting, replica.waiting_names = [], 0
        elif holding is None or event.kind == "gap" or event.number != replica.number + 1:
            self._retire(replica)
            self._wait(replica, event)
        else:
            replica.number = event.number
            hashes = short_hashes(event.names)
            if event.kind == "stored":
                self._store(holding, hashes)
            else:
                self._remove(holding, hashes)

    def _wait(self, replica: _Replica, event: KVEvent) -> None:
        replica.waiting_names += len(event.names) + 1
        if event.kind == "gap" or replica.waiting_names > _WAITING_NAMES:
            replica.waiting, replica.waiting_names = [], 0
            event = KVEvent(event.number, "gap")
        replica.waiting.append(event)

    # -- what a router asks ------------------------------------------------------------------------------------

    def lookup(self, hashes: Sequence[int], now: float) -> list[tuple[int, tuple[str, ...]]]:
        """How many of a prompt's leading blocks each replica holds, or is about to: numbers and those who hold as many.
        Replicas that hold none are left out. Of one that is listed twice, the last number counts."""
        self._forget_retired(_FORGET_PER_CALL // 16)
        self._age_expected(now)
        known = self._known_bits(now)
        if not (known and hashes):
            return []
        found: list[tuple[int, tuple[str, ...]]] = []
        last = len(hashes)
        at_last = self._holders(hashes[-1], known)
        # Stretches of the chain, the first one on top, with the holders of their ends.
        stretches = [(0, known, last, at_last)]
        while stretches:
            start, at_start, end, at_end = stretches.pop()
            if at_start == at_end:
                continue
            if end - start > 1:
                middle = (start + end) // 2
                at_middle = self._holders(hashes[middle - 1], known)
                stretches.append((middle, at_middle, end, at_end))
                stretches.append((start, at_start, middle, at_middle))
            elif start and (lost := at_start & ~at_end):
                found.append((start, self._replicas_of(lost)))
        if at_last:
            found.append((last, self._replicas_of(at_last)))
        return found

    def _holders(self, hashed: int, known: int) -> int:
        held = self._held.get(hashed, 0)
        if held and not held & USED:
            self._held[hashed] = held | USED
        newer, older = self._expected
        return (held | newer.get(hashed, 0) | older.get(hashed, 0)) & known

    def _replicas_of(self, mask: int) -> tuple[str, ...]:
        """The same few masks come again and again."""
        names = self._decoded.get(mask)
        if names is None:
            if len(self._decoded) >= _DECODED_MASKS:
                self._decoded.clear()
            bits = bin(mask)[:1:-1]
            names = self._decoded[mask] = tuple(self._names[slot] for slot, bit in enumerate(bits) if bit == "1")
        return names

    def expect(self, replica: str, hashes: Sequence[int], now: float) -> None:
        """A replica was given a prompt: it will hold these blocks soon."""
        holding = self._replicas[replica].holding
        if holding is None:
            return
        self._age_expected(now)
        newer, _ = self._expected
        bit = holding.bit
        if newer.keys().isdisjoint(hashes):
            newer.update(dict.fromkeys(hashes, bit))
        else:
            for hashed in hashes:
                newer[hashed] = newer.get(hashed, 0) | bit

    def _age_expected(self, now: float) -> None:
        age, (newer, _) = now - self._expected_since, self._expected
        if age > EXPECTED_S or len(newer) > self.most_blocks // 16:
            self._expected = {}, newer if age <= 2 * EXPECTED_S else {}
            self._expected_since = now

    def _known_bits(self, now: float) -> int:
        if now > self._known_until:
            self._known, self._known_until = 0, math.inf
            for replica in self._replicas.values():
                until = replica.heard + self._quiet_s
                if replica.holding is not None and now <= until:
                    self._known |= replica.holding.bit
                    self._known_until = min(self._known_until, until)
        return self._known

    # -- holdings ----------------------------------------------------------------------------------------------

    def _begin(self, name: str, replica: _Replica, number: int) -> _Holding:
        if self._free:
            slot = self._free.pop()
            self._expected = {}, {}  # they may speak of the slot's last owner
        else:
            self._slots = slot = self._slots + 1
        self._names[slot] = name
        self._decoded.clear()
        holding = replica.holding = _Holding(slot)
        replica.number = number
        self._known_until = -math.inf
        return holding

    def _retire(self, replica: _Replica) -> None:
        if replica.holding is not None:
            self._retired.append(replica.holding)
            replica.holding = None
            self._known_until = -math.inf

    def _forget_retired(self, most: int) -> None:
        while self._retired and most > 0:
            holding = self._retired[0]
            while holding.order and most > 0:
                self._remove(holding, (holding.order.popleft(),))
                most -= 1
            if not holding.order:
                self._retired.popleft()
                self._free.append(holding.slot)

    def _store(self, holding: _Holding, hashes: Sequence[int]) -> None:
        held, bit, order = self._held, holding.bit, holding.order
        before = len(order)
        for hashed in reversed(hashes):  # the end of a chain is forgotten before its beginning
            mask = held.get(hashed)
            if mask is None:
                held[hashed] = bit
            elif mask & bit:
                continue
            else:
                held[hashed] = mask | bit
            order.append(hashed)
        stored = len(order) - before
        holding.blocks += stored
        self.blocks += stored
        if self.blocks > self.most_blocks:
            self._make_room()
        if len(order) > 2 * holding.blocks + 1024:
            latest = [hashed for hashed in dict.fromkeys(reversed(order)) if held.get(hashed, 0) & bit]
            holding.order = deque(reversed(latest))

    def _remove(self, holding: _Holding, hashes: Iterable[int]) -> None:
        held, bit = self._held, holding.bit
        for hashed in hashes:
            mask = held.get(hashed, 0)
            if mask & bit:
                mask ^= bit
                if mask > USED:
                    held[hashed] = mask
                else:
                    del held[hashed]
                holding.blocks -= 1
                self.blocks -= 1

    def _make_room(self) -> None:
        """Take from those that hold the most; nobody is left with less than an equal share."""
        goal = self.most_blocks - self.most_blocks // 64
        while self.blocks > goal and self._retired:
            self._forget_retired(_FORGET_PER_CALL)
        holdings = [replica.holding for replica in self._replicas.values() if replica.holding is not None]
        share = self.most_blocks // len(holdings) if holdings else 0
        while self.blocks > goal and holdings:
            largest = max(holdings, key=lambda holding: holding.blocks)
            excess = min(largest.blocks - share, self.blocks - goal)
            if excess <= 0:
                return
            for _ in range(excess):
                self._evict(largest)

    def _evict(self, holding: _Holding) -> None:
        """Forget the replica's oldest block that was not looked up since this was last asked."""
        held, order = self._held, holding.order
        while order:
            hashed = order.popleft()
            mask = held.get(hashed, 0)
            if mask & holding.bit and mask & USED:
                held[hashed] = mask ^ USED
                order.append(hashed)
            elif mask & holding.bit:
                self._remove(holding, (hashed,))
                return

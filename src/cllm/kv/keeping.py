"""Which blocks are written to disk, and when.

A sequence that ends offers what it has in the tree, if that is worth a place on disk: it is long, or was used before.
One that runs for long does so before that, and again whenever it has grown by as much as is worth it.
An offer is only the tokens; they are looked up in the tree when there is time, so blocks may move or go meanwhile.
Handing a block over copies it on the engine's thread, so that is done a few blocks at a time, between steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from cllm.kv.arena import Arena
from cllm.kv.disk.names import TOKEN_BYTES, chain, root_name
from cllm.kv.disk.store import Space
from cllm.kv.host import HostTier
from cllm.kv.ops import BlockBytes
from cllm.kv.prefixes import name_before
from cllm.kv.radix import COMMON_SPACE
from cllm.kv.sequence import KVSequence
from cllm.kv.table import BlockNode, held_by
from cllm.kv.tier import Tier

MOST_OFFERS = 256
FIRST_GUESS = 2e9
"""Bytes a second that are copied, until that was timed."""

LEARNING = 0.25
AT_ONCE_BYTES = 1 << 20
"""Handed over in one call, unless a block is larger."""

BURST_BYTES = 4 << 20
"""Handed over behind one step, while something runs: a token of many is late then, instead of all by a little."""

SHORTEST_RETRY_S, LONGEST_RETRY_S = 0.05, 5.0
"""While the disk takes nothing."""

STANDING_S = 2.0
"""How often running sequences are looked at for what they could offer."""

RESCUE_S = 0.002
"""For blocks that are about to be evicted."""


class Offer:
    __slots__ = ("common", "done", "key", "names", "owner", "tree_names")

    def __init__(self, owner: bytes, key: bytes, common: int) -> None:
        self.owner = owner
        self.key = key
        self.common = common
        """Blocks at the beginning that are not the owner's but common."""
        self.names: list[bytes] = []
        self.tree_names: list[bytes] = []
        self.done = common
        """Blocks that are on disk, or on their way there, or common."""

    def name_in_tree(self, block_tokens: int) -> None:
        """Find the names that its blocks have in the tree, which are not those on disk."""
        at = self.common * block_tokens * TOKEN_BYTES
        common = chain(root_name(b"", COMMON_SPACE), self.key[:at], block_tokens)
        before = name_before(common[-1] if common else b"", COMMON_SPACE, self.owner)
        self.tree_names = [*common, *chain(before, self.key[at:], block_tokens)]


class Keeping:
    def __init__(self, arena: Arena, tier: Tier, clock: Callable[[], float]) -> None:
        self._arena = arena
        self._tier = tier
        self._clock = clock
        self._offers: deque[Offer] = deque()
        self.blocks = 0
        """That were offered and not dealt with yet."""
        self._credit_s = 0.0
        self._bytes_per_s = FIRST_GUESS
        self._retry_s = SHORTEST_RETRY_S
        self._retry_at = float("-inf")
        self.host: HostTier | None = None
        """Where blocks are read, if there is one that works: from the arena of a GPU that would wait for the steps."""
        self._look_at = clock() + STANDING_S
        self._urgent = False

    def __len__(self) -> int:
        return len(self._offers)

    def clear(self) -> None:
        self._offers.clear()
        self.blocks = 0

    def offer(self, sequence: KVSequence) -> None:
        """What a sequence has computed, and has in the tree."""
        held = held_by(sequence)
        own = [node for node in held.node.path() if node.space == sequence.space]
        blocks = self._worth(own)
        if blocks and len(self._offers) < MOST_OFFERS and self._tier.pays:
            common = held.indexed - sum(len(node.value) for node in own)
            tokens = (common + blocks) * self._tier.block_tokens
            self.take([Offer(sequence.space, sequence.tokens[:tokens].tobytes(), common)])
            held.offered = common + blocks

    def offer_standing(self, sequences: Iterable[KVSequence]) -> None:
        """Sequences that run: what they have computed by now should not wait for their ends."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + STANDING_S
        for sequence in sequences:
            if held_by(sequence).indexed >= held_by(sequence).offered + self._tier.worth_blocks:
                self.offer(sequence)

    def take(self, offers: list[Offer]) -> None:
        for offer in offers[: MOST_OFFERS - len(self._offers)]:
            self._offers.append(offer)
            self.blocks += len(offer.key) // (TOKEN_BYTES * self._tier.block_tokens) - offer.done

    def _worth(self, path: list[BlockNode]) -> int:
        """How many of the first blocks of its own are worth being kept: all if they are many, else those that were used
        again."""
        blocks = sum(len(node.value) for node in path)
        if blocks >= self._tier.worth_blocks:
            return blocks
        for node in path:
            if node.hits:
                break
            blocks -= len(node.value)
        return blocks if blocks >= self._tier.least_blocks else 0

    # -- handing over ------------------------------------------------------------------------------------------

    def due_at(self) -> float | None:
        """When there is something to do though nothing happens until then."""
        return self._retry_at if self._offers and self._tier.space is not None else None

    def work(self, budget_s: float, *, in_bursts: bool = False) -> bool:
        """For about so many seconds; in bursts, now and then for as long as all those before were allowed. True: there
        is more to do, at once."""
        space = self._tier.space
        if not self._offers or space is None or budget_s <= 0 or self._clock() < self._retry_at:
            return False
        block_s = self._tier.block_bytes / self._bytes_per_s
        least_s = max(block_s, BURST_BYTES / self._bytes_per_s) if in_bursts else block_s
        self._credit_s = min(self._credit_s, least_s) + budget_s
        if self._credit_s < least_s:
            return True
        started = self._clock()
        try:
            while self._offers and self._credit_s >= block_s:
                if not self._advance(self._offers[0], space, int(self._credit_s / block_s)):
                    self._retry_at = self._clock() + self._retry_s
                    self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
                    return False
                now = self._clock()
                self._credit_s -= now - started
                started = now
        except Exception as error:
            self._next()
            self._tier.fault("keeping blocks on disk", error)
            return False
        self._credit_s = max(self._credit_s, 0.0)
        return bool(self._offers)

    def rescue(self, budget_s: float) -> None:
        """What was offered may be gone soon: it goes to the disk now, though memory has to be taken for that."""
        self._retry_at, self._urgent = float("-inf"), True
        try:
            self.work(budget_s)
        finally:
            self._urgent = False

    def _advance(self, offer: Offer, space: Space, most: int) -> bool:
        """Hand some blocks over, or find that there are none left. False: nothing is taken now."""
        tier = self._tier
        if not offer.names:
            offer.names = tier.names(space, offer.owner, offer.key)
            self._progress(offer, space.held(offer.names[offer.done :]))
            if offer.done == len(offer.names):
                space.used(offer.names[-1])
        blocks = self._arena.prefixes.blocks_of(offer.key, offer.owner)[offer.done :]
        most = min(most, max(1, AT_ONCE_BYTES // tier.block_bytes))
        started = self._clock()
        content = self._content(offer, blocks, most)
        if content is None:
            return False
        if not content:
            self._next()
            return True
        end = offer.done + len(content)
        before = offer.names[offer.done - 1] if offer.done else space.root(offer.owner)
        kept = space.put(before, offer.done, offer.names[offer.done : end], content, urgent=self._urgent)
        self._learn(kept, self._clock() - started)
        self._progress(offer, kept)
        if kept:
            self._retry_s = SHORTEST_RETRY_S
            tier.worked()
        return kept == len(content)

    def _content(self, offer: Offer, blocks: list[int], most: int) -> Sequence[NDArray[np.uint8]] | None:
        """Of the next blocks of an offer, as far as they are still somewhere. None: they are on their way."""
        if self.host is not None and self.host.usable:
            if not offer.tree_names:
                offer.name_in_tree(self._tier.block_tokens)
            return self.host.contents(offer.tree_names[offer.done :], blocks, most)
        ops = self._arena.ops
        assert isinstance(ops, BlockBytes)
        return ops.read_blocks(blocks[:most]) if blocks else []

    def _progress(self, offer: Offer, blocks: int) -> None:
        offer.done += blocks
        self.blocks -= blocks

    def _next(self) -> None:
        """There is nothing more to do about the first offer."""
        offer = self._offers.popleft()
        self.blocks -= len(offer.key) // (TOKEN_BYTES * self._tier.block_tokens) - offer.done

    def _learn(self, blocks: int, seconds: float) -> None:
        if blocks and seconds > 0:
            newest = blocks * self._tier.block_bytes / seconds
            self._bytes_per_s += LEARNING * (newest - self._bytes_per_s)

    def drain(self, seconds: float) -> None:
        """Hand all over that was offered, for so long: nothing else will be done any more."""
        until, writer = time.monotonic() + seconds, self._tier.store.writer
        while self._offers and self._tier.space is not None and not writer.trouble and time.monotonic() < until:
            self._retry_at = float("-inf")
            if self.host is not None:
                self.host.settle()
            if not self.work(0.1):
                self._tier.store.flush(max(0.0, min(0.1, until - time.monotonic())))
                time.sleep(0.001)

"""Which blocks are written to disk, and when.

A sequence that ends becomes a candidate if its prefix is worth writing: it is long, or was reused. A long-running one
becomes a candidate earlier, and again whenever it has grown enough. A candidate is only tokens and names: the blocks
are looked up in the tree when there is time, so they may be moved or evicted meanwhile. Handing a block to the store
copies it on the engine's thread, so this happens a few blocks at a time, between steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from cllm.kv.block_names import root_name
from cllm.kv.disk.store import ModelStore
from cllm.kv.paged.arena import Arena
from cllm.kv.paged.block_table import BlockNode, allocation_of
from cllm.kv.paged.local import on_path
from cllm.kv.sequence import KVSequence
from cllm.kv.throughput import RecentThroughput
from cllm.kv.tiers.disk_tier import DiskTier
from cllm.kv.tiers.loads import LoadingSequence
from cllm.kv.tiers.tiers import Tiers

MOST_CANDIDATES = 256
FIRST_GUESS = 2e9
"""Bytes per second copied, until that was timed."""

AT_ONCE_BYTES = 1 << 20
"""Most bytes handed over in one call, unless a block is larger."""

BURST_BYTES = 4 << 20
"""Handed over after one step while something runs: one token in many is late, instead of all a little."""

SHORTEST_RETRY_S, LONGEST_RETRY_S = 0.05, 5.0
"""Pause while the disk takes nothing."""

STANDING_S = 2.0
"""How often running sequences are checked for new candidates."""

RESCUE_S = 0.002
"""Time to write blocks that are about to be evicted."""


class OffloadCandidate:
    """The blocks of a prefix; or, `behind` the block of that name, the cells of the snapshot there."""

    __slots__ = ("common", "done", "is_snapshot", "key", "looked", "names", "owner", "root")

    def __init__(self, owner: bytes, key: bytes, names: list[bytes], common: int, behind: bytes = b"") -> None:
        self.is_snapshot = bool(behind)
        self.owner = owner
        self.key = key
        self.names = names
        self.root = behind or (root_name(owner, names[common - 1]) if common else root_name(owner))
        """What its first own block follows."""
        self.common = common
        """Leading blocks that belong to the common space."""
        self.done = common
        """Leading blocks that need no writing: on disk, queued, or common."""
        self.looked = False
        """Whether it is known how many are on disk already."""

    @property
    def before(self) -> bytes:
        """The name of the block before the next one to write."""
        return self.names[self.done - 1] if self.done > self.common else self.root


class DiskOffload:
    def __init__(self, arena: Arena, tiers: Tiers, clock: Callable[[], float]) -> None:
        self._arena = arena
        self._tiers = tiers
        self._clock = clock
        self._candidates: deque[OffloadCandidate] = deque()
        self.blocks = 0
        """Blocks of all candidates that are not written yet."""
        self._credit_s = 0.0
        self._throughput = RecentThroughput(FIRST_GUESS)
        self._retry_s = SHORTEST_RETRY_S
        self._retry_at = float("-inf")
        self._look_at = clock() + STANDING_S
        self._urgent = False

    def __len__(self) -> int:
        return len(self._candidates)

    def clear(self) -> None:
        self._candidates.clear()
        self.blocks = 0

    def offer(self, sequence: KVSequence) -> None:
        """Make a sequence's prefix in the tree a candidate, if it is worth it."""
        held, disk = allocation_of(sequence), self._tiers.disk
        if disk is None or len(self._candidates) >= MOST_CANDIDATES or not disk.pays:
            return
        own = [node for node in held.node.path() if node.space == sequence.space]
        blocks = _worth(own, disk)
        if blocks:
            common = held.indexed - sum(len(node.value) for node in own)
            end = common + blocks
            key = sequence.tokens[: end * disk.block_tokens].tobytes()
            names = [name for node in reversed(list(held.node.path())) for name in node.names][:end]
            self._add(OffloadCandidate(sequence.space, key, names, common))
            held.offered = end
            self._offer_snapshots(sequence, disk, names)

    def _offer_snapshots(self, sequence: KVSequence, disk: DiskTier, names: list[bytes]) -> None:
        """The snapshots where others are most likely to go on: the last two on the sequence's own path.
        The candidate with the blocks before them, of these names, comes first."""
        local = self._arena.local
        if local is None:
            return
        path = on_path(allocation_of(sequence).node)
        own = [end for end, snapshot in path if snapshot.node.space == sequence.space and end <= len(names)]
        for end in own[:2]:
            cells = local.cell_names(names, end)
            key = sequence.tokens[: end * disk.block_tokens].tobytes()
            self._add(OffloadCandidate(sequence.space, key, cells, 0, behind=names[end - 1]))

    def _add(self, candidate: OffloadCandidate) -> None:
        self._candidates.append(candidate)
        self.blocks += len(candidate.names) - candidate.done

    def offer_standing(self) -> None:
        """Offer what running sequences have computed so far, without waiting for their ends."""
        now, disk = self._clock(), self._tiers.disk
        if disk is None or now < self._look_at or self._tiers.model_store is None:
            return
        self._look_at = now + STANDING_S
        for sequence in self._arena.running.values():
            held = allocation_of(sequence)
            if held.indexed >= held.offered + disk.worth_blocks and not isinstance(sequence, LoadingSequence):
                self.offer(sequence)

    # -- handing over ------------------------------------------------------------------------------------------

    def due_at(self) -> float | None:
        """When there is work to do without further events; None: never."""
        return self._retry_at if self._candidates and self._tiers.model_store is not None else None

    def work(self, budget_s: float, *, in_bursts: bool = False) -> bool:
        """Hand over blocks for about `budget_s`; `in_bursts`: save up budgets and spend them at once. True: there is
        more to do right away."""
        disk, model_store = self._tiers.disk, self._tiers.model_store
        if disk is None or model_store is None:
            return False
        if not self._candidates or budget_s <= 0 or self._clock() < self._retry_at:
            return False
        block_s = self._throughput.seconds(disk.block_bytes)
        least_s = max(block_s, self._throughput.seconds(BURST_BYTES)) if in_bursts else block_s
        self._credit_s = min(self._credit_s, least_s) + budget_s
        if self._credit_s < least_s:
            return True
        started = self._clock()
        try:
            while self._candidates and self._credit_s >= block_s:
                if not self._advance(self._candidates[0], disk, model_store, int(self._credit_s / block_s)):
                    self._retry_at = self._clock() + self._retry_s
                    self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
                    return False
                now = self._clock()
                self._credit_s -= now - started
                started = now
        except Exception as error:
            self._next()
            disk.fault("keeping blocks on disk", error)
            return False
        self._credit_s = max(self._credit_s, 0.0)
        return bool(self._candidates)

    def rescue(self, budget_s: float) -> None:
        """Candidates may be evicted soon: write some now, even if that takes fresh memory."""
        self._retry_at, self._urgent = float("-inf"), True
        try:
            self.work(budget_s)
        finally:
            self._urgent = False

    def _advance(self, candidate: OffloadCandidate, disk: DiskTier, model_store: ModelStore, most: int) -> bool:
        """Hand over some blocks, or drop a candidate that has none left. False: the store takes nothing now."""
        if not candidate.looked:
            candidate.looked = True
            self._progress(candidate, model_store.held(candidate.names[candidate.done :]))
            if candidate.done == len(candidate.names):
                model_store.used(candidate.names[-1])
        of = self._arena.prefixes.snapshot_cells if candidate.is_snapshot else self._arena.prefixes.blocks_of
        blocks = of(candidate.key, candidate.owner)[candidate.done :]
        most = min(most, max(1, AT_ONCE_BYTES // disk.block_bytes))
        started = self._clock()
        content = self._content(candidate, blocks, most)
        if content is None:
            return False
        if not content:
            self._next()
            return True
        end = candidate.done + len(content)
        names = candidate.names[candidate.done : end]
        kept = model_store.put(candidate.before, candidate.done, names, content, urgent=self._urgent)
        self._throughput.add(kept * disk.block_bytes, self._clock() - started)
        self._progress(candidate, kept)
        if kept:
            self._retry_s = SHORTEST_RETRY_S
            disk.worked()
        return kept == len(content)

    def _content(self, candidate: OffloadCandidate, blocks: list[int], most: int) -> Sequence[NDArray[np.uint8]] | None:
        """The content of a candidate's next blocks, as far as they still exist. None: being copied to host memory,
        because reading a GPU's arena would wait for the steps."""
        host = self._tiers.host
        if host is not None and host.usable:
            return host.contents(candidate.names[candidate.done :], blocks, most)
        return self._arena.content.read_blocks(blocks[:most]) if blocks else []

    def _progress(self, candidate: OffloadCandidate, blocks: int) -> None:
        candidate.done += blocks
        self.blocks -= blocks

    def _next(self) -> None:
        """Drop the first candidate."""
        candidate = self._candidates.popleft()
        self.blocks -= len(candidate.names) - candidate.done

    def drain(self, seconds: float) -> None:
        """Hand over all candidates, for at most `seconds`, at shutdown."""
        disk, host, until = self._tiers.disk, self._tiers.host, time.monotonic() + seconds
        while disk is not None and self._candidates and disk.model_store is not None and time.monotonic() < until:
            if disk.store.writer.trouble:
                return
            self._retry_at = float("-inf")
            if host is not None:
                host.settle()
            if not self.work(0.1):
                disk.store.flush(max(0.0, min(0.1, until - time.monotonic())))
                time.sleep(0.001)


def _worth(path: list[BlockNode], disk: DiskTier) -> int:
    """How many blocks of a path are worth writing: all if there are many, else those that were reused."""
    blocks = sum(len(node.value) for node in path)
    if blocks >= disk.worth_blocks:
        return blocks
    for node in path:
        if node.hits:
            break
        blocks -= len(node.value)
    return blocks if blocks >= disk.least_blocks else 0

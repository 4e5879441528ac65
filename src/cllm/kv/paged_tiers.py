"""The paged manager and the disk: what is brought into the arena for who waits, and what is handed over for later."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from time import sleep
from typing import Any

from cllm.errors import BackendError
from cllm.kv.keeping import RESCUE_S, Keeping
from cllm.kv.loads import NOTHING, Incoming, Load
from cllm.kv.paged_operations import PagedOperations
from cllm.kv.radix import Found
from cllm.kv.sequence import KVSequence
from cllm.kv.table import BlocksHeld
from cllm.kv.tier import Tier
from cllm.kv.usage import TierNumbers

UNKNOWN_SPEED = 4.0
"""How many times as long as expected a load may take, while it is not known how long computing would."""

LOOK_S = 0.25
GRACE_S = 0.1
"""How much later than computing would have been a load may be before nobody waits for it any more."""


class PagedTiers(PagedOperations):
    _clock: Callable[[], float]
    _tier: Tier | None = None
    _keeping: Keeping | None = None
    _loads: list[Load]

    @abstractmethod
    def _room_for(self, sequence: KVSequence, found: Found[list[int]]) -> bool: ...

    @abstractmethod
    def _begin(self, sequence: KVSequence, held: BlocksHeld) -> BlocksHeld: ...

    def use_disk(self, tier: Tier) -> None:
        """From now on blocks are kept on disk, and found there."""
        self._tier, self._keeping = tier, Keeping(self._arena, tier, self._clock)
        tier.wake = self._tell_arrival

    def _tell_arrival(self) -> None:
        """From other threads."""
        if self.on_arrival is not None:
            self.on_arrival()

    @property
    def loading(self) -> int:
        return len(self._loads)

    # -- bringing ----------------------------------------------------------------------------------------------

    def fetch(self, sequence: KVSequence) -> bool:
        if self._tier is None:
            return False
        self._tier.token_s = self.token_s
        self._take_in()
        load = sequence.load
        assert load is None or isinstance(load, Load)
        if load is not None and not load.over:
            if not load.late:
                return True
            sequence.load = NOTHING  # computing is the safer way now
            return False
        if load is NOTHING or (load is not None and load.asker is sequence):
            return False  # what came is in the tree; what did not is computed
        sequence.load = load = self._look(self._tier, sequence)
        return load is not None and not load.over

    def _look(self, tier: Tier, sequence: KVSequence) -> Load | None:
        """What to wait for. None: there is no saying now, for want of room or of knowledge."""
        space = tier.space
        if space is None:
            return None
        size, prefix = self.block_size, sequence.prefix
        found = self._prefixes.find(prefix.tobytes(), sequence.space)
        cached, whole = found.matched // self._prefixes.tree.unit_bytes, (len(prefix) - 1) // size
        if whole - cached < tier.least_blocks or any(load.late for load in self._loads):
            return NOTHING
        if not self._room_for(sequence, found):
            return None
        names = tier.names(space, sequence.space, prefix[: whole * size])[cached:]
        for load in self._loads:
            if names[0] in load.names:
                return load
        count = space.held(names)
        expected, computing = tier.load_seconds(count), tier.compute_seconds(count)
        if count < tier.least_blocks or (computing and tier.measured and expected >= computing):
            return NOTHING
        patience = max(2 * expected, computing) + GRACE_S if computing else UNKNOWN_SPEED * expected + 1.0
        holder = Incoming(prefix[: (cached + count) * size], space=sequence.space)
        load = Load(sequence, holder, first=cached, names=names[:count], until=self._clock() + patience)
        return load if self._begin_load(tier, load, found, names[:count]) else NOTHING

    def _begin_load(self, tier: Tier, load: Load, found: Found[list[int]], names: list[bytes]) -> bool:
        """Take blocks for it, which are known to be available, and have them read. False: that failed."""
        space, holder = tier.space, load.holder
        assert space is not None and holder is not None
        node, blocks = self._prefixes.enter(found)
        held = self._begin(holder, BlocksHeld(node, load.first))
        self._make_room(len(names))
        own = self._taken(self._pool.allocate(len(names), held.number, blocks[-1] if blocks else -1))
        holder.blocks = blocks + own
        holder.room = len(holder.blocks) * self.block_size
        holder.num_computed = load.first * self.block_size
        try:
            load.buffers = tier.blocks.landing(own)
            load.ticket = space.load(names, load.buffers, lambda _: tier.tell())
        except Exception as error:
            self.release(holder, keep=False)
            tier.fault("loading blocks from disk", error)
            return False
        self._loads.append(load)
        self._arena.pinned += len(own)
        return True

    def _take_in(self) -> None:
        """What has arrived joins the tree; what has not, though it is time, is not waited for any more."""
        if not self._loads:
            return
        now = self._clock()
        for load in list(self._loads):
            if load.arrived:
                self._loads.remove(load)
                self._land(load)
            elif now >= load.until and not load.late:
                load.cancel()

    def _land(self, load: Load) -> None:
        tier, holder, ticket = self._tier, load.holder, load.ticket
        assert tier is not None and holder is not None and ticket is not None
        own = holder.blocks[load.first :]
        self._arena.pinned -= len(own)
        loaded = ticket.loaded
        try:
            if loaded:
                tier.blocks.land(own[:loaded], load.buffers[:loaded])
                tier.worked()
        except BackendError as error:
            if error.fatal:
                raise
            tier.fault("loading blocks from disk", error)
            loaded = 0
        finally:
            load.over, load.buffers = True, ()
        tier.loads += 1
        tier.loaded_tokens += loaded * self.block_size
        tier.failed_loads += loaded < len(own)
        holder.num_computed += loaded * self.block_size
        self.release(holder)

    # -- keeping -----------------------------------------------------------------------------------------------

    def _offer(self, sequence: KVSequence) -> None:
        """A sequence ends: what it has in the tree may be worth a place on disk."""
        if self._keeping is not None and self._tier is not None and not isinstance(sequence, Incoming):
            self._tier.token_s = self.token_s
            self._keeping.offer(sequence)

    def _rescue(self, count: int) -> None:
        """So many blocks are about to be evicted. If offered ones may be among them, some of those go to disk first."""
        if self._keeping is not None and self._keeping.blocks > self._prefixes.evictable - count:
            self._keeping.work(RESCUE_S)

    def _keep(self, budget_s: float) -> tuple[bool, float]:
        """Take in what came, hand over what was offered. Whether there is more of it, and what the budget leaves."""
        if self._keeping is None:
            return False, budget_s
        started = self._clock()
        self._take_in()
        more = self._keeping.work(budget_s)
        return more, max(0.0, budget_s - (self._clock() - started))

    def _disk_due_at(self) -> float | None:
        """When offers are to be looked at again, or a load is too late; and while something is written, soon, so that
        what is published of it is right."""
        if self._keeping is None:
            return None
        moments = [load.until for load in self._loads if not load.late]
        if (due := self._keeping.due_at()) is not None:
            moments.append(due)
        if self._tier is not None and self._tier.store.writer.queued_bytes:
            moments.append(self._clock() + LOOK_S)
        return min(moments, default=None)

    def wind_up(self, seconds: float) -> None:
        if self._keeping is None:
            return
        for load in self._loads:
            load.cancel()
        self._keeping.drain(seconds)
        until = self._clock() + seconds
        while self._loads and self._clock() < until:
            self._take_in()
            sleep(0.001)

    def _forget_loads(self) -> None:
        """The memory that they were for is gone; the reader has what it writes to until it is done."""
        for load in self._loads:
            load.cancel()
            load.over = True
        self._loads = []
        self._arena.pinned = 0
        if self._keeping is not None:
            self._keeping.clear()

    def _disk_details(self) -> dict[str, Any] | None:
        if self._tier is None or self._keeping is None:
            return None
        stats = self._tier.store.stats()
        return {
            "directory": stats.directory,
            "limit_bytes": stats.limit,
            "bytes": stats.bytes,
            "blocks": stats.blocks,
            "known": self._tier.space is not None,
            "loading": self.loading,
            "offers": len(self._keeping),
            "write_bytes_per_s": round(stats.write_bytes_per_s),
            "read_bytes_per_s": round(stats.read_bytes_per_s),
            "trouble": stats.trouble,
            "counts": dict(stats.counts),
        }

    def _disk_numbers(self) -> TierNumbers:
        return TierNumbers() if self._tier is None else self._tier.numbers()

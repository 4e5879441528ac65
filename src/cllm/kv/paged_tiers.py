"""The paged manager and the disk: what is brought into the arena for who waits, and what is handed over for later."""

from __future__ import annotations

from abc import abstractmethod

from cllm.errors import BackendError, describe
from cllm.kv.keeping import RESCUE_S, Keeping
from cllm.kv.loads import NOTHING, Incoming, Load
from cllm.kv.ops import BlockBytes
from cllm.kv.paged_operations import PagedOperations
from cllm.kv.radix import Found
from cllm.kv.sequence import KVSequence
from cllm.kv.table import BlocksHeld
from cllm.kv.tier import Tier
from cllm.kv.tiered import Tiered

BUSY_SHARE = 0.5
"""Of the time for upkeep while something runs: what is handed over also has to be written, beside the steps."""


class PagedTiers(PagedOperations, Tiered):
    _keeping: Keeping | None = None

    @abstractmethod
    def _room_for(self, sequence: KVSequence, found: Found[list[int]]) -> bool: ...

    @abstractmethod
    def _begin(self, sequence: KVSequence, held: BlocksHeld) -> BlocksHeld: ...

    def use_disk(self, tier: Tier) -> None:
        super().use_disk(tier)
        self._keeping = Keeping(self._arena, tier, self._clock)

    @property
    def _bytes(self) -> BlockBytes:
        ops = self._arena.ops
        assert isinstance(ops, BlockBytes)
        return ops

    # -- bringing ----------------------------------------------------------------------------------------------

    def _look(self, tier: Tier, sequence: KVSequence) -> Load | None:
        space = tier.space
        if space is None:
            return None
        size, prefix = self.block_size, sequence.prefix
        found = self._prefixes.find(prefix.tobytes(), sequence.space)
        cached, whole = found.matched // self._prefixes.tree.unit_bytes, (len(prefix) - 1) // size
        if whole - cached < tier.least_blocks:
            return NOTHING
        if not self._room_for(sequence, found):
            return None
        next_block = (cached + 1) * size
        first = tier.names(space, sequence.space, prefix[:next_block])[-1]
        for load in self._loads:
            if first in load.names:
                return load
        if not space.held([first]):  # most prompts are not there, and need no more names
            return NOTHING
        names = [first, *tier.next_names(first, prefix[next_block : whole * size])]
        names = names[: space.held(names)]
        patience = tier.patience(len(names), len(names) * tier.block_bytes)
        if patience is None:
            return NOTHING
        holder = Incoming(prefix[: (cached + len(names)) * size], space=sequence.space)
        load = Load(sequence, holder, first=cached, names=names, until=self._clock() + patience)
        return load if self._begin_load(tier, load, found, names) else NOTHING

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
            load.buffers = self._bytes.landing(own)
            load.ticket = space.load(names, load.buffers, lambda _: tier.tell())
        except Exception as error:
            self._let_go(holder, keep=False)
            tier.fault("loading blocks from disk", error)
            return False
        self._loads.append(load)
        self._arena.pinned += len(own)
        return True

    def _land(self, tier: Tier, load: Load) -> None:
        holder, ticket = load.holder, load.ticket
        assert holder is not None and ticket is not None
        own = holder.blocks[load.first :]
        self._arena.pinned -= len(own)
        loaded = ticket.loaded
        try:
            if loaded:
                self._bytes.land(own[:loaded], load.buffers[:loaded])
                tier.worked()
        except BackendError as error:
            if error.fatal:
                raise
            tier.fault("loading blocks from disk", error)
            loaded = 0
        finally:
            load.end()
        tier.note_load(loaded * self.block_size, len(own) * self.block_size)
        holder.num_computed += loaded * self.block_size
        self._let_go(holder, keep=True)

    def _let_go(self, holder: Incoming, *, keep: bool) -> None:
        """A load is over. Nobody else knows of its memory, so if that does not come back, all memory is in doubt."""
        try:
            self.release(holder, keep=keep)
        except Exception as error:
            raise BackendError(f"blocks that were loaded did not come back: {describe(error)}", fatal=True) from error

    # -- keeping -----------------------------------------------------------------------------------------------

    def _offer(self, sequence: KVSequence) -> None:
        """A sequence ends: what it has in the tree may be worth a place on disk."""
        if self._keeping is not None and self._tier is not None and not isinstance(sequence, Incoming):
            self._tier.token_s = self.token_s
            self._keeping.offer(sequence)

    def _rescue(self, count: int) -> None:
        """So many blocks are about to be evicted. If offered ones may be among them, some of those go to disk first."""
        if self._keeping is not None and self._keeping.blocks > self._prefixes.evictable - count:
            self._keeping.rescue(self._time_to_keep(RESCUE_S, RESCUE_S))

    def _keep(self, budget_s: float) -> tuple[bool, float]:
        """Take in what came, hand over what was offered. Whether there is more of it, and what the budget leaves."""
        if self._keeping is None:
            return False, budget_s
        started = self._clock()
        self._say_whether_busy(len(self._arena.running) > self.loading)
        self._take_in()
        if self._tier is not None and self._tier.space is not None:
            running = self._arena.running.values()
            self._keeping.offer_standing(sequence for sequence in running if not isinstance(sequence, Incoming))
        more = self._keeping.work(self._time_to_keep(budget_s * BUSY_SHARE, budget_s))
        return more, max(0.0, budget_s - (self._clock() - started))

    def _time_to_keep(self, busy_s: float, idle_s: float) -> float:
        if len(self._arena.running) == self.loading:
            return idle_s
        return 0.0 if self._bytes.reads_wait else busy_s

    def _disk_due_at(self) -> float | None:
        moments = (super()._disk_due_at(), None if self._keeping is None else self._keeping.due_at())
        return min((moment for moment in moments if moment is not None), default=None)

    def wind_up(self, seconds: float) -> None:
        if self._keeping is not None:
            self._keeping.drain(seconds)
            self._end_loads(seconds)

    def _forget_loads(self) -> None:
        """The memory that they were for is gone; the reader has what it writes to until it is done."""
        for load in self._loads:
            load.cancel()
            load.end()
        self._loads = []
        self._arena.pinned = 0
        if self._keeping is not None:
            self._keeping.clear()

"""The paged manager and what lies below the arena: the host's memory beside a GPU's, and the disk.

What is brought into the arena is for who waits; what is handed over is for later. Whatever is evicted goes to the
host's memory, if there is one. What is worth it goes to disk, from there or from the arena.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from cllm.errors import BackendError, describe
from cllm.kv.host import HostTier, Moved
from cllm.kv.keeping import RESCUE_S, Keeping
from cllm.kv.loads import NOTHING, Arriving, Incoming, Load
from cllm.kv.ops import BlockBytes
from cllm.kv.paged_operations import PagedOperations
from cllm.kv.radix import Found
from cllm.kv.sequence import KVSequence
from cllm.kv.table import BlocksHeld
from cllm.kv.tier import Tier
from cllm.kv.tiered import Tiered
from cllm.kv.usage import HostNumbers

BUSY_SHARE = 0.2
"""Of the time for upkeep while something runs: what is handed over also has to be written, beside the steps."""

HOST_LOOK_S = 0.0005
"""How often it is looked whether copies that somebody waits for are done, while nothing is computed."""

AHEAD_BYTES = 1 << 30
"""What is copied to the host's memory before it has to go, so that nobody waits for it; a quarter of the arena at
most."""

AHEAD_AT_ONCE_BYTES = 64 << 20
"""Of it, between two steps."""


class PagedTiers(PagedOperations, Tiered):
    _keeping: Keeping | None = None
    _host: HostTier | None = None
    _ahead_state = (-1, -1, -1)
    """What the arena was like when all that may have to go soon was copied."""

    @abstractmethod
    def _room_for(self, sequence: KVSequence, found: Found[list[int]]) -> bool: ...

    @abstractmethod
    def _begin(self, sequence: KVSequence, held: BlocksHeld) -> BlocksHeld: ...

    def use_disk(self, tier: Tier) -> None:
        super().use_disk(tier)
        self._keeping = Keeping(self._arena, tier, self._clock)
        self._keeping.host = self._host

    def use_host(self, host: HostTier) -> None:
        """From now on blocks that are evicted are kept in the host's memory, and found there."""
        self._host = host
        self._arena.keep_leaving(self._keep_on_host)
        if self._keeping is not None:
            self._keeping.host = host

    @property
    def _bytes(self) -> BlockBytes:
        ops = self._arena.ops
        assert isinstance(ops, BlockBytes)
        return ops

    # -- bringing ----------------------------------------------------------------------------------------------

    @property
    def _looks(self) -> bool:
        return self._tier is not None or self._host is not None

    def _tell_speed(self) -> None:
        super()._tell_speed()
        if self._host is not None:
            self._host.token_s = self.token_s

    def _take_in(self) -> None:
        if self._host is not None:
            self._host.settle()
            self._note_pinned()
        super()._take_in()

    def _look(self, sequence: KVSequence) -> Load | None:
        host, tier = self._host, self._tier
        came, space = sequence.load, None if tier is None else tier.space
        if host is not None and (not len(host) or (isinstance(came, Load) and came.asker is sequence)):
            host = None  # what was there has come
        if host is None and space is None:
            return NOTHING if tier is None else None
        found = self._prefixes.find(sequence.prefix.tobytes(), sequence.space)
        cached, whole = found.matched // self._prefixes.tree.unit_bytes, (len(sequence.prefix) - 1) // self.block_size
        least = min(each.least_blocks for each in (host, tier) if each is not None)
        if whole - cached < least:
            return NOTHING
        if not self._room_for(sequence, found):
            return None
        load = NOTHING if host is None else self._look_on_host(host, sequence, found, whole)
        if load is None:  # what was found of the tree is not what it was
            load, found = NOTHING, self._prefixes.find(sequence.prefix.tobytes(), sequence.space)
        if load is NOTHING and tier is not None:
            return self._look_on_disk(tier, sequence, found, whole)
        return load

    def _look_on_host(self, host: HostTier, sequence: KVSequence, found: Found[list[int]], whole: int) -> Load | None:
        """None: it could not be begun, but `found` was entered for it."""
        prefix, cached = sequence.prefix, found.matched // self._prefixes.tree.unit_bytes
        parent = self._prefixes.name_before(found, sequence.space)
        names = host.find(parent, prefix[cached * self.block_size : whole * self.block_size])
        if len(names) < host.least_blocks:
            return NOTHING
        for load in self._loads:
            if names[0] in load.names:
                return load
        patience = host.patience(len(names))
        if patience is None:
            return NOTHING
        load = self._load(sequence, cached, names, patience)
        try:
            with host.holding(names):  # making room for it may bring others there
                self._begin_load(load, found, lambda blocks: host.load(names, blocks))
        except BackendError as error:
            host.fault("loading blocks from the host's memory", error)
            return None
        return load

    def _look_on_disk(self, tier: Tier, sequence: KVSequence, found: Found[list[int]], whole: int) -> Load | None:
        space = tier.space
        if space is None:
            return None
        size, prefix = self.block_size, sequence.prefix
        cached = found.matched // self._prefixes.tree.unit_bytes
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
        load = self._load(sequence, cached, names, patience)

        def begin(blocks: list[int]) -> Arriving:
            load.buffers = self._bytes.landing(blocks)
            return space.load(names, load.buffers, lambda _: tier.tell())

        try:
            self._begin_load(load, found, begin)
        except Exception as error:
            tier.fault("loading blocks from disk", error)
            return NOTHING
        return load

    def _load(self, sequence: KVSequence, cached: int, names: Sequence[bytes], patience: float) -> Load:
        holder = Incoming(sequence.prefix[: (cached + len(names)) * self.block_size], space=sequence.space)
        return Load(sequence, holder, first=cached, names=names, until=self._clock() + patience)

    def _begin_load(self, load: Load, found: Found[list[int]], begin: Callable[[list[int]], Arriving]) -> None:
        """Take blocks for it, which are known to be available, and have them read; or have nothing changed."""
        holder = load.holder
        assert holder is not None
        node, blocks = self._prefixes.enter(found)
        held = self._begin(holder, BlocksHeld(node, load.first))
        count = len(load.names)
        self._make_room(count)
        own = self._taken(self._pool.allocate(count, held.number, blocks[-1] if blocks else -1))
        holder.blocks = blocks + own
        holder.room = len(holder.blocks) * self.block_size
        holder.num_computed = load.first * self.block_size
        try:
            load.ticket = begin(own)
        except Exception:
            self._let_go(holder, keep=False)
            raise
        self._loads.append(load)
        self._note_pinned()

    def _land(self, load: Load) -> None:
        holder, ticket = load.holder, load.ticket
        assert holder is not None and ticket is not None
        self._note_pinned()
        try:
            if isinstance(ticket, Moved):
                loaded = self._land_from_host(ticket)
                load.more = loaded == len(load.names)
            else:
                loaded = self._land_from_disk(ticket.loaded, holder.blocks[load.first :], load)
        finally:
            load.end()
        holder.num_computed += loaded * self.block_size
        self._let_go(holder, keep=True)

    def _land_from_host(self, moved: Moved) -> int:
        host, loaded = self._host, moved.loaded
        assert host is not None
        if loaded:
            host.land(moved)
        host.note_load(loaded * self.block_size, len(moved.blocks) * self.block_size)
        self._tell_arrival()  # nobody else does, and it may have been found in passing
        return loaded

    def _land_from_disk(self, loaded: int, own: list[int], load: Load) -> int:
        tier = self._tier
        assert tier is not None
        try:
            if loaded:
                self._bytes.land(own[:loaded], load.buffers[:loaded])
                tier.worked()
        except BackendError as error:
            tier.fault("loading blocks from disk", error)
            loaded = 0
        tier.note_load(loaded * self.block_size, len(own) * self.block_size)
        return loaded

    def _let_go(self, holder: Incoming, *, keep: bool) -> None:
        """A load is over. Nobody else knows of its memory, so if that does not come back, all memory is in doubt."""
        try:
            self.release(holder, keep=keep)
        except Exception as error:
            raise BackendError(f"blocks that were loaded did not come back: {describe(error)}", fatal=True) from error

    # -- keeping -----------------------------------------------------------------------------------------------

    def _keep_on_host(self, names: list[bytes], blocks: list[int]) -> None:
        """These blocks are evicted, and their places will be used again."""
        if self._host is not None:
            self._host.keep(names, blocks)
            self._note_pinned()

    def _reuse(self, blocks: list[int]) -> None:
        if self._host is not None:
            self._host.reuse(blocks)

    def _copy_ahead(self, host: HostTier) -> None:
        """Copy what will have to go soon, some of it, so that its places are free at once when they are needed."""
        arena, prefixes = self._arena, self._prefixes
        state = (self._pool.free, prefixes.evictable, arena.events.number)
        short = min(AHEAD_BYTES // arena.block_bytes, self._pool.total // 4) - self._pool.free
        if short <= 0 or state == self._ahead_state or host.copied_blocks:
            return
        left = max(1, AHEAD_AT_ONCE_BYTES // arena.block_bytes)
        for names, blocks in prefixes.next_to_go(short):
            missing = [i for i, name in enumerate(names) if name not in host][-left:]
            host.keep([names[i] for i in missing], [blocks[i] for i in missing])
            left -= len(missing)
            if left <= 0:
                break
        else:
            self._ahead_state = state
        self._note_pinned()

    def _note_pinned(self) -> None:
        """Blocks that are read or written beside the steps stay where they are."""
        copied = 0 if self._host is None else self._host.copied_blocks
        self._arena.pinned = copied + sum(len(load.names) for load in self._loads)

    def _offer(self, sequence: KVSequence) -> None:
        """A sequence ends: what it has in the tree may be worth a place on disk."""
        if self._keeping is not None and not isinstance(sequence, Incoming):
            self._tell_speed()
            self._keeping.offer(sequence)

    def _rescue(self, count: int) -> None:
        """So many blocks are about to be evicted. If offered ones may be among them, some of those go to disk first."""
        if self._host is not None and self._host.usable:
            self._tell_speed()  # they go to the host's memory, and from there to disk
        elif self._keeping is not None and self._keeping.blocks > self._prefixes.evictable - count:
            self._keeping.rescue(self._time_to_keep(RESCUE_S, RESCUE_S))

    def _keep(self, budget_s: float) -> tuple[bool, float]:
        """Take in what came, hand over what was offered. Whether there is more of it, and what the budget leaves."""
        if not self._looks:
            return False, budget_s
        started = self._clock()
        self._say_whether_busy(len(self._arena.running) > self.loading)
        self._take_in()
        if self._host is not None:
            self._copy_ahead(self._host)
        more = False
        if self._keeping is not None:
            if self._tier is not None and self._tier.space is not None:
                running = self._arena.running.values()
                self._keeping.offer_standing(sequence for sequence in running if not isinstance(sequence, Incoming))
            busy = len(self._arena.running) > self.loading
            more = self._keeping.work(self._time_to_keep(budget_s * BUSY_SHARE, budget_s), in_bursts=busy)
        return more, max(0.0, budget_s - (self._clock() - started))

    def _time_to_keep(self, busy_s: float, idle_s: float) -> float:
        if len(self._arena.running) == self.loading:
            return idle_s
        beside_steps = not self._bytes.reads_wait or (self._host is not None and self._host.usable)
        return busy_s if beside_steps else 0.0

    def _disk_due_at(self) -> float | None:
        copied = any(isinstance(load.ticket, Moved) for load in self._loads)
        moments = (
            super()._disk_due_at(),
            None if self._keeping is None else self._keeping.due_at(),
            self._clock() + HOST_LOOK_S if copied else None,
        )
        return min((moment for moment in moments if moment is not None), default=None)

    def wind_up(self, seconds: float) -> None:
        self._say_whether_busy(False)
        if self._keeping is not None:
            self._keeping.drain(seconds)
        self._end_loads(seconds)

    def _forget_loads(self) -> None:
        """The memory that they were for is gone; the reader has what it writes to until it is done."""
        for load in self._loads:
            load.cancel()
            load.end()
        self._loads = []
        if self._host is not None:
            self._host.restart()
        self._note_pinned()
        if self._keeping is not None:
            self._keeping.clear()

    # -- looking -----------------------------------------------------------------------------------------------

    def _host_numbers(self) -> HostNumbers:
        return HostNumbers() if self._host is None else self._host.numbers()

    def _host_details(self) -> dict[str, Any] | None:
        return None if self._host is None else self._host.details()

    def _check_host(self) -> None:
        if self._host is not None:
            self._host.check()

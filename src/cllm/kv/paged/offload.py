"""The paged manager and the tiers below its arena: host memory beside a GPU, and disk.

Loads bring blocks back for waiting sequences. Evicted blocks are copied to host memory, if there is a host tier. What
is worth it is written to disk, from host memory or from the arena.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from cllm.errors import BackendError, describe
from cllm.kv.ops import BlockBytes
from cllm.kv.paged.block_table import BlockAllocation, BlockMatch
from cllm.kv.paged.disk_offload import RESCUE_S, DiskOffloader
from cllm.kv.paged.operations import PagedOperations
from cllm.kv.sequence import KVSequence
from cllm.kv.tiers.disk_tier import DiskTier
from cllm.kv.tiers.host_tier import HostTier, HostTransfer
from cllm.kv.tiers.loads import NO_LOAD, Load, LoadingSequence, Transfer
from cllm.kv.tiers.manager import TieredKVManager
from cllm.kv.usage import HostNumbers

BUSY_SHARE = 0.2
"""The share of the upkeep budget for offloading while something runs: the writing then competes with steps."""

HOST_LOOK_S = 0.0005
"""While idle, how often copies that a sequence waits for are polled."""

AHEAD_BYTES = 1 << 30
"""How much is copied to host memory ahead of its eviction, so that nobody waits for it; at most a quarter of the
arena."""

AHEAD_AT_ONCE_BYTES = 64 << 20
"""Most of that between two steps."""


class PagedOffload(PagedOperations, TieredKVManager):
    _offloader: DiskOffloader | None = None
    _host: HostTier | None = None
    _ahead_state = (-1, -1, -1)
    """The arena's state when everything due for eviction was copied."""

    @abstractmethod
    def _room_for(self, sequence: KVSequence, found: BlockMatch) -> bool: ...

    @abstractmethod
    def _begin(self, sequence: KVSequence, held: BlockAllocation) -> BlockAllocation: ...

    def use_disk(self, tier: DiskTier) -> None:
        super().use_disk(tier)
        self._offloader = DiskOffloader(self._arena, tier, self._clock)
        self._offloader.host = self._host

    def use_host(self, host: HostTier) -> None:
        """From now on keep evicted blocks in host memory, and find them there."""
        self._host = host
        self._arena.keep_leaving(self._keep_on_host)
        if self._offloader is not None:
            self._offloader.host = host

    @cached_property
    def _bytes(self) -> BlockBytes:
        """Asked for in every step, and comparing with a protocol takes as long as planning one."""
        ops = self._arena.ops
        assert isinstance(ops, BlockBytes)
        return ops

    # -- loading -----------------------------------------------------------------------------------------------

    @property
    def _has_tiers(self) -> bool:
        return self._disk is not None or self._host is not None

    def _share_token_time(self) -> None:
        super()._share_token_time()
        if self._host is not None:
            self._host.token_s = self.token_s

    def _collect_loads(self) -> None:
        if self._host is not None:
            self._host.settle()
            self._count_busy_blocks()
        super()._collect_loads()

    def _find_load(self, sequence: KVSequence) -> Load | None:
        host, tier = self._host, self._disk
        came, model_store = sequence.load, None if tier is None else tier.model_store
        if host is not None and (not len(host) or (isinstance(came, Load) and came.requester is sequence)):
            host = None  # what it had has been loaded
        if host is None and model_store is None:
            return NO_LOAD if tier is None else None
        found = self._prefixes.find(sequence.prefix.tobytes(), sequence.space)
        cached, whole = found.matched // self._prefixes.tree.unit_bytes, (len(sequence.prefix) - 1) // self.block_size
        least = min(each.least_blocks for each in (host, tier) if each is not None)
        if whole - cached < least:
            return NO_LOAD
        if not self._room_for(sequence, found):
            return None
        load = NO_LOAD if host is None else self._find_on_host(host, sequence, found, whole)
        if load is None:  # `found` is out of date
            load, found = NO_LOAD, self._prefixes.find(sequence.prefix.tobytes(), sequence.space)
        if load is NO_LOAD and tier is not None:
            return self._find_on_disk(tier, sequence, found, whole)
        return load

    def _find_on_host(self, host: HostTier, sequence: KVSequence, found: BlockMatch, whole: int) -> Load | None:
        """None: the load failed to start, and `found` is out of date."""
        prefix, cached = sequence.prefix, found.matched // self._prefixes.tree.unit_bytes
        parent = self._prefixes.name_before(found, sequence.space)
        names = host.find(parent, prefix[cached * self.block_size : whole * self.block_size])
        if len(names) < host.least_blocks:
            return NO_LOAD
        for load in self._loads:
            if names[0] in load.names:
                return load
        wait_s = host.wait_limit(len(names))
        if wait_s is None:
            return NO_LOAD
        load = self._load(sequence, cached, names, wait_s)
        try:
            with host.busy(names):  # making room may evict other blocks to host memory
                self._begin_load(load, found, lambda blocks: host.load(names, blocks))
        except BackendError as error:
            host.fault("loading blocks from host memory", error)
            return None
        return load

    def _find_on_disk(self, tier: DiskTier, sequence: KVSequence, found: BlockMatch, whole: int) -> Load | None:
        model_store = tier.model_store
        if model_store is None:
            return None
        size, prefix = self.block_size, sequence.prefix
        cached = found.matched // self._prefixes.tree.unit_bytes
        next_block = (cached + 1) * size
        first = tier.names(model_store, sequence.space, prefix[:next_block])[-1]
        for load in self._loads:
            if first in load.names:
                return load
        if not model_store.held([first]):  # most prompts are not on disk: skip naming the rest
            return NO_LOAD
        names = [first, *tier.next_names(first, prefix[next_block : whole * size])]
        names = names[: model_store.held(names)]
        wait_s = tier.wait_limit(len(names), len(names) * tier.block_bytes)
        if wait_s is None:
            return NO_LOAD
        load = self._load(sequence, cached, names, wait_s)

        def begin(blocks: list[int]) -> Transfer:
            load.buffers = self._bytes.landing(blocks)
            return model_store.load(names, load.buffers, lambda _: tier.notify())

        try:
            self._begin_load(load, found, begin)
        except Exception as error:
            tier.fault("loading blocks from disk", error)
            return NO_LOAD
        return load

    def _load(self, sequence: KVSequence, cached: int, names: Sequence[bytes], wait_s: float) -> Load:
        holder = LoadingSequence(sequence.prefix[: (cached + len(names)) * self.block_size], space=sequence.space)
        return Load(sequence, holder, first=cached, names=names, deadline=self._clock() + wait_s)

    def _begin_load(self, load: Load, found: BlockMatch, begin: Callable[[list[int]], Transfer]) -> None:
        """Allocate blocks for a load, which are known to be available, and start it. On failure nothing has changed."""
        holder = load.holder
        assert holder is not None
        node, blocks = self._prefixes.enter(found)
        held = self._begin(holder, BlockAllocation(node, load.first))
        count = len(load.names)
        self._make_room(count)
        own = self._taken(self._pool.allocate(count, held.number, blocks[-1] if blocks else -1))
        holder.blocks = blocks + own
        holder.room = len(holder.blocks) * self.block_size
        holder.num_computed = load.first * self.block_size
        try:
            load.transfer = begin(own)
        except Exception:
            self._release_load(holder, keep=False)
            raise
        self._loads.append(load)
        self._count_busy_blocks()

    def _finish_load(self, load: Load) -> None:
        holder, transfer = load.holder, load.transfer
        assert holder is not None and transfer is not None
        self._count_busy_blocks()
        try:
            if isinstance(transfer, HostTransfer):
                loaded = self._finish_from_host(transfer)
                load.more = loaded == len(load.names)
            else:
                loaded = self._finish_from_disk(transfer.loaded, holder.blocks[load.first :], load)
        finally:
            load.end()
        holder.num_computed += loaded * self.block_size
        self._release_load(holder, keep=True)

    def _finish_from_host(self, moved: HostTransfer) -> int:
        host, loaded = self._host, moved.loaded
        assert host is not None
        if loaded:
            host.land(moved)
        host.note_load(loaded * self.block_size, len(moved.blocks) * self.block_size)
        self._notify_arrival()  # nobody else does
        return loaded

    def _finish_from_disk(self, loaded: int, own: list[int], load: Load) -> int:
        tier = self._disk
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

    def _release_load(self, holder: LoadingSequence, *, keep: bool) -> None:
        """Release a load's memory. Nothing else knows of it: if that fails, all memory is in doubt."""
        try:
            self.release(holder, keep=keep)
        except Exception as error:
            raise BackendError(f"releasing loaded blocks failed: {describe(error)}", fatal=True) from error

    # -- offloading --------------------------------------------------------------------------------------------

    def _keep_on_host(self, names: list[bytes], blocks: list[int]) -> None:
        """Copy evicted blocks to host memory before they are reused."""
        if self._host is not None:
            self._host.keep(names, blocks)
            self._count_busy_blocks()

    def _reuse(self, blocks: list[int]) -> None:
        if self._host is not None:
            self._host.reuse(blocks)

    def _copy_ahead(self, host: HostTier) -> None:
        """Copy some of the next blocks to be evicted, so that they can be reused at once when needed."""
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
        self._count_busy_blocks()

    def _count_busy_blocks(self) -> None:
        """Blocks being read or written in the background must not move."""
        copied = 0 if self._host is None else self._host.copied_blocks
        self._arena.pinned = copied + sum(len(load.names) for load in self._loads)

    def _offer(self, sequence: KVSequence) -> None:
        """A sequence ends: its prefix may be worth writing to disk."""
        if self._offloader is not None and not isinstance(sequence, LoadingSequence):
            self._share_token_time()
            self._offloader.offer(sequence)

    def _rescue(self, count: int) -> None:
        """`count` blocks are about to be evicted. If candidates may be among them, write some of those first."""
        if self._host is not None and self._host.usable:
            self._share_token_time()  # they go to host memory, and from there to disk
        elif self._offloader is not None and self._offloader.blocks > self._prefixes.evictable - count:
            self._offloader.rescue(self._time_to_keep(RESCUE_S, RESCUE_S))

    def _keep(self, budget_s: float) -> tuple[bool, float]:
        """Finish loads that have arrived and offload candidates. Whether there is more to do, and the budget left."""
        if not self._has_tiers:
            return False, budget_s
        started = self._clock()
        self._throttle_writes(len(self._arena.running) > self.loading)
        self._collect_loads()
        if self._host is not None:
            self._copy_ahead(self._host)
        more = False
        if self._offloader is not None:
            if self._disk is not None and self._disk.model_store is not None:
                running = self._arena.running.values()
                self._offloader.offer_standing(
                    sequence for sequence in running if not isinstance(sequence, LoadingSequence)
                )
            busy = len(self._arena.running) > self.loading
            more = self._offloader.work(self._time_to_keep(budget_s * BUSY_SHARE, budget_s), in_bursts=busy)
        return more, max(0.0, budget_s - (self._clock() - started))

    def _time_to_keep(self, busy_s: float, idle_s: float) -> float:
        if len(self._arena.running) == self.loading:
            return idle_s
        beside_steps = not self._bytes.reads_wait or (self._host is not None and self._host.usable)
        return busy_s if beside_steps else 0.0

    def _disk_due_at(self) -> float | None:
        copied = any(isinstance(load.transfer, HostTransfer) for load in self._loads)
        moments = (
            super()._disk_due_at(),
            None if self._offloader is None else self._offloader.due_at(),
            self._clock() + HOST_LOOK_S if copied else None,
        )
        return min((moment for moment in moments if moment is not None), default=None)

    def drain(self, seconds: float) -> None:
        self._throttle_writes(False)
        if self._offloader is not None:
            self._offloader.drain(seconds)
        self._end_loads(seconds)

    def _forget_loads(self) -> None:
        """The memory they were for is gone; the reader keeps its buffers until it is done."""
        for load in self._loads:
            load.cancel()
            load.end()
        self._loads = []
        if self._host is not None:
            self._host.restart()
        self._count_busy_blocks()
        if self._offloader is not None:
            self._offloader.clear()

    # -- reporting ---------------------------------------------------------------------------------------------

    def _host_numbers(self) -> HostNumbers:
        return HostNumbers() if self._host is None else self._host.numbers()

    def _host_details(self) -> dict[str, Any] | None:
        return None if self._host is None else self._host.details()

    def _check_host(self) -> None:
        if self._host is not None:
            self._host.check()

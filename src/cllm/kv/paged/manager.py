"""The paged manager: block tables over one arena, prefixes shared through a radix tree, copy on write.

    sequence A   blocks [7, 3, 9, 4]         7 and 3 hold tokens that A and B share: they are in the tree, once
    sequence B   blocks [7, 3, 5]            9, 4, 5 are private until they are full, then they join the tree

A block is held by the tree, or privately by one table, or (the last, partial block of forked sequences) by several.
The manager owns the parts and hands each what it needs:

    arena      pool, tree and running sequences          room     takes and evicts blocks
    tables     admission, growth, forks                  edits    removes ranges, truncates
    pins       protect prefixes                          upkeep   works between steps and while idle
    loads      bring blocks back from the tiers          offload  keeps there what leaves the arena
    resizer    follows the ledger, with several models
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from cllm.kv.events import Listener
from cllm.kv.ledger import Account
from cllm.kv.manager import KVManager
from cllm.kv.ops import BlockGeometry, BlockOps
from cllm.kv.paged.arena import Arena
from cllm.kv.paged.block_table import allocation_of
from cllm.kv.paged.checks import examine_tables
from cllm.kv.paged.edits import BlockEdits
from cllm.kv.paged.fragmentation import extents_needed, measure
from cllm.kv.paged.loads import BlockLoads
from cllm.kv.paged.local import LocalShape, tokens_within
from cllm.kv.paged.offload import BlockOffload
from cllm.kv.paged.pins import BlockPins
from cllm.kv.paged.resizing import ArenaResizer, extent_size
from cllm.kv.paged.room import Room
from cllm.kv.paged.tables import BlockTables
from cllm.kv.paged.upkeep import EVICT_AT_ONCE, LOOK_INTERVAL_S, Upkeep, UpkeepSettings
from cllm.kv.paged.view import paged_view
from cllm.kv.pins import LostPin, PinMark
from cllm.kv.sequence import KVSequence
from cllm.kv.tiers.disk_tier import DiskTier
from cllm.kv.tiers.host_tier import HostTier
from cllm.kv.tiers.tiers import Tiers
from cllm.kv.usage import GroupUsage, KVUsage
from cllm.kv.view import KVView


class PagedKVManager(KVManager):
    def __init__(
        self,
        ops: BlockOps,
        geometry: BlockGeometry,
        local: LocalShape | None = None,
        *,
        bytes_per_token: int,
        max_sequences: int | None = None,
        eviction_threshold: float = 1.0,
        eviction_policy: str = "lru",
        watermark: float = 0.0,
        pin_limit: float = 0.25,
        placement: str = "runs",
        extent_blocks: int | None = None,
        upkeep: UpkeepSettings | None = None,
        account: Account | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bytes_per_token`: of what takes one block; `local` is for layers beside that.

        `account`: with several models, how much of the arena may be used; the geometry is the maximum."""
        self.unit_tokens = geometry.block_size
        self.commits_each_step = local is not None and local.state > 0
        self.max_tokens = geometry.tokens if local is None else tokens_within(geometry, local)
        block_bytes = bytes_per_token * geometry.block_size
        if account is not None and extent_blocks is None:
            extent_blocks = extent_size(geometry.blocks, block_bytes)
        self.arena = Arena(
            ops,
            geometry,
            local,
            block_bytes=block_bytes,
            policy=eviction_policy,
            apart=placement == "runs",
            extent=extent_blocks,
        )
        self.tiers = Tiers(clock, self._notify_arrival)
        self.offload = BlockOffload(self.arena, self.tiers, clock)
        self.room = Room(
            self.arena,
            self.offload,
            threshold=int(geometry.blocks * eviction_threshold),
            max_sequences=max_sequences,
            told=self._tell_eviction,
            clock=clock,
        )
        self.upkeep = Upkeep(self.arena, upkeep or UpkeepSettings(), evict=self.room.evict, clock=clock)
        self.pins = BlockPins(self.arena, self.room, int(geometry.blocks * pin_limit) * block_bytes, clock)
        self.resizer: ArenaResizer | None = None
        if account is not None:
            self.resizer = ArenaResizer(
                self.arena,
                account,
                evict=self.room.evict,
                release=self.upkeep.release,
                unpin=self.pins.all.give_way,
            )
        self.tables = BlockTables(self.arena, self.room, self.pins, self.upkeep, self.resizer, watermark=watermark)
        self.edits = BlockEdits(self.arena, self.room, self.pins, self.tables.local)
        self.loads = BlockLoads(self.arena, self.tiers, self.tables, self.offload, clock)
        self._clock = clock
        self._queried = self._hit = self._known = 0
        self._start_empty()

    def _start_empty(self) -> None:
        self.arena.clear()
        self.pins.all.forget()
        self.room.restart()
        self.upkeep.restart()
        if self.resizer is not None:
            self.resizer.restart()
        self._measured = measure(self.arena.pool, ())
        self._measured_at = self._clock()

    def use_disk(self, tier: DiskTier) -> None:
        """From now on keep K/V on disk, and find them there."""
        self.tiers.use_disk(tier)

    def use_host(self, host: HostTier) -> None:
        """From now on keep evicted blocks in host memory, and find them there."""
        self.tiers.host = host

    # -- admission ---------------------------------------------------------------------------------------------

    def peek(self, key: bytes, space: bytes = b"") -> int:
        _, start = self.tables.entrance(self.arena.prefixes.find_full(key, space), space)
        return start * self.unit_tokens

    def fetch(self, sequence: KVSequence) -> bool:
        if not self.tiers:
            return False
        self.tiers.know_speed(self.token_s)
        return self.loads.fetch(sequence)

    @property
    def loading(self) -> int:
        return len(self.loads.queue)

    @property
    def awaits_memory(self) -> bool:
        return self.tables.awaits_memory

    def nobody_waits(self) -> None:
        self.tables.awaits_memory = False

    def admit(self, sequence: KVSequence) -> int | None:
        if not self.tables.admit(sequence):
            return None
        if sequence.counts_as_query:
            self._queried += len(sequence.tokens)
            self._hit += sequence.num_computed
            self._known += sequence.known
        return sequence.num_computed

    def grow(self, sequence: KVSequence, count: int) -> bool:
        end = sequence.num_computed - sequence.dropped  # hundreds of sequences ask in every step
        return end + count <= sequence.room or self.tables.grow(sequence, count)

    def grow_within_free(self, sequence: KVSequence, count: int) -> int:
        count = self.tables.most_within_free(sequence, count)
        return count if count > 0 and self.grow(sequence, count) else 0

    def meet(self, running: KVSequence, waiting: KVSequence) -> None:
        self.tables.meet(running, waiting)

    def fork(self, parent: KVSequence, child: KVSequence) -> bool:
        return self.tables.fork(parent, child)

    # -- after a step ------------------------------------------------------------------------------------------

    def commit(self, sequence: KVSequence) -> None:
        if sequence.state is not None:
            self.tables.count_state(sequence)
        if sequence.num_computed // self.unit_tokens > allocation_of(sequence).indexed:
            self.arena.commit(sequence)
            if sequence.in_parts:
                self.tables.keep_windows(sequence)
        elif sequence.rebuilt:
            self.tables.keep_windows(sequence)

    def release(self, sequence: KVSequence, *, keep: bool = True) -> None:
        if keep:
            self._commit_all(sequence)
            self.offload.to_disk.offer(sequence)
        self.tables.end(sequence)

    def _commit_all(self, sequence: KVSequence) -> None:
        """It is about to end."""
        self.commit(sequence)
        self.tables.keep_last_window(sequence)

    # -- pins, events, ranges ----------------------------------------------------------------------------------

    def pin(self, sequence: KVSequence, mark: PinMark) -> None:
        self._commit_all(sequence)  # others may go on from there, and so may the pin
        self.pins.pin(sequence, mark)

    def unpin(self, name: str, space: bytes | None = None) -> bool:
        return self.pins.unpin(name, space)

    def lost_pins(self) -> list[LostPin]:
        return self.pins.all.lost()

    def held_names(self) -> tuple[int, set[bytes]]:
        nodes = self.arena.prefixes.tree.nodes()
        return self.arena.events.number, {name for node in nodes for name in node.names}

    def listen(self) -> Listener:
        return self.arena.events.listen()

    def remove_range(self, sequence: KVSequence, start: int, end: int) -> bool:
        return self.edits.remove_range(sequence, start, end)

    def shift(self, sequence: KVSequence, start: int, delta: int) -> None:
        self.edits.shift(sequence, start, delta)

    def truncate(self, sequence: KVSequence, length: int) -> int:
        return self.edits.truncate(sequence, length)

    # -- upkeep ------------------------------------------------------------------------------------------------

    def maintain(self, budget_s: float) -> bool:
        self.pins.all.expire()
        started, left_s, offloading = self._clock(), budget_s, False
        if self.tiers:
            self.tiers.know_speed(self.token_s)
            self.loads.collect()  # a sequence woken by an arrival must not find another reason to wait
        if self.resizer is not None and self.resizer.tend(somebody_waits=self.awaits_memory):
            return True
        if self.tiers:
            offloading = self.offload.work(budget_s)
            left_s = max(0.0, budget_s - (self._clock() - started))
        more = self.room.evict_ahead(EVICT_AT_ONCE)
        self.room.limit_sequences()
        if more:
            return True
        more = self.upkeep.work(left_s)
        if left_s > 0:
            self._look(idle=not (self.arena.running or more))
        return more or offloading

    def _look(self, *, idle: bool) -> None:
        """Measure fragmentation, and what the OS says about memory."""
        now, running = self._clock(), self.arena.running
        if idle or now - self._measured_at >= LOOK_INTERVAL_S:
            self._measured = measure(self.arena.pool, running.values())
            self._measured_at = now
            if not running:
                self.upkeep.look(now)

    def upkeep_at(self) -> float | None:
        moments = (
            self.upkeep.due_at(),
            self.tiers.look_at(),
            self.loads.due_at(),
            self.offload.to_disk.due_at(),
            self.pins.all.next_at,
        )
        return min((moment for moment in moments if moment is not None), default=None)

    def drain(self, seconds: float) -> None:
        self.tiers.throttle_writes(False)
        self.offload.to_disk.drain(seconds)
        self.loads.end(seconds)

    def reset(self) -> None:
        self.loads.forget()
        self.offload.restart()
        for sequence in self.arena.running.values():
            sequence.forget_memory()
        self._start_empty()

    def usage(self) -> KVUsage:
        arena, upkeep, measured = self.arena, self.upkeep, self._measured
        pool, prefixes, extents = arena.pool, arena.prefixes, arena.pool.extents
        return KVUsage(
            layout="paged",
            unit_tokens=self.unit_tokens,
            bytes_per_unit=arena.block_bytes,
            total=pool.total,
            free=pool.free,
            evictable=arena.evictable,
            referenced=arena.referenced,
            peak=self.room.peak,
            sequences_running=len(arena.running) - self.loading,
            sequences_held=prefixes.held + len(self.pins.all),
            free_segments=measured.free_runs,
            largest_free_span=measured.largest_free_run,
            evictions=self.room.evictions,
            allocation_failures=self.allocation_failures,
            compactions=upkeep.compactions,
            moved_bytes=self.moved_bytes,
            query_tokens=self._queried,
            hit_tokens=self._hit,
            known_tokens=self._known,
            extents_used=extents.occupied,
            extents_needed=extents_needed(pool),
            extents_ready=extents.ready_count(),
            extents_fresh=extents.open - extents.taken_count,
            extent_bytes=arena.extent_bytes,
            contiguity=measured.contiguity,
            resident_bytes=upkeep.resident_bytes,
            released_bytes=upkeep.released_bytes,
            prepared_bytes=upkeep.prepared_bytes,
            upkeep_failures=upkeep.failures,
            disk=self.tiers.disk_numbers(self.loading),
            host=self.tiers.host_numbers(),
            pins=len(self.pins.all),
            pinned=prefixes.pinned,
            pins_refused=self.pins.all.refused,
            groups=self._groups(),
            snapshots=0 if arena.local is None else len(arena.local.policy),
            snapshots_taken=arena.snapshots.taken,
            snapshots_used=arena.snapshots.used,
            snapshots_dropped=arena.snapshots.dropped,
            windows_rebuilt=arena.snapshots.rebuilt,
            blocks_stored=arena.events.blocks_stored,
            blocks_removed=arena.events.blocks_removed,
        )

    @property
    def moved_bytes(self) -> int:
        return self.arena.copied_bytes + self.upkeep.compactor.moved_blocks * self.arena.block_bytes

    def details(self) -> dict[str, Any]:
        return {
            "block_size": self.unit_tokens,
            "running": [
                {
                    "tokens": len(s.tokens),
                    "computed": s.num_computed,
                    "dropped": s.dropped,
                    "blocks": len(s.blocks),
                    "shared": allocation_of(s).indexed,
                }
                for s in self.arena.running.values()
            ],
            "prefix_nodes_evictable": len(self.arena.prefixes.policy),
            "upkeep": self.upkeep.details(),
            "host": self.tiers.host_details(),
            "disk": self.tiers.disk_details(self.loading),
            "pins": self.pins.details(),
        }

    def _groups(self) -> tuple[GroupUsage, ...]:
        arena, local = self.arena, self.arena.local
        if local is None:
            return (GroupUsage("full", arena.block_bytes, arena.referenced, arena.evictable),)
        kinds = local.kinds
        others = [
            GroupUsage(kind.kind, kind.cells * arena.block_bytes, kind.all - kind.evictable, kind.evictable)
            for kind in kinds
        ]
        used = arena.referenced - sum(kind.cells * (kind.all - kind.evictable) for kind in kinds)
        return GroupUsage("full", arena.block_bytes, used, arena.evictable - local.evictable), *others

    def view(self) -> KVView:
        return paged_view(self.arena)

    def examine(self) -> Iterator[int]:
        yield from examine_tables(self.arena, self.pins.uses())
        if self.tiers.host is not None:
            self.tiers.host.check()

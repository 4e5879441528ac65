"""The paged manager: block tables over one arena, prefixes shared through a radix tree, copy on write.

    sequence A   blocks [7, 3, 9, 4]         7 and 3 hold tokens that A and B share: they are in the tree, once
    sequence B   blocks [7, 3, 5]            9, 4, 5 are private until they are full, then they join the tree

A block is held by the tree, or privately by one table, or (the last, partial block of forked sequences) by several.
What the arena does between steps and while idle is in `upkeep.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from cllm.kv.ledger import Account
from cllm.kv.ops import BlockGeometry, BlockOps
from cllm.kv.paged.arena import Arena
from cllm.kv.paged.block_table import BlockAllocation, BlockMatch, allocation_of, own_blocks
from cllm.kv.paged.checks import check_table, examine_tables
from cllm.kv.paged.fragmentation import extents_needed, measure
from cllm.kv.paged.offload import PagedOffload
from cllm.kv.paged.pins import PagedPins
from cllm.kv.paged.resizing import ArenaResizer, extent_size
from cllm.kv.paged.upkeep import EVICT_AT_ONCE, LOOK_INTERVAL_S, Upkeep, UpkeepSettings
from cllm.kv.paged.view import paged_view
from cllm.kv.pins import Pins
from cllm.kv.radix import TOKEN_BYTES
from cllm.kv.sequence import KVSequence
from cllm.kv.usage import KVUsage
from cllm.kv.view import KVView


class PagedKVManager(PagedPins, PagedOffload):
    verifies = False

    def __init__(
        self,
        ops: BlockOps,
        geometry: BlockGeometry,
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
        """`account`: with several models, how much of the arena may be used; the geometry is the maximum."""
        self.block_size = self.unit_tokens = geometry.block_size
        self.max_tokens = geometry.tokens
        block_bytes = bytes_per_token * geometry.block_size
        if account is not None and extent_blocks is None:
            extent_blocks = extent_size(geometry.blocks, block_bytes)
        self._arena = Arena(
            ops,
            geometry,
            block_bytes=block_bytes,
            policy=eviction_policy,
            apart=placement == "runs",
            extent=extent_blocks,
        )
        self._upkeep = Upkeep(self._arena, upkeep or UpkeepSettings(), evict=self._evict, clock=clock)
        self._resizer: ArenaResizer | None = None
        if account is not None:
            self._resizer = ArenaResizer(
                self._arena,
                account,
                evict=self._evict,
                release=self._upkeep.release,
                unpin=lambda: self._pins.give_way(),
            )
        self._max_sequences = max_sequences
        self._threshold_blocks = int(geometry.blocks * eviction_threshold)
        self._watermark = watermark
        self._clock = clock
        self._evictions = self._queried = self._hit = 0
        self._copied_bytes = 0
        self._loads = []
        limit_bytes = int(geometry.blocks * pin_limit) * self._arena.block_bytes
        self._pins = Pins(limit_bytes, clock, self._drop_pin, self._held_by_pins)
        self._start_empty()

    def _start_empty(self) -> None:
        arena = self._arena
        arena.clear()
        self._pins.forget()
        self._upkeep.restart()
        if self._resizer is not None:
            self._resizer.restart()
        self._pool, self._prefixes, self._running = arena.pool, arena.prefixes, arena.running
        self._peak = 0
        self._measured = measure(self._pool, ())
        self._measured_at = self._clock()

    # -- admission ---------------------------------------------------------------------------------------------

    def peek(self, key: bytes, space: bytes = b"") -> int:
        return self._prefixes.find(key, space).matched // TOKEN_BYTES

    def admit(self, sequence: KVSequence) -> int | None:
        prefixes = self._prefixes
        found = prefixes.find(sequence.prefix.tobytes(), sequence.space)
        while not self._room_for(sequence, found):
            waits = self._resizer is not None and self._resizer.expects_more
            if waits or not self._pins_give_way(running=0):
                return None
        cached_blocks = found.matched // prefixes.tree.unit_bytes
        needed = self._blocks_for(sequence.needed) - cached_blocks
        node, blocks = prefixes.enter(found)
        held = self._begin(sequence, BlockAllocation(node, cached_blocks))
        self._make_room(needed)
        blocks += self._taken(self._pool.allocate(needed, held.number, blocks[-1] if blocks else -1))
        sequence.blocks = blocks
        sequence.room = len(blocks) * self.block_size
        sequence.num_computed = cached_blocks * self.block_size
        if sequence.counts_as_query:
            self._queried += len(sequence.tokens)
            self._hit += sequence.num_computed
        return sequence.num_computed

    def _room_for(self, sequence: KVSequence, found: BlockMatch) -> bool:
        if self._all_run:
            return False
        needed = self._blocks_for(sequence.needed) - found.matched // self._prefixes.tree.unit_bytes
        # The watermark reserves room for running sequences to grow; it does not apply when nothing runs.
        wanted = needed + (int(self._pool.total * self._watermark) if self._running else 0)
        unused = self._prefixes.unused_blocks(found)
        if self._resizer is not None and self._better_waits(wanted, unused):
            return False
        return wanted <= self._available() - unused

    def _begin(self, sequence: KVSequence, held: BlockAllocation) -> BlockAllocation:
        sequence.allocation = held
        held.number = self._arena.holders.assign(sequence)
        self._running[held.number] = sequence
        self._limit_sequences()
        self._upkeep.note_activity()
        return held

    def arrange(self) -> None:
        """Nothing to do: steps take blocks in any order."""

    def grow(self, sequence: KVSequence, count: int) -> bool:
        end = sequence.num_computed - sequence.dropped
        if end + count <= sequence.room:
            return True
        blocks, held = sequence.blocks, allocation_of(sequence)
        missing = self._blocks_for(end + count) - len(blocks)
        last = end // self.block_size
        writes_shared = last < len(blocks) and last >= held.indexed and self._pool.is_shared(blocks[last])
        if missing <= 0 and not writes_shared:
            sequence.room = len(blocks) * self.block_size
            return True
        needed = max(missing, 0) + writes_shared
        if self._resizer is not None:
            self._resizer.want(needed)
        if needed > self._available():
            return False
        self._make_room(needed)
        own = self._taken(self._pool.extend(needed, held.number, blocks[-1] if blocks else -1))
        if writes_shared:
            self._copy_on_write(sequence, last, own)
        blocks += own
        sequence.room = len(blocks) * self.block_size
        return True

    def grow_within_free(self, sequence: KVSequence, count: int) -> int:
        unused = self._pool.free - (0 if self._resizer is None else self._resizer.pending)
        count = min(count, sequence.room - sequence.end + max(unused, 0) * self.block_size)
        return count if count > 0 and self.grow(sequence, count) else 0

    def _copy_on_write(self, sequence: KVSequence, index: int, own: list[int]) -> None:
        """Replace a shared block of the table by a private copy, made in the last of `own`."""
        shared = sequence.blocks[index]
        try:
            self._arena.ops.copy_blocks([(shared, own[-1])])
        except BaseException:
            self._pool.release(own)
            raise
        sequence.blocks[index] = own.pop()
        self._copied_bytes += self._arena.block_bytes
        self._leave([shared], sequence)

    def fork(self, parent: KVSequence, child: KVSequence) -> bool:
        if self._all_run:
            return False
        self.commit(parent)
        held = allocation_of(parent)
        child.blocks = parent.blocks[: self._blocks_for(parent.held)]
        for block in child.blocks[held.indexed :]:
            self._pool.share(block)
        self._prefixes.lock(held.node)
        child.num_computed = parent.num_computed
        child.dropped, child.kept = parent.dropped, parent.kept
        # Both would write to the same block next: the first to do so asks for a copy.
        child.room = parent.room = parent.end
        self._begin(child, BlockAllocation(held.node, held.indexed))
        return True

    # -- after a step ------------------------------------------------------------------------------------------

    def commit(self, sequence: KVSequence) -> None:
        full = sequence.num_computed // self.block_size
        if full > allocation_of(sequence).indexed and sequence.intact:
            self._prefixes.index(sequence, full)

    def verify(self, sequence: KVSequence) -> None:
        """Positions exist only in the block table; there is nothing to compare with."""

    def rewind(self, sequence: KVSequence) -> None:
        """Nothing to do: what was written lies in private blocks and will be overwritten."""

    def release(self, sequence: KVSequence, *, keep: bool = True) -> None:
        if keep:
            self.commit(sequence)
            self._offer(sequence)
        held = allocation_of(sequence)
        del self._running[held.number]
        self._leave(own_blocks(sequence), sequence)
        self._arena.holders.release(held.number)
        self._prefixes.unlock(held.node)
        self._upkeep.note_activity()
        sequence.forget_memory()

    def _leave(self, private: list[int], sequence: KVSequence) -> None:
        """A sequence gives up private blocks; those that forked sequences share pass to one of them."""
        self._pool.release(private)
        number, holders = allocation_of(sequence).number, self._pool.holders
        orphans = {block for block in private if holders[block] == number}
        for heir_number, heir in self._running.items():
            if not orphans:
                break
            if heir is not sequence:
                inherited = orphans.intersection(own_blocks(heir))
                self._pool.hand_over(list(inherited), heir_number)
                orphans -= inherited

    # -- upkeep ------------------------------------------------------------------------------------------------

    def maintain(self, budget_s: float) -> bool:
        self._pins.expire()
        self._collect_loads()  # a sequence woken by an arrival must not find another reason to wait
        if self._resizer is not None and self._resizer.tend(somebody_waits=self.awaits_memory):
            return True
        keeps, budget_s = self._keep(budget_s)
        excess = self._threshold_excess()
        if excess > 0:
            self._evict(min(excess, EVICT_AT_ONCE))
        self._limit_sequences()
        if self._threshold_excess() > 0:
            return True
        more = self._upkeep.work(budget_s)
        now = self._clock()
        if budget_s > 0 and (not (self._running or more) or now - self._measured_at >= LOOK_INTERVAL_S):
            self._measured = measure(self._pool, self._running.values())
            self._measured_at = now
            if not self._running:
                self._upkeep.look(now)
        return more or keeps

    def upkeep_at(self) -> float | None:
        moments = (self._upkeep.due_at(), self._disk_due_at(), self._pins.next_at)
        return min((moment for moment in moments if moment is not None), default=None)

    def reset(self) -> None:
        self._forget_loads()
        for sequence in self._running.values():
            sequence.forget_memory()
        self._start_empty()

    def usage(self) -> KVUsage:
        pool, upkeep, measured = self._pool, self._upkeep, self._measured
        extents = pool.extents
        return KVUsage(
            layout="paged",
            unit_tokens=self.block_size,
            bytes_per_unit=self._arena.block_bytes,
            total=pool.total,
            free=pool.free,
            evictable=self._prefixes.evictable,
            referenced=self._referenced(),
            peak=self._peak,
            sequences_running=len(self._running) - self.loading,
            sequences_held=self._prefixes.held + len(self._pins),
            free_segments=measured.free_runs,
            largest_free_span=measured.largest_free_run,
            evictions=self._evictions,
            allocation_failures=self.allocation_failures,
            compactions=upkeep.compactions,
            moved_bytes=self.moved_bytes,
            query_tokens=self._queried,
            hit_tokens=self._hit,
            extents_used=extents.occupied,
            extents_needed=extents_needed(pool),
            extents_ready=extents.ready_count(),
            extents_fresh=extents.open - extents.taken_count,
            extent_bytes=self._arena.extent_bytes,
            contiguity=measured.contiguity,
            resident_bytes=upkeep.resident_bytes,
            released_bytes=upkeep.released_bytes,
            prepared_bytes=upkeep.prepared_bytes,
            upkeep_failures=upkeep.failures,
            disk=self._disk_numbers(),
            host=self._host_numbers(),
            pins=len(self._pins),
            pinned=self._prefixes.pinned,
            pins_refused=self._pins.refused,
            blocks_stored=self._arena.events.blocks_stored,
            blocks_removed=self._arena.events.blocks_removed,
        )

    @property
    def moved_bytes(self) -> int:
        return self._copied_bytes + self._upkeep.compactor.moved_blocks * self._arena.block_bytes

    def details(self) -> dict[str, Any]:
        return {
            "block_size": self.block_size,
            "running": [
                {
                    "tokens": len(s.tokens),
                    "computed": s.num_computed,
                    "dropped": s.dropped,
                    "blocks": len(s.blocks),
                    "shared": allocation_of(s).indexed,
                }
                for s in self._running.values()
            ],
            "prefix_nodes_evictable": len(self._prefixes.policy),
            "upkeep": self._upkeep.details(),
            "host": self._host_details(),
            "disk": self._disk_details(),
            "pins": self._pin_details(),
        }

    def view(self) -> KVView:
        return paged_view(self._arena)

    def examine(self) -> Iterator[int]:
        yield from examine_tables(self._arena, self._pin_uses, self._check_table)
        self._check_host()

    # -- inside ------------------------------------------------------------------------------------------------

    def _check_table(self, sequence: KVSequence) -> None:
        check_table(self._arena, sequence)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _referenced(self) -> int:
        return self._pool.total - self._pool.free - self._prefixes.evictable

    def _threshold_excess(self) -> int:
        return min(self._prefixes.evictable, self._pool.total - self._pool.free - self._threshold_blocks)

    def _available(self) -> int:
        """Blocks that are free or can be evicted."""
        return self._pool.free + self._prefixes.evictable

    def _better_waits(self, count: int, unused: int) -> bool:
        """Whether a new sequence that needs `count` blocks, beside `unused` cached ones it found, should wait: for
        memory that other models are giving back, or because this model must give some back."""
        assert self._resizer is not None
        coming = self._resizer.want(count, unused)
        self.awaits_memory = self._resizer.may_grow
        return coming or count > self._available() - unused - self._resizer.pending

    @property
    def _all_run(self) -> bool:
        """Whether as many sequences run, or are being loaded, as there may be."""
        return self._max_sequences is not None and len(self._running) >= self._max_sequences

    def _limit_sequences(self) -> None:
        """Evict the oldest until there are no more sequences than there may be: a sequence came, or left a prefix."""
        prefixes = self._prefixes
        while self._max_sequences is not None and prefixes.held > max(0, self._max_sequences - len(self._running)):
            self._evict(len(prefixes.policy.peek().value))

    def _make_room(self, count: int) -> None:
        """Free `count` blocks, which are known to be available."""
        if count > self._pool.free:
            self._evict(count - self._pool.free)

    def _taken(self, blocks: list[int] | None) -> list[int]:
        """Account for blocks that were just allocated."""
        if blocks is None:
            raise AssertionError("blocks were available but could not be allocated")
        self._peak = max(self._peak, self._referenced())
        self._reuse(blocks)
        return blocks

    def _evict(self, count: int) -> None:
        """Free at least `count` evictable blocks, least recently used first."""
        self._rescue(count)
        started = self._clock()
        freed = self._prefixes.evict(count)
        self._evictions += freed
        if freed:
            self._tell_eviction(freed, self._clock() - started)

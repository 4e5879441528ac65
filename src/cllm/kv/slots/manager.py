"""The slots manager, for a backend that keeps whole sequences in numbered slots (llama.cpp, split streams).

Computed sequences are in one of two places:

    slots   0    1    2    3  …        where a sequence must be to run; a finished one stays until its slot is needed
          [run][run][held][free]
    store  ▒▒▒▒▒ ▒▒ ▒▒▒▒▒▒▒            sequences saved as bytes, as large as their tokens, in order of eviction

A new sequence takes its longest cached prefix from wherever it is: it continues in the slot that holds it, or the
prefix is copied from another slot (even a running one) or loaded from the store, and trimmed. Running slots are kept
adjacent, because the backend batches only adjacent slots.

A slot's memory is allocated in full, so only as many exist as are needed: more when all run and a sequence arrives,
fewer after a quiet time. The manager owns the parts and hands each what it needs:

    places     the slots, the store, their index         room     fills slots, evicts from the store
    loads      bring sequences back from disk            offload  writes what ends or leaves to disk
    resizer    changes the number of slots               states   where snapshots are taken, of layers with a state
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from cllm.errors import UnsupportedOperationError
from cllm.kv.events import Listener
from cllm.kv.manager import KVManager, PositionMismatchError
from cllm.kv.operations import check_removal, check_shift, check_truncation, close_hole, open_hole
from cllm.kv.ops import SlotGeometry, SlotOps
from cllm.kv.pins import LostPin, PinMark
from cllm.kv.radix import TOKEN_BYTES
from cllm.kv.sequence import KVSequence
from cllm.kv.sizing import most_bytes
from cllm.kv.slots.index import CacheEntry, describe, entry_of
from cllm.kv.slots.loads import SequenceLoads
from cllm.kv.slots.offload import SequenceOffload
from cllm.kv.slots.packing import MOST_PACKED
from cllm.kv.slots.pins import pin_sequence
from cllm.kv.slots.places import SlotPlaces
from cllm.kv.slots.resizing import SlotResizer
from cllm.kv.slots.room import SlotRoom
from cllm.kv.slots.sizes import SlotSizes, possible_sizes
from cllm.kv.slots.snapshots import Kept
from cllm.kv.slots.states import SlotStates
from cllm.kv.slots.view import number_of, slots_view
from cllm.kv.tiers.disk_tier import DiskTier
from cllm.kv.tiers.tiers import Tiers
from cllm.kv.usage import GroupUsage, KVUsage
from cllm.kv.view import KVView


class SlotKVManager(KVManager):
    verifies = True

    def __init__(
        self,
        ops: SlotOps,
        geometry: SlotGeometry,
        *,
        bytes_per_token: int,
        state_bytes: int = 0,
        store_bytes: int = 0,
        block_tokens: int = 16,
        max_sequences: int | None = None,
        eviction_threshold: float = 1.0,
        eviction_policy: str = "lru",
        pin_limit: float = 0.25,
        release_after_s: float | None = None,
        idle_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_tokens = geometry.slot_tokens
        self.places = SlotPlaces(
            ops,
            geometry,
            bytes_per_token=bytes_per_token,
            state_bytes=state_bytes,
            store_bytes=store_bytes,
            block_tokens=block_tokens,
            eviction_policy=eviction_policy,
            pin_limit=pin_limit,
            clock=clock,
        )
        self.tiers = Tiers(clock, self._notify_arrival)
        self.offload = SequenceOffload(self.places, self.tiers, clock)
        self.room = SlotRoom(self.places, self.offload, told=self._tell_eviction, clock=clock)
        self.loads = SequenceLoads(self.places, self.room, self.tiers, clock)
        whole = most_bytes(geometry.slot_tokens, bytes_per_token, state_bytes)
        movable = store_bytes // whole if geometry.at_start else 0
        sizes = SlotSizes(possible_sizes(geometry.slots, movable), release_after_s)
        self.resizer = SlotResizer(self.places, self.room, sizes, idle_bytes=idle_bytes, clock=clock)
        self._threshold_bytes = int(store_bytes * eviction_threshold)
        self._max_sequences = max_sequences
        self._clock = clock
        self._queried = self._hit = self._peak = self._moves = 0
        self.states = SlotStates(self.places, self.room) if ops.carries_state else None

    @property
    def longest_bytes(self) -> int:
        """What a sequence of full length takes on disk at most."""
        places = self.places
        snapshots = MOST_PACKED * places.state_bytes
        return most_bytes(self.max_tokens, places.bytes_per_token, places.state_bytes) + snapshots

    def use_disk(self, tier: DiskTier) -> None:
        """From now on keep K/V on disk, and find them there."""
        self.tiers.use_disk(tier)

    # -- admission ---------------------------------------------------------------------------------------------

    def peek(self, key: bytes, space: bytes = b"") -> int:
        return self.places.find(key[:-TOKEN_BYTES], space)[0]

    def fetch(self, sequence: KVSequence) -> bool:
        self.tiers.know_speed(self.token_s)
        return bool(self.tiers) and self.loads.queue.fetch(sequence)

    @property
    def loading(self) -> int:
        return len(self.loads.queue)

    def admit(self, sequence: KVSequence) -> int | None:
        places = self.places
        if len(places.running_slots()) == len(places.slots):
            self.resizer.take_more(self.demand)
        key = sequence.prefix.tobytes()[:-TOKEN_BYTES]
        cached, source = places.find(key, sequence.space)
        slot = self._choose_slot(source)
        if slot is None:
            return None
        known = places.index.find(key, sequence.space)[0] if self.states else 0
        kept: Kept = {}
        if source is None:
            self.room.vacate(slot)
        else:
            places.snapshots.share(source.snapshots, kept, cached)
            brought = False
            try:
                brought = self.room.bring(source, slot, cached, sequence.space)
            finally:
                if not brought:
                    cached = 0
                    places.snapshots.clear(kept)
        self._occupy(slot, sequence, cached, kept)
        if self.states:
            self.states.begin(sequence, known)
        if sequence.counts_as_query:
            self._queried += len(sequence.tokens)
            self._hit += cached
        return cached

    def _choose_slot(self, source: CacheEntry | None) -> int | None:
        """A slot next to the running ones, preferably the one that holds the prefix already."""
        candidates = self.places.adjacent_slots()
        if source is not None and source.slot in candidates:
            return source.slot
        free = (slot for slot in candidates if self.places.slots[slot] is None)
        return next(free, candidates[0] if candidates else None)

    def _occupy(self, slot: int, sequence: KVSequence, computed: int, kept: Kept) -> None:
        entry = CacheEntry(slot, sequence)
        entry.snapshots = kept
        self.places.slots[slot] = entry
        sequence.allocation = entry
        sequence.slot = slot
        sequence.room = self.max_tokens
        sequence.num_computed = computed
        self.places.index.extend(entry, sequence)
        self.resizer.note_running()

    def fork(self, parent: KVSequence, child: KVSequence) -> bool:
        """Only into existing slots: adding some would invalidate the logits of the step under way. A child that finds
        none is admitted before the next step."""
        slot = self._choose_slot(None)
        if slot is None:
            return False
        self.room.vacate(slot)
        if not self.places.copied(parent.slot, slot, parent.held):
            return False
        child.dropped, child.kept = parent.dropped, parent.kept
        kept: Kept = {}
        self.places.snapshots.share(entry_of(parent).snapshots, kept, parent.num_computed)
        self._occupy(slot, child, parent.num_computed, kept)
        child.state = parent.state
        return True

    def arrange(self) -> None:
        """Move running sequences from the end into gaps, so that the backend can batch them."""
        places = self.places
        running = places.running_slots()
        while running and running[-1] - running[0] + 1 > len(running):
            gap = next(number for number in range(running[0], running[-1]) if number not in running)
            entry = places.slots[running[-1]]
            assert entry is not None and entry.owner is not None and entry.slot is not None
            self.room.vacate(gap)
            if not places.copied(entry.slot, gap, entry.owner.held):
                return
            places.empty(entry.slot)
            places.slots[gap] = entry
            entry.slot = entry.owner.slot = gap
            self._moves += 1
            running = places.running_slots()

    def grow(self, sequence: KVSequence, count: int) -> bool:
        return sequence.end + count <= self.max_tokens

    def grow_within_free(self, sequence: KVSequence, count: int) -> int:
        return min(count, self.max_tokens - sequence.end)

    # -- after a step ------------------------------------------------------------------------------------------

    def commit(self, sequence: KVSequence) -> None:
        # Prompt chunks are indexed at once, for others to share; generated tokens when the sequence ends.
        entry = entry_of(sequence)
        if sequence.intact and sequence.num_computed - entry.length > 1:
            self.places.index.extend(entry, sequence)
        if sequence.marks and self.states:
            self.states.keep_due(sequence)

    def meet(self, running: KVSequence, waiting: KVSequence) -> None:
        if self.states:
            self.states.meet(running, waiting)

    def verify(self, sequence: KVSequence) -> None:
        held = self.places.ops.length(sequence.slot)
        if held != sequence.end:
            raise PositionMismatchError(
                f"slot {sequence.slot} holds {held} positions, but the sequence has {sequence.end}"
            )

    def rewind(self, sequence: KVSequence) -> None:
        if self.states:
            self.states.go_back(sequence, sequence.num_computed)
        else:
            self.places.ops.remove(sequence.slot, sequence.end)

    def release(self, sequence: KVSequence, *, keep: bool = True) -> None:
        places, entry = self.places, entry_of(sequence)
        if keep and sequence.num_computed and sequence.intact:
            places.index.extend(entry, sequence)
            sequence.forget_memory()
            entry.owner, entry.offered = None, False
            self.offload.note_end()
            places.discard_covered(entry, places.ops.shortest(entry.slot, moved=True) if entry.slot is not None else 0)
        else:
            sequence.forget_memory()
            places.discard(entry)
        self.resizer.note_running()

    # -- pins and events -----------------------------------------------------------------------------------------

    def pin(self, sequence: KVSequence, mark: PinMark) -> None:
        pin_sequence(self.places, self.room, sequence, mark)

    def unpin(self, name: str, space: bytes | None = None) -> bool:
        return self.places.pins.remove(name, space)

    def lost_pins(self) -> list[LostPin]:
        return self.places.pins.lost()

    def listen(self) -> Listener:
        return self.places.events.listen()

    def held_names(self) -> tuple[int, set[bytes]]:
        return self.places.events.number, set(self.places.index.names.counts)

    # -- operations on a sequence's memory -----------------------------------------------------------------------

    def remove_range(self, sequence: KVSequence, start: int, end: int) -> bool:
        check_removal(sequence, start, end)
        if self.states:
            raise UnsupportedOperationError(f"cannot remove positions [{start}, {end}): {self.places.ops.no_shift}")
        self.places.ops.remove(sequence.slot, start, end)
        open_hole(sequence, start, end)
        if (entry := entry_of(sequence)).length > start:
            self.places.index.cut_back(entry, sequence)
        return True

    def shift(self, sequence: KVSequence, start: int, delta: int) -> None:
        """The backend re-rotates the keys."""
        check_shift(sequence, start, delta)
        self.places.ops.shift(sequence.slot, start, None, delta)
        close_hole(sequence)

    def truncate(self, sequence: KVSequence, length: int) -> int:
        check_truncation(sequence, length)
        if self.states:
            return self.states.go_back(sequence, length)
        self.places.ops.remove(sequence.slot, length - sequence.dropped)
        sequence.num_computed = length
        if (entry := entry_of(sequence)).length > length:
            self.places.index.cut_back(entry, sequence)
        return length

    # -- upkeep ------------------------------------------------------------------------------------------------

    def maintain(self, budget_s: float) -> bool:
        """Reducing the number of slots cannot be interrupted and may exceed `budget_s`; it happens in quiet times."""
        places, more = self.places, False
        places.pins.expire()
        if self.tiers:
            self.tiers.know_speed(self.token_s)
            self.loads.queue.collect()
            more = self.offload.work(budget_s)
        self.room.make_room(0, self._threshold_bytes)
        if self._max_sequences is not None:
            occupied = sum(entry is not None for entry in places.slots)
            while len(places.store) and len(places.store) + occupied > self._max_sequences:
                self.room.evict(places.store.next_to_go())
        due = self.resizer.quiet_at()
        if due is not None and due <= self._clock():
            self.resizer.give_back()
        return more

    def upkeep_at(self) -> float | None:
        moments = (
            self.resizer.quiet_at(),
            self.tiers.look_at(),
            self.loads.queue.due_at(),
            self.offload.due_at(),
            self.places.pins.next_at,
        )
        return min((moment for moment in moments if moment is not None), default=None)

    def drain(self, seconds: float) -> None:
        if self.tiers:
            self.tiers.know_speed(self.token_s)
            self.offload.drain(seconds)
            self.loads.queue.end(seconds, self.tiers.flush)

    def reset(self) -> None:
        self.places.reset()
        self.resizer.note_running()

    def usage(self) -> KVUsage:
        places, resizer = self.places, self.resizer
        running = [entry.owner for entry in places.slots if entry is not None and entry.owner is not None]
        held, slots, geometry = places.held_in_slots(), len(places.slots), places.geometry
        used = len(running) + len(held)
        pinned = sum(pin.holder.length for pin in places.pins.by_id.values())
        referenced = sum(owner.held for owner in running) + pinned
        evictable = sum(entry.length for entry in held) + places.store.tokens
        total = geometry.tokens + places.store_bytes // places.bytes_per_token
        self._peak = max(self._peak, referenced)
        # Slots that are not allocated yet are free, too.
        state = "".join("." if entry is None else " " for entry in places.slots)
        free_runs = state.ljust(geometry.slots, ".").split()
        return KVUsage(
            layout="slots",
            unit_tokens=1,
            bytes_per_unit=places.bytes_per_token,
            total=total,
            free=total - evictable - referenced,
            evictable=evictable,
            referenced=referenced,
            peak=self._peak,
            sequences_running=len(running),
            sequences_held=len(held) + len(places.store) + len(places.pins),
            free_segments=len(free_runs),
            largest_free_span=max(map(len, free_runs), default=0) * geometry.slot_tokens,
            evictions=self.room.evictions,
            allocation_failures=self.allocation_failures,
            compactions=self._moves,
            moved_bytes=places.moved_bytes,
            query_tokens=self._queried,
            hit_tokens=self._hit,
            extents_used=used,
            extents_needed=used,
            extents_ready=slots - used,
            extents_fresh=geometry.slots - slots,
            extent_bytes=places.slot_bytes,
            resident_bytes=slots * places.slot_bytes + places.evictable_bytes + places.pinned_bytes,
            released_bytes=resizer.released_bytes,
            upkeep_failures=resizer.failed,
            slots=slots,
            context_rebuilds=resizer.resizes,
            disk=self.tiers.disk_numbers(self.loading),
            pins=len(places.pins),
            pinned=pinned,
            pins_refused=places.pins.refused,
            blocks_stored=places.events.blocks_stored,
            blocks_removed=places.events.blocks_removed,
            groups=self._groups(len(running)),
        )

    def _groups(self, running: int) -> tuple[GroupUsage, ...]:
        if self.states is None:
            return ()
        places = self.places
        held = len(places.held_in_slots()) + len(places.store) + len(places.pins) + len(places.snapshots)
        return (GroupUsage("state", places.state_bytes, running, held),)

    def details(self) -> dict[str, Any]:
        places = self.places
        return {
            "slots": [describe(entry) for entry in places.slots],
            "slots_now": len(places.slots),
            "slots_at_most": places.geometry.slots,
            "slot_tokens": places.geometry.slot_tokens,
            "slot_bytes": places.slot_bytes,
            "rebuilds": self.resizer.resizes,
            "moved_bytes": places.moved_bytes,
            "store": {
                "sequences": len(places.store),
                "tokens": places.store.tokens,
                "bytes": places.store.bytes,
                "coming_bytes": places.coming_bytes,
                "capacity_bytes": places.store_bytes,
            },
            **({} if self.states is None else {"states": self.states.details()}),
            "disk": self.tiers.disk_details(self.loading),
            "pins": places.pins.details(places.pinned_bytes, number_of),
        }

    def view(self) -> KVView:
        places = self.places
        saved = [*(pin.holder for pin in places.pins.by_id.values()), *places.store]
        return slots_view(places.slots, saved, places.geometry, places.bytes_per_token)

    def examine(self) -> Iterator[int]:
        yield from self.places.examine()

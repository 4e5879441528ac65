"""The slots manager, for a backend that keeps whole sequences in numbered slots (llama.cpp, split streams).

Computed sequences are in one of two places:

    slots   0    1    2    3  …        where a sequence must be to run; a finished one stays until its slot is needed
          [run][run][held][free]
    store  ▒▒▒▒▒ ▒▒ ▒▒▒▒▒▒▒            sequences saved as bytes, as large as their tokens, in order of eviction

A new sequence takes its longest cached prefix from wherever it is: it continues in the slot that holds it, or the
prefix is copied from another slot (even a running one) or loaded from the store, and trimmed. Running slots are kept
adjacent, because the backend batches only adjacent slots.

A slot's memory is allocated in full, so only as many exist as are needed: more when all run and a sequence arrives,
fewer after a quiet time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from cllm.kv.events import Listener
from cllm.kv.manager import PositionMismatchError
from cllm.kv.memory import most_bytes
from cllm.kv.operations import check_removal, check_shift, check_truncation, close_hole, open_hole
from cllm.kv.ops import SlotGeometry, SlotOps
from cllm.kv.pins import LostPin, PinMark, pinned_prefix
from cllm.kv.radix import TOKEN_BYTES
from cllm.kv.sequence import KVSequence
from cllm.kv.slots.index import CacheEntry, describe, entry_of
from cllm.kv.slots.memory import SAVE_TAIL_TOKENS
from cllm.kv.slots.offload import SlotOffload
from cllm.kv.slots.sizes import SlotSizes, possible_sizes
from cllm.kv.slots.view import number_of, slots_view
from cllm.kv.usage import KVUsage
from cllm.kv.view import KVView


class SlotKVManager(SlotOffload):
    def __init__(
        self,
        ops: SlotOps,
        geometry: SlotGeometry,
        *,
        bytes_per_token: int,
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
        super().__init__(
            ops,
            geometry,
            bytes_per_token=bytes_per_token,
            store_bytes=store_bytes,
            block_tokens=block_tokens,
            eviction_policy=eviction_policy,
            pin_limit=pin_limit,
            clock=clock,
        )
        movable = store_bytes // most_bytes(geometry.slot_tokens, bytes_per_token) if geometry.at_start else 0
        self._sizes = SlotSizes(possible_sizes(geometry.slots, movable), release_after_s)
        self._idle_bytes = idle_bytes
        self._threshold_bytes = int(store_bytes * eviction_threshold)
        self._max_sequences = max_sequences
        self._queried = self._hit = self._peak = 0

    # -- admission ---------------------------------------------------------------------------------------------

    def peek(self, key: bytes, space: bytes = b"") -> int:
        return self._index.find(key[:-TOKEN_BYTES], space)[0]

    def admit(self, sequence: KVSequence) -> int | None:
        if len(self._running_slots()) == len(self._slots):
            self._take_more_slots()
        cached, holders = self._index.find(sequence.prefix.tobytes()[:-TOKEN_BYTES], sequence.space)
        usable = [holder for holder in holders if self._shortest(holder) <= cached] if cached else []
        source = min(usable, key=CacheEntry.preference, default=None)
        cached = 0 if source is None else cached
        slot = self._choose_slot(source)
        if slot is None:
            return None
        if source is None:
            self._vacate(slot)
        elif not self._bring(source, slot, cached, sequence.space):
            cached = 0
        self._occupy(slot, sequence, cached)
        if sequence.counts_as_query:
            self._queried += len(sequence.tokens)
            self._hit += cached
        return cached

    def fork(self, parent: KVSequence, child: KVSequence) -> bool:
        """Only into existing slots: adding some would invalidate the logits of the step under way. A child that finds
        none is admitted before the next step."""
        slot = self._choose_slot(None)
        if slot is None:
            return False
        self._vacate(slot)
        if not self._copied(parent.slot, slot, parent.held):
            return False
        child.dropped, child.kept = parent.dropped, parent.kept
        self._occupy(slot, child, parent.num_computed)
        return True

    def arrange(self) -> None:
        """Move running sequences from the end into gaps, so that the backend can batch them."""
        running = self._running_slots()
        while running and running[-1] - running[0] + 1 > len(running):
            gap = next(number for number in range(running[0], running[-1]) if number not in running)
            entry = self._slots[running[-1]]
            assert entry is not None and entry.owner is not None and entry.slot is not None
            self._vacate(gap)
            if not self._copied(entry.slot, gap, entry.owner.held):
                return
            self._empty(entry.slot)
            self._slots[gap] = entry
            entry.slot = entry.owner.slot = gap
            self._moves += 1
            running = self._running_slots()

    def grow(self, sequence: KVSequence, count: int) -> bool:
        return sequence.end + count <= self.max_tokens

    def grow_within_free(self, sequence: KVSequence, count: int) -> int:
        return min(count, self.max_tokens - sequence.end)

    # -- after a step ------------------------------------------------------------------------------------------

    def commit(self, sequence: KVSequence) -> None:
        # Prompt chunks are indexed at once, for others to share; generated tokens when the sequence ends.
        entry = entry_of(sequence)
        if sequence.intact and sequence.num_computed - entry.length > 1:
            self._index.extend(entry, sequence)

    def verify(self, sequence: KVSequence) -> None:
        held = self._ops.length(sequence.slot)
        if held != sequence.end:
            raise PositionMismatchError(
                f"slot {sequence.slot} holds {held} positions, but the sequence has {sequence.end}"
            )

    def rewind(self, sequence: KVSequence) -> None:
        self._ops.remove(sequence.slot, sequence.end)

    def release(self, sequence: KVSequence, *, keep: bool = True) -> None:
        entry = entry_of(sequence)
        if keep and sequence.num_computed and sequence.intact:
            self._index.extend(entry, sequence)
            sequence.forget_memory()
            entry.owner, entry.offered = None, False
            self._note_end()
            shortest = self._ops.shortest(entry.slot, moved=True) if entry.slot is not None else 0
            for other in self._index.covered_by(entry):
                if other.owner is None and other.length >= shortest:
                    self._discard(other)
        else:
            sequence.forget_memory()
            self._discard(entry)
        self._note_running()

    # -- pins and events -----------------------------------------------------------------------------------------

    def pin(self, sequence: KVSequence, mark: PinMark) -> None:
        """A pin is a copy of the whole sequence as bytes, beside the store and within its limit: what a backend saves
        cannot be cut."""
        tokens, pins = min(mark.tokens, len(sequence.tokens)), self._pins
        if tokens < SAVE_TAIL_TOKENS:
            pins.refuse(mark, f"it has {tokens} tokens, fewer than {SAVE_TAIL_TOKENS}")
            return
        if not sequence.intact or sequence.num_computed < tokens:
            pins.refuse(mark, "it was not fully computed, or part of it has been dropped since")
            return
        of = pinned_prefix(sequence, tokens)
        if pins.renew(of.id, mark):
            return
        needed = most_bytes(sequence.num_computed, self._bytes_per_token)
        if not pins.fits(mark, sequence.space, lambda: self._pinned_bytes, lambda: needed):
            return
        self._make_room(needed, self._store_bytes)
        if self._store.bytes + needed + self._reserved_bytes > self._store_bytes:
            pins.refuse(mark, f"it needs {needed} bytes of the store, which are reserved for a load under way")
            return
        saved = self._read(entry_of(sequence))
        if saved is None:
            pins.refuse(mark, "the backend cannot save it")
            return
        entry = CacheEntry(sequence.slot, sequence)
        self._index.extend(entry, sequence)
        entry.owner = entry.slot = None
        entry.saved, entry.pinned = saved, True
        self._pinned_bytes += saved.nbytes
        pins.add(of, entry, mark, saved.nbytes)

    def unpin(self, name: str, space: bytes | None = None) -> bool:
        return self._pins.remove(name, space)

    def listen(self) -> Listener:
        return self._events.listen()

    def lost_pins(self) -> list[LostPin]:
        return self._pins.lost()

    def _pinned_tokens(self) -> int:
        return sum(pin.holder.length for pin in self._pins.by_id.values())

    def _pin_details(self) -> dict[str, Any]:
        return self._pins.details(self._pinned_bytes, number_of)

    # -- operations on a sequence's memory -----------------------------------------------------------------------

    def remove_range(self, sequence: KVSequence, start: int, end: int) -> bool:
        check_removal(sequence, start, end)
        self._ops.remove(sequence.slot, start, end)
        open_hole(sequence, start, end)
        if (entry := entry_of(sequence)).length > start:
            self._index.cut_back(entry, sequence)
        return True

    def shift(self, sequence: KVSequence, start: int, delta: int) -> None:
        """The backend re-rotates the keys."""
        check_shift(sequence, start, delta)
        self._ops.shift(sequence.slot, start, None, delta)
        close_hole(sequence)

    def truncate(self, sequence: KVSequence, length: int) -> int:
        check_truncation(sequence, length)
        self._ops.remove(sequence.slot, length - sequence.dropped)
        sequence.num_computed = length
        if (entry := entry_of(sequence)).length > length:
            self._index.cut_back(entry, sequence)
        return length

    # -- upkeep ------------------------------------------------------------------------------------------------

    def maintain(self, budget_s: float) -> bool:
        """Reducing the number of slots cannot be interrupted and may exceed `budget_s`; it happens in quiet times."""
        self._pins.expire()
        more = self._keep(budget_s)
        self._make_room(0, self._threshold_bytes)
        if self._max_sequences is not None:
            occupied = sum(entry is not None for entry in self._slots)
            while len(self._store) and len(self._store) + occupied > self._max_sequences:
                self._evict(self._store.oldest())
        due = self._quiet_at()
        if due is not None and due <= self._clock():
            self._give_back()
        return more

    def upkeep_at(self) -> float | None:
        moments = (self._quiet_at(), self._disk_due_at(), self._pins.next_at)
        return min((moment for moment in moments if moment is not None), default=None)

    def _quiet_at(self) -> float | None:
        idle_at = self._sizes.idle_at()
        return self._sizes.few_at(len(self._slots)) if idle_at is None else idle_at

    def reset(self) -> None:
        super().reset()
        self._note_running()

    def usage(self) -> KVUsage:
        running = [entry.owner for entry in self._slots if entry is not None and entry.owner is not None]
        held, slots = self._held_in_slots(), len(self._slots)
        used = len(running) + len(held)
        pinned = self._pinned_tokens()
        referenced = sum(owner.held for owner in running) + pinned
        evictable = sum(entry.length for entry in held) + self._store.tokens
        total = self._geometry.tokens + self._store_bytes // self._bytes_per_token
        self._peak = max(self._peak, referenced)
        # Slots that are not allocated yet are free, too.
        state = "".join("." if entry is None else " " for entry in self._slots)
        free_runs = state.ljust(self._geometry.slots, ".").split()
        return KVUsage(
            layout="slots",
            unit_tokens=1,
            bytes_per_unit=self._bytes_per_token,
            total=total,
            free=total - evictable - referenced,
            evictable=evictable,
            referenced=referenced,
            peak=self._peak,
            sequences_running=len(running),
            sequences_held=len(held) + len(self._store) + len(self._pins),
            free_segments=len(free_runs),
            largest_free_span=max(map(len, free_runs), default=0) * self._geometry.slot_tokens,
            evictions=self._evictions,
            allocation_failures=self.allocation_failures,
            compactions=self._moves,
            moved_bytes=self._moved_bytes,
            query_tokens=self._queried,
            hit_tokens=self._hit,
            extents_used=used,
            extents_needed=used,
            extents_ready=slots - used,
            extents_fresh=self._geometry.slots - slots,
            extent_bytes=self._slot_bytes,
            resident_bytes=slots * self._slot_bytes + self._store.bytes + self._pinned_bytes,
            released_bytes=self._released_bytes,
            upkeep_failures=self._resizes_failed,
            slots=slots,
            context_rebuilds=self._resizes,
            disk=self._disk_numbers(),
            pins=len(self._pins),
            pinned=pinned,
            pins_refused=self._pins.refused,
            blocks_stored=self._events.blocks_stored,
            blocks_removed=self._events.blocks_removed,
        )

    def details(self) -> dict[str, Any]:
        return {
            "slots": [describe(entry) for entry in self._slots],
            "slots_now": len(self._slots),
            "slots_at_most": self._geometry.slots,
            "slot_tokens": self._geometry.slot_tokens,
            "slot_bytes": self._slot_bytes,
            "rebuilds": self._resizes,
            "moved_bytes": self._moved_bytes,
            "store": self._store_details(),
            "disk": self._disk_details(),
            "pins": self._pin_details(),
        }

    def held_names(self) -> tuple[int, set[bytes]]:
        return self._events.number, set(self._index.names.counts)

    def view(self) -> KVView:
        saved = [*(pin.holder for pin in self._pins.by_id.values()), *self._store.entries]
        return slots_view(self._slots, saved, self._geometry, self._bytes_per_token)

    # -- inside: slots -----------------------------------------------------------------------------------------

    def _choose_slot(self, source: CacheEntry | None) -> int | None:
        """A slot next to the running ones, preferably the one that holds the prefix already."""
        candidates = self._adjacent_slots()
        if source is not None and source.slot in candidates:
            return source.slot
        for slot in candidates:
            if self._slots[slot] is None:
                return slot
        return candidates[0] if candidates else None

    def _shortest(self, source: CacheEntry) -> int:
        """The shortest prefix of it that can be used."""
        if source.slot is None:
            assert source.saved is not None
            return self._ops.shortest_saved(source.saved)
        stays = source.owner is None and source.slot in self._adjacent_slots()
        return self._ops.shortest(source.slot, moved=not stays)

    def _take_more_slots(self) -> None:
        """All slots run and a sequence arrives. Without memory for more, nothing changes."""
        slots = self._sizes.larger(len(self._slots), self.demand, self._clock())
        if slots is not None:
            if self._resize(slots):
                self._sizes.grown()
            self._note_running()

    def _give_back(self) -> None:
        """It has been quiet: keep only the slots that are needed, and when idle only as much saved as may stay."""
        if self._running_slots():
            self._sizes.few_done()
            self._resize(self._sizes.smaller())
            self._note_running()
            return
        self._sizes.idle_done()
        # Saved sequences come first: they take no more memory than they need.
        room = (self._idle_bytes - self._store.bytes - self._pinned_bytes) // self._slot_bytes
        needed = self._sizes.at_least(len(self._held_in_slots()))
        slots = self._sizes.at_most(min(room, needed, len(self._slots)))
        if slots < len(self._slots):
            self._resize(slots)
        self._make_room(0, max(0, self._idle_bytes - len(self._slots) * self._slot_bytes))

    def _note_running(self) -> None:
        self._sizes.note(len(self._slots), len(self._running_slots()), self._clock())

    def _adjacent_slots(self) -> list[int]:
        running = self._running_slots()
        if not running:
            return list(range(len(self._slots)))
        low, high = running[0], running[-1]
        if gaps := sorted(set(range(low, high)).difference(running)):
            return gaps
        return [slot for slot in (high + 1, low - 1) if 0 <= slot < len(self._slots)]

    def _occupy(self, slot: int, sequence: KVSequence, computed: int) -> None:
        entry = CacheEntry(slot, sequence)
        self._slots[slot] = entry
        sequence.allocation = entry
        sequence.slot = slot
        sequence.room = self.max_tokens
        sequence.num_computed = computed
        self._index.extend(entry, sequence)
        self._note_running()

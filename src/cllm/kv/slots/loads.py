"""Loads of whole sequences from disk into the store.

A loaded one is indexed by the tokens it shares with the request; the rest of its bytes is cut off when it moves to a
slot.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cllm.kv.block_names import chain, root_name
from cllm.kv.disk.reader import ReadTicket
from cllm.kv.ops import SavedKV
from cllm.kv.radix import TOKEN_BYTES
from cllm.kv.sequence import KVSequence
from cllm.kv.slots.index import CacheEntry
from cllm.kv.slots.packing import unpack
from cllm.kv.slots.places import SlotPlaces
from cllm.kv.slots.room import SlotRoom
from cllm.kv.slots.snapshots import Snapshot
from cllm.kv.tiers.loads import NO_LOAD, Load, LoadingSequence, LoadQueue
from cllm.kv.tiers.tiers import Tiers


class SequenceLoads:
    def __init__(self, places: SlotPlaces, room: SlotRoom, tiers: Tiers, clock: Callable[[], float]) -> None:
        self.queue = LoadQueue(self._find, self._finish, clock)
        self._places = places
        self._room = room
        self._tiers = tiers
        self._clock = clock

    def _find(self, sequence: KVSequence) -> Load | None:
        disk, model_store, places = self._tiers.disk, self._tiers.model_store, self._places
        if disk is None or model_store is None:
            return None
        key = sequence.prefix.tobytes()[:-TOKEN_BYTES]
        cached = places.find(key, sequence.space)[0]
        size = disk.block_tokens
        if len(key) // TOKEN_BYTES - cached < disk.least_blocks * size:
            return NO_LOAD
        names = chain(root_name(sequence.space), key, size)
        found = model_store.find_sequence(names, key)
        if found is None or found.nbytes + places.reserved_bytes > places.store_bytes:
            return NO_LOAD
        if (
            places.ops.carries_state
            and found.matched < found.tokens
            and self._knows(key, sequence.space, found.matched)
        ):
            return NO_LOAD  # it goes on from its end, which is not in the prompt, or maybe from a snapshot
        wanted = names[: found.matched // size]
        if (load := self.queue.bringing(wanted[-1])) is not None:
            return load
        wait_s = disk.wait_limit((found.matched - cached) // size, found.nbytes)
        if wait_s is None:
            return NO_LOAD
        holder = LoadingSequence(sequence.tokens[: found.matched], space=sequence.space)
        load = Load(sequence, holder, names=frozenset(wanted), deadline=self._clock() + wait_s)
        if not self._room.make_room(found.nbytes, places.store_bytes):
            return NO_LOAD
        try:
            load.buffers = [np.empty(found.nbytes, np.uint8)]
            load.transfer = model_store.load_sequence(found, load.buffers[0], lambda _: disk.on_arrival())
        except Exception as error:
            disk.fault("loading a sequence from disk", error)
            return NO_LOAD
        places.coming_bytes += found.nbytes
        self.queue.add(load)
        return load

    def _knows(self, key: bytes, space: bytes, tokens: int) -> bool:
        """Whether something here has these tokens, with or without a state: what was on disk was loaded before."""
        return self._places.index.find(key, space)[0] >= tokens

    def _finish(self, load: Load) -> None:
        places, disk = self._places, self._tiers.disk
        holder, transfer, (saved,) = load.holder, load.transfer, load.buffers
        assert disk is not None and holder is not None and isinstance(transfer, ReadTicket)
        load.end()
        places.coming_bytes -= saved.nbytes
        tokens = len(holder.tokens)
        disk.note_load(tokens if transfer.complete else 0, tokens)
        if not transfer.complete:
            return
        end: int | None = None
        kept: dict[int, SavedKV] = {}
        if places.ops.carries_state:
            try:
                end, kept = unpack(saved)
            except ValueError as error:
                disk.fault("loading a sequence from disk", error)
                return
        disk.worked()
        holder.num_computed = tokens
        entry = CacheEntry(0, holder)
        entry.hits, entry.offered = 1, True
        places.index.extend(entry, holder)
        entry.owner, entry.end = None, end
        for place, state in kept.items():
            if place <= tokens:
                places.snapshots.add(entry.snapshots, Snapshot(place, state))
        places.store.add(entry, saved)
        places.discard_covered(entry)

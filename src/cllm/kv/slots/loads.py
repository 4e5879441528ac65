"""Loads of whole sequences from disk into the store.

A loaded one is indexed by the tokens it shares with the request; the rest of its bytes is cut off when it moves to a
slot.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cllm.kv.block_names import chain, root_name
from cllm.kv.disk.reader import ReadTicket
from cllm.kv.radix import TOKEN_BYTES
from cllm.kv.sequence import KVSequence
from cllm.kv.slots.index import CacheEntry
from cllm.kv.slots.places import SlotPlaces
from cllm.kv.slots.room import SlotRoom
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
        cached = places.index.find(key, sequence.space)[0]
        size = disk.block_tokens
        if len(key) // TOKEN_BYTES - cached < disk.least_blocks * size:
            return NO_LOAD
        names = chain(root_name(sequence.space), key, size)
        found = model_store.find_sequence(names, key)
        if found is None or found.nbytes + places.reserved_bytes > places.store_bytes:
            return NO_LOAD
        wanted = names[: found.matched // size]
        if (load := self.queue.bringing(wanted[-1])) is not None:
            return load
        wait_s = disk.wait_limit((found.matched - cached) // size, found.nbytes)
        if wait_s is None:
            return NO_LOAD
        holder = LoadingSequence(sequence.tokens[: found.matched], space=sequence.space)
        load = Load(sequence, holder, names=wanted, deadline=self._clock() + wait_s)
        self._room.make_room(found.nbytes, places.store_bytes)
        try:
            load.buffers = [np.empty(found.nbytes, np.uint8)]
            load.transfer = model_store.load_sequence(found, load.buffers[0], lambda _: disk.notify())
        except Exception as error:
            disk.fault("loading a sequence from disk", error)
            return NO_LOAD
        places.coming_bytes += found.nbytes
        self.queue.add(load)
        return load

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
        disk.worked()
        holder.num_computed = tokens
        entry = CacheEntry(0, holder)
        entry.hits, entry.offered = 1, True
        places.index.extend(entry, holder)
        entry.owner = None
        places.store.add(entry, saved)
        places.discard_covered(entry)

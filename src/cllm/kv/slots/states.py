"""Sequences whose layers carry a state: where snapshots of it are taken, and going back to one."""

from __future__ import annotations

import logging
from bisect import insort

import numpy as np

from cllm.errors import BackendError
from cllm.kv.groups import StateTable
from cllm.kv.sequence import KVSequence
from cllm.kv.slots.index import entry_of
from cllm.kv.slots.places import SlotPlaces, raise_if_fatal
from cllm.kv.slots.room import SlotRoom
from cllm.kv.slots.snapshots import Snapshot

log = logging.getLogger("cllm.kv")


class SlotStates:
    def __init__(self, places: SlotPlaces, room: SlotRoom) -> None:
        self._places = places
        self._room = room

    def begin(self, sequence: KVSequence, known: int) -> None:
        """A sequence has its slot. `known`: for how many of its tokens others have K/V, whether or not a state; there
        it parts from them."""
        sequence.state = StateTable()  # which has no blocks: the state is in the slot
        computed, tokens = sequence.num_computed, len(sequence.tokens)
        if computed:
            self._keep(sequence)  # before it is written over
        snapshots = self._places.snapshots
        last = tokens - 1 - (tokens - 1) % snapshots.apart
        places = list(sequence.places)
        if not any(last <= place < tokens for place in places):
            places.append(last)  # for the same prompt again, whose last token is always computed
        needed = [*sequence.to_pin]
        if known >= computed + snapshots.apart:
            needed.append(known)
        sequence.marks = snapshots.choose(places, needed, computed, tokens)

    def meet(self, running: KVSequence, waiting: KVSequence) -> None:
        """`waiting` will go on from what `running` is computing now: where they part, a snapshot is due."""
        ours, theirs = (np.frombuffer(each.tokens, np.int32)[:-1] for each in (running, waiting))
        common = min(len(ours), len(theirs))
        differing = ours[:common] != theirs[:common]
        parts = int(differing.argmax()) if differing.any() else common
        if parts > running.num_computed and parts not in running.marks:
            insort(running.marks, parts, key=lambda mark: -mark)

    def keep_due(self, sequence: KVSequence) -> None:
        """Take the snapshots that are due where a step has ended."""
        computed = sequence.num_computed
        while sequence.marks and sequence.marks[-1] <= computed:
            if sequence.marks.pop() == computed:
                self._places.index.extend(entry_of(sequence), sequence)
                self._keep(sequence)

    def go_back(self, sequence: KVSequence, length: int) -> int:
        """Discard what is computed from token `length` on, and what is before it up to the next snapshot. Returns how
        many tokens stay computed."""
        places, entry, slot = self._places, entry_of(sequence), sequence.slot
        if length == sequence.num_computed == places.ops.length(slot):
            return length
        snapshot = places.snapshots.deepest(entry.snapshots, length)
        if snapshot is None:
            places.ops.remove(slot, 0)
        else:
            places.ops.restore(slot, snapshot.saved, snapshot.tokens)
            places.snapshots.use(snapshot)
        sequence.num_computed = 0 if snapshot is None else snapshot.tokens
        places.snapshots.clear(entry.snapshots, longer_than=sequence.num_computed)
        if entry.length > sequence.num_computed:
            places.index.cut_back(entry, sequence)
        return sequence.num_computed

    def details(self) -> dict[str, int]:
        snapshots = self._places.snapshots
        return {
            "state_bytes": self._places.state_bytes,
            "snapshots": len(snapshots),
            "bytes": snapshots.bytes,
            "taken": snapshots.taken,
            "used": snapshots.used,
        }

    def _keep(self, sequence: KVSequence) -> None:
        """A snapshot where the sequence is now, unless one is near or there is no room for it."""
        places, entry, tokens = self._places, entry_of(sequence), sequence.num_computed
        snapshots, wanted = places.snapshots, sequence.to_pin
        if not snapshots.most or snapshots.has(entry.snapshots, tokens):
            return
        near = snapshots.deepest(entry.snapshots, tokens)
        if tokens - (0 if near is None else near.tokens) < snapshots.apart and tokens not in wanted:
            return
        size = places.state_bytes
        if not (snapshots.make_room(size) and self._room.make_room(size, places.store_bytes)):
            return
        try:
            saved = places.ops.snapshot(sequence.slot)
        except (BackendError, MemoryError) as error:
            raise_if_fatal(error)
            log.warning("cannot save the state behind %d tokens of slot %d: %s", tokens, sequence.slot, error)
            return
        places.moved_bytes += saved.nbytes
        snapshots.taken += 1
        snapshots.add(entry.snapshots, Snapshot(tokens, saved))
        snapshots.thin(entry.snapshots, wanted)

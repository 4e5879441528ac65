"""Pins of the slots manager: copies of whole sequences as bytes, because what a backend saves cannot be cut.

They lie beside the store and within its limit.
"""

from __future__ import annotations

from cllm.kv.pins import PinMark, PinnedPrefix
from cllm.kv.sequence import KVSequence
from cllm.kv.sizing import most_bytes
from cllm.kv.slots.index import CacheEntry, entry_of
from cllm.kv.slots.places import SlotPlaces
from cllm.kv.slots.room import SAVE_TAIL_TOKENS, SlotRoom


def pin_sequence(places: SlotPlaces, room: SlotRoom, sequence: KVSequence, mark: PinMark) -> None:
    tokens, pins = min(mark.tokens, len(sequence.tokens)), places.pins
    if tokens < SAVE_TAIL_TOKENS:
        pins.refuse(mark, f"it has {tokens} tokens, fewer than {SAVE_TAIL_TOKENS}")
        return
    if not sequence.intact or sequence.num_computed < tokens:
        pins.refuse(mark, "it was not fully computed, or part of it has been dropped since")
        return
    of = PinnedPrefix(sequence.tokens[:tokens], sequence.space)
    if pins.renew(of.id, mark):
        return
    source, kept = entry_of(sequence), places.snapshots
    if places.ops.carries_state and sequence.num_computed > tokens and not kept.has(source.snapshots, tokens):
        pins.refuse(mark, "the state behind its last token is not kept; try again when there is more memory for it")
        return
    needed = most_bytes(sequence.num_computed, places.bytes_per_token, places.state_bytes)
    if not pins.fits(mark, sequence.space, lambda: places.pinned_bytes, lambda: needed):
        return
    if not room.make_room(needed, places.store_bytes):
        pins.refuse(mark, f"it needs {needed} bytes of the store, which are reserved for a load under way")
        return
    saved = places.read(source)
    if saved is None:
        pins.refuse(mark, "the backend cannot save it")
        return
    entry = CacheEntry(sequence.slot, sequence)
    places.index.extend(entry, sequence)
    entry.owner = entry.slot = None
    entry.saved, entry.pinned = saved, True
    places.pinned_bytes += saved.nbytes
    kept.share(source.snapshots, entry.snapshots, sequence.num_computed)
    kept.pin(entry.snapshots)
    pins.add(of, entry, mark, saved.nbytes)

"""Pins of the slots manager: a copy of the sequence as bytes, beside the store and out of what the store may take."""

from __future__ import annotations

from typing import Any

from cllm.kv.events import Listener
from cllm.kv.holders import Entry, entry_of
from cllm.kv.memory import most_bytes
from cllm.kv.pins import LostPin, PinMark, beginning
from cllm.kv.sequence import KVSequence
from cllm.kv.slot_memory import SAVE_TAIL_TOKENS, SlotMemory
from cllm.kv.slot_picture import number_of


class SlotPins(SlotMemory):
    def pin(self, sequence: KVSequence, mark: PinMark) -> None:
        """The whole sequence is copied: what a backend saves cannot be cut."""
        tokens, pins = min(mark.tokens, len(sequence.tokens)), self._pins
        if tokens < SAVE_TAIL_TOKENS:
            pins.refuse(mark, f"it has {tokens} tokens, and the least is {SAVE_TAIL_TOKENS}")
            return
        if not sequence.intact or sequence.num_computed < tokens:
            pins.refuse(mark, "it was not computed to its end, or part of it was dropped since")
            return
        of = beginning(sequence, tokens)
        if pins.renew(of.id, mark):
            return
        needed = most_bytes(sequence.num_computed, self._bytes_per_token)
        if not pins.fits(mark, sequence.space, lambda: self._pinned_bytes, lambda: needed):
            return
        self._make_room(needed, self._store_bytes)
        if self._store.bytes + needed + self._reserved_bytes > self._store_bytes:
            pins.refuse(mark, f"it needs {needed} bytes of the store, which something else is being loaded into")
            return
        saved = self._read(entry_of(sequence))
        if saved is None:
            pins.refuse(mark, "the backend cannot save it")
            return
        entry = Entry(sequence.slot, sequence)
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

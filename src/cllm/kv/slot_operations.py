"""Sequence operations of the slots manager: the backend does them in the slot, and the index hears of it."""

from __future__ import annotations

from cllm.kv.holders import entry_of
from cllm.kv.operations import check_removal, check_shift, check_truncation, close_hole, open_hole
from cllm.kv.sequence import KVSequence
from cllm.kv.slot_resizing import SlotResizing


class SlotOperations(SlotResizing):
    def remove_range(self, sequence: KVSequence, start: int, end: int) -> bool:
        check_removal(sequence, start, end)
        self._ops.remove(sequence.slot, start, end)
        open_hole(sequence, start, end)
        if (entry := entry_of(sequence)).length > start:
            self._index.cut_back(entry, sequence)
        return True

    def shift(self, sequence: KVSequence, start: int, delta: int) -> None:
        """The backend rotates the keys to their new positions."""
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

"""Pins in the paged cache: a pin references the tree nodes of its prefix, as a running sequence does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cllm.kv.paged.arena import Arena
from cllm.kv.paged.block_table import BlockNode
from cllm.kv.paged.room import Room
from cllm.kv.pins import PinMark, PinnedPrefix, Pins
from cllm.kv.sequence import KVSequence


class BlockPins:
    def __init__(self, arena: Arena, room: Room, limit_bytes: int, clock: Callable[[], float]) -> None:
        self.all: Pins[BlockNode] = Pins(limit_bytes, clock, self._drop, self._held)
        self._arena = arena
        self._room = room

    def pin(self, sequence: KVSequence, mark: PinMark) -> None:
        size, block_bytes = self._arena.block_size, self._arena.block_bytes
        blocks = min(mark.tokens, len(sequence.tokens)) // size
        if blocks == 0:
            self.all.refuse(mark, f"it has {mark.tokens} tokens, fewer than a KV block ({size})")
            return
        self._arena.commit(sequence)
        if not sequence.intact or sequence.num_computed < blocks * size:
            self.all.refuse(mark, "it was not fully computed, or part of it has been dropped since")
            return
        of, prefixes = PinnedPrefix(sequence.tokens[: blocks * size], sequence.space), self._arena.prefixes
        if self.all.renew(of.id, mark):
            return

        found = prefixes.find_held(sequence, blocks)
        if not prefixes.can_pin(found):
            self.all.refuse(mark, "layers with a window or a state have gone beyond its end")
            return

        def more() -> int:
            return prefixes.unpinned_blocks(prefixes.find_held(sequence, blocks)) * block_bytes

        if self.all.fits(mark, sequence.space, lambda: prefixes.pinned * block_bytes, more):
            holder = prefixes.pin(prefixes.find_held(sequence, blocks))
            self.all.add(of, holder, mark, blocks * block_bytes)

    def unpin(self, name: str, space: bytes | None) -> bool:
        removed = self.all.remove(name, space)
        self._room.limit_sequences()
        return removed

    def give_way(self, running: int) -> bool:
        """Drop a pin to make room, if at most `running` sequences run; whether one was dropped."""
        return len(self._arena.running) <= running and self.all.give_way()

    def uses(self) -> dict[int, int]:
        """How many pins use each node, by its id."""
        found: dict[int, int] = {}
        for pin in self.all.by_id.values():
            for node in pin.holder.path():
                found[node.number] = found.get(node.number, 0) + 1
        return found

    def details(self) -> dict[str, Any]:
        pinned_bytes = self._arena.prefixes.pinned * self._arena.block_bytes
        return self.all.details(pinned_bytes, lambda node: node.number)

    def _drop(self, node: BlockNode) -> None:
        self._arena.prefixes.unpin(node)

    def _held(self, nodes: Sequence[BlockNode]) -> int:
        parts = {part.number: len(part.value) for node in nodes for part in node.path()}
        return sum(parts.values()) * self._arena.block_bytes

"""Pins in the paged cache: a pin references the tree nodes of its prefix, as a running sequence does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cllm.kv.events import Listener
from cllm.kv.paged.block_table import BlockNode
from cllm.kv.paged.operations import PagedOperations
from cllm.kv.pins import LostPin, PinMark, Pins, pinned_prefix
from cllm.kv.sequence import KVSequence


class PagedPins(PagedOperations):
    _pins: Pins[BlockNode]

    def pin(self, sequence: KVSequence, mark: PinMark) -> None:
        size, block_bytes = self.block_size, self._arena.block_bytes
        blocks = min(mark.tokens, len(sequence.tokens)) // size
        if blocks == 0:
            self._pins.refuse(mark, f"it has {mark.tokens} tokens, fewer than a KV block ({size})")
            return
        self.commit(sequence)
        if not sequence.intact or sequence.num_computed < blocks * size:
            self._pins.refuse(mark, "it was not fully computed, or part of it has been dropped since")
            return
        of, prefixes = pinned_prefix(sequence, blocks * size), self._prefixes
        if self._pins.renew(of.id, mark):
            return

        def more() -> int:
            return prefixes.unpinned_blocks(prefixes.find_held(sequence, blocks)) * block_bytes

        if self._pins.fits(mark, sequence.space, lambda: prefixes.pinned * block_bytes, more):
            holder = prefixes.pin(prefixes.find_held(sequence, blocks))
            self._pins.add(of, holder, mark, blocks * block_bytes)

    def unpin(self, name: str, space: bytes | None = None) -> bool:
        removed = self._pins.remove(name, space)
        self._limit_sequences()
        return removed

    def lost_pins(self) -> list[LostPin]:
        return self._pins.lost()

    def held_names(self) -> tuple[int, set[bytes]]:
        nodes = self._prefixes.tree.nodes()
        return self._arena.events.number, {name for node in nodes for name in node.names}

    def listen(self) -> Listener:
        return self._arena.events.listen()

    def _drop_pin(self, node: BlockNode) -> None:
        self._prefixes.unpin(node)

    def _held_by_pins(self, nodes: Sequence[BlockNode]) -> int:
        parts = {part.number: len(part.value) for node in nodes for part in node.path()}
        return sum(parts.values()) * self._arena.block_bytes

    def _pins_give_way(self, running: int) -> bool:
        """Drop a pin to make room, if at most `running` sequences run; whether one was dropped."""
        return len(self._arena.running) <= running and self._pins.give_way()

    def _pin_uses(self, uses: dict[int, int]) -> dict[int, int]:
        """How many pins use each node, by its id; they are added to `uses`, too."""
        pins: dict[int, int] = {}
        for pin in self._pins.by_id.values():
            for node in pin.holder.path():
                pins[node.number] = pins.get(node.number, 0) + 1
                uses[node.number] = uses.get(node.number, 0) + 1
        return pins

    def _pin_details(self) -> dict[str, Any]:
        return self._pins.details(self._prefixes.pinned * self._arena.block_bytes, lambda node: node.number)

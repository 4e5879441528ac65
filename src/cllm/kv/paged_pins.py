"""Pins of the paged manager: a pin uses the nodes of the tree that spell its prefix, as a running sequence does."""

from __future__ import annotations

from typing import Any

from cllm.kv.events import Listener
from cllm.kv.paged_operations import PagedOperations
from cllm.kv.pins import PinMark, Pins, pin_id
from cllm.kv.sequence import KVSequence
from cllm.kv.table import BlockNode


class PagedPins(PagedOperations):
    _pins: Pins[BlockNode]

    def pin(self, sequence: KVSequence, mark: PinMark) -> None:
        size, block_bytes = self.block_size, self._arena.block_bytes
        blocks = min(mark.tokens, len(sequence.tokens)) // size
        if blocks == 0:
            self._pins.refuse(mark, f"it has {mark.tokens} tokens, and a block of K/V has {size}")
            return
        self.commit(sequence)
        if not sequence.intact or sequence.num_computed < blocks * size:
            self._pins.refuse(mark, "it was not computed to its end, or part of it was dropped since")
            return
        name = pin_id(sequence, blocks * size)
        if self._pins.renew(name, mark):
            return
        found = self._prefixes.find_held(sequence, blocks)
        cost = self._prefixes.unpinned_blocks(found) * block_bytes
        if self._pins.fits(mark, self._prefixes.pinned * block_bytes, cost):
            self._pins.add(name, self._prefixes.pin(found), mark, blocks * size, blocks * block_bytes)

    def unpin(self, name: str) -> bool:
        return self._pins.remove(name)

    def held_names(self) -> tuple[int, set[bytes]]:
        nodes = self._prefixes.tree.nodes()
        return self._arena.events.number, {name for node in nodes for name in node.names}

    def listen(self) -> Listener:
        return self._arena.events.listen()

    def _drop_pin(self, node: BlockNode) -> None:
        self._prefixes.unpin(node)

    def _pins_give_way(self, running: int) -> bool:
        """Whether there is more room now, because one pin less is there: only where hardly anybody else has any."""
        return len(self._arena.running) <= running and self._pins.give_way()

    def _pin_uses(self, uses: dict[int, int]) -> dict[int, int]:
        """How many pins use each node, by its number; they are counted in `uses`, too."""
        pins: dict[int, int] = {}
        for pin in self._pins.by_id.values():
            for node in pin.holder.path():
                pins[node.number] = pins.get(node.number, 0) + 1
                uses[node.number] = uses.get(node.number, 0) + 1
        return pins

    def _pin_details(self) -> dict[str, Any]:
        return self._pins.details(self._prefixes.pinned * self._arena.block_bytes, lambda node: node.number)

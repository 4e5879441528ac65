"""Which computed sequences exist, and which of them begins like a prompt: the prefix index of the slots manager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count

from cllm.kv.ops import SavedKV
from cllm.kv.radix import TOKEN_BYTES, Node, RadixTree
from cllm.kv.sequence import Holding, KVSequence
from cllm.kv.slot_names import HeldNames


class Entry(Holding):
    """One computed sequence: running or held in a slot, or saved as bytes."""

    __slots__ = ("hits", "length", "names", "node", "number", "offered", "owner", "pinned", "saved", "slot", "space")
    _numbers = count()

    def __init__(self, slot: int, owner: KVSequence) -> None:
        self.number = next(Entry._numbers)
        self.slot: int | None = slot
        self.space = owner.space
        self.offered = False
        """Whether it was handed over to be kept on disk, or comes from there."""
        self.owner: KVSequence | None = owner
        """The running sequence, None once it has ended."""
        self.saved: SavedKV | None = None
        self.pinned = False
        """Whether its bytes are a pin's, and none of the store's."""
        self.node: Node[set[Entry]] | None = None
        self.length = 0
        """Tokens the index knows of; a running sequence may be ahead by what it has generated since."""
        self.names: list[bytes] = []
        """Of their whole blocks."""
        self.hits = 0

    def path(self) -> Iterator[Node[set[Entry]]]:
        return self.node.path() if self.node is not None else iter(())

    def preference(self) -> tuple[int, int]:
        """Among equals: one that waits in a slot, then a running one, then a saved one; of those the newest."""
        place = 2 if self.slot is None else int(self.owner is not None)
        return place, -self.number


def entry_of(sequence: KVSequence) -> Entry:
    holding = sequence.holding
    assert isinstance(holding, Entry)
    return holding


def describe(entry: Entry | None) -> dict[str, str | int]:
    """What `/kv` shows of a slot that holds this."""
    if entry is None:
        return {"state": "free", "tokens": 0}
    if entry.owner is not None:
        return {"state": "running", "tokens": entry.owner.held, "dropped": entry.owner.dropped}
    return {"state": "held", "tokens": entry.length}


class HolderIndex:
    """A radix tree of tokens in which every node knows the entries whose path runs through it."""

    def __init__(self, names: HeldNames) -> None:
        self.names = names
        self._tree: RadixTree[set[Entry]] = RadixTree(1, set(), lambda holders, at: (set(holders), holders))

    def find(self, key: bytes, space: bytes) -> tuple[int, set[Entry]]:
        """How many tokens of `key` some entry of the space, or one that is common to all, holds; and the entries that
        hold that many. Entries are whole sequences, so each has its whole path in its own space."""
        found = self._tree.find_for(key, space)
        return found.matched // TOKEN_BYTES, found.node.value

    def extend(self, entry: Entry, sequence: KVSequence) -> None:
        """Let the index know all that `sequence` has computed and others may share. O(new tokens)."""
        end = sequence.num_computed if sequence.intact else sequence.kept
        start = entry.node or self._tree.root_of(sequence.space)
        key = sequence.tokens[entry.length : end].tobytes()
        found = self._tree.find(key, start)
        node = self._tree.cut(found) if found.matched else start
        part = node
        while part is not start:
            part.value.add(entry)
            assert part.parent is not None
            part = part.parent
        if rest := key[found.matched :]:
            if node.parent is not None and not node.children and node.value == {entry}:
                node.key += rest
            else:
                node = self._tree.add(node, rest, {entry})
        entry.node = node if node.parent is not None else None
        entry.length = end
        self.names.extend(entry.names, sequence.tokens[:end], entry.space)

    def cut_back(self, entry: Entry, sequence: KVSequence) -> None:
        """`sequence` has lost something that the index knows of."""
        self.remove(entry)
        entry.length = 0
        self.extend(entry, sequence)

    def remove(self, entry: Entry) -> None:
        node, entry.node = entry.node, None
        self.names.remove(entry.names)
        while node is not None and node.parent is not None:
            node.value.discard(entry)
            node = self._tree.remove(node) if not node.value else node.parent

    def covered_by(self, entry: Entry) -> set[Entry]:
        """The entries that are a prefix of this one, or equal to it, without those that are pinned."""
        on_path = (other for node in entry.path() for other in node.value if other.node is node)
        return {other for other in on_path if other is not entry and not other.pinned}

    def examine(self) -> Iterator[tuple[Entry | None, int]]:
        """Check all nodes, then all entries. Yields how many tokens were looked at, with the entry if it was one."""
        entries: set[Entry] = set()
        named: Counter[bytes] = Counter()
        for node in self._tree.examine():
            if not node.value:
                raise AssertionError("a node has no holder")
            entries |= node.value
            yield None, len(node.value)
        for entry in entries:
            spelled = b"".join(bytes(node.key) for node in reversed(list(entry.path())))
            if len(spelled) != entry.length * TOKEN_BYTES:
                raise AssertionError("an entry's path is not as long as the entry")
            if any(entry not in node.value for node in entry.path()):
                raise AssertionError("an entry is missing from its own path")
            if entry.owner is not None and not entry.owner.tokens.tobytes().startswith(spelled):
                raise AssertionError("an entry stands on a path that spells other tokens")
            end, owner = entry.node, entry.owner
            if owner is not None and (end is None or end.root() is not self._tree.root_of(owner.space)):
                raise AssertionError("an entry stands in another space than its own")
            named.update(entry.names)
            yield entry, entry.length
        if named != self.names.counts:
            raise AssertionError("the names of what is held are not those of the entries")

"""The slots manager's prefix index: which computed sequences there are, and which share a prefix with a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count

from cllm.kv.ops import SavedKV
from cllm.kv.radix import TOKEN_BYTES, Node, RadixTree
from cllm.kv.sequence import KVAllocation, KVSequence
from cllm.kv.slots.events import BlockNameCounts
from cllm.kv.slots.snapshots import Kept


class CacheEntry(KVAllocation):
    """One computed sequence: running or held in a slot, or saved as bytes."""

    __slots__ = (
        "end",
        "hits",
        "length",
        "names",
        "node",
        "number",
        "offered",
        "owner",
        "pinned",
        "saved",
        "slot",
        "snapshots",
        "space",
    )
    _numbers = count()

    def __init__(self, slot: int, owner: KVSequence) -> None:
        self.number = next(CacheEntry._numbers)
        self.slot: int | None = slot
        self.space = owner.space
        self.offered = False
        """Whether it was handed to the disk, or comes from there."""
        self.owner: KVSequence | None = owner
        """The running sequence, None once it has ended."""
        self.saved: SavedKV | None = None
        self.pinned = False
        """Whether its bytes belong to a pin instead of the store."""
        self.node: Node[set[CacheEntry]] | None = None
        self.length = 0
        """Tokens in the index; a running sequence may have generated more since."""
        self.names: list[bytes] = []
        """The names of their whole blocks."""
        self.hits = 0
        self.end: int | None = None
        """How many tokens its bytes hold, if they came from disk, and maybe more than the `length` that are known."""
        self.snapshots: Kept = {}

    @property
    def goes_on_from(self) -> int:
        """Where its state is, if that is where its known tokens end; otherwise 0."""
        end = self.end if self.owner is None else self.owner.end
        return self.length if end is None or end == self.length else 0

    def path(self) -> Iterator[Node[set[CacheEntry]]]:
        return self.node.path() if self.node is not None else iter(())

    def preference(self) -> tuple[int, int]:
        """Which of several equally long matches to use: held in a slot, then running, then saved; the newest first."""
        place = 2 if self.slot is None else int(self.owner is not None)
        return place, -self.number


def entry_of(sequence: KVSequence) -> CacheEntry:
    entry = sequence.allocation
    assert isinstance(entry, CacheEntry)
    return entry


def describe(entry: CacheEntry | None) -> dict[str, str | int]:
    """What `GET /kv` shows of a slot."""
    if entry is None:
        return {"state": "free", "tokens": 0}
    if entry.owner is not None:
        return {"state": "running", "tokens": entry.owner.held, "dropped": entry.owner.dropped}
    return {"state": "held", "tokens": entry.length}


class PrefixIndex:
    """A radix tree of tokens whose nodes list the entries whose path runs through them."""

    def __init__(self, names: BlockNameCounts) -> None:
        self.names = names
        self._tree: RadixTree[set[CacheEntry]] = RadixTree(1, set(), lambda holders, at: (set(holders), holders))

    def find(self, key: bytes, space: bytes) -> tuple[int, set[CacheEntry]]:
        """The longest prefix of `key`, in tokens, held by entries of the space or the common space; and those entries.
        An entry's whole path is in one space."""
        found = self._tree.find_for(key, space)
        return found.matched // TOKEN_BYTES, found.node.value

    def matches(self, key: bytes, space: bytes) -> Iterator[tuple[int, CacheEntry]]:
        """Every entry that shares a beginning with `key`, and how many tokens of it; the longest first."""
        found, seen = self._tree.find_for(key, space), set[CacheEntry]()
        matched = found.matched
        inside, node = found.inside, found.node
        while node.parent is not None:
            for entry in node.value - seen:
                yield matched // TOKEN_BYTES, entry
            seen |= node.value
            matched -= inside
            node = node.parent
            inside = len(node.key)

    def extend(self, entry: CacheEntry, sequence: KVSequence) -> None:
        """Index everything shareable that `sequence` has computed. O(new tokens)."""
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

    def cut_back(self, entry: CacheEntry, sequence: KVSequence) -> None:
        """`sequence` has lost tokens that are in the index."""
        self.remove(entry)
        entry.length = 0
        self.extend(entry, sequence)

    def remove(self, entry: CacheEntry) -> None:
        node, entry.node = entry.node, None
        self.names.remove(entry.names)
        while node is not None and node.parent is not None:
            node.value.discard(entry)
            node = self._tree.remove(node) if not node.value else node.parent

    def examine(self) -> Iterator[tuple[CacheEntry | None, int]]:
        """Check all nodes, then all entries. Yields the tokens checked, with the entry if it was one."""
        entries: set[CacheEntry] = set()
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

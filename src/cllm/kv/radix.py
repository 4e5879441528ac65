"""A radix tree over token sequences: finds the longest cached prefix of a prompt in time proportional to its length.

Keys are the raw bytes of int32 tokens, so comparing a whole edge is one memcmp. A tree has a *unit*: edges begin and
end at multiples of it (a block's tokens for the paged manager, one token for slots).

    root ──"You are a helpful…"──► A ──"What is 2+2?"──► B          keys are token bytes,
                                    └──"Write a poem"──► C          values whatever the owner keeps per edge

There is a root for every *space* (a tenant's namespace). A lookup never leaves its root, so sequences of different
spaces share nothing, whatever their tokens. `b""` is the default space.

`COMMON_SPACE` is the exception: everybody finds what is there. Other spaces continue from its nodes with child nodes of
their own, filed under the space's name so that nobody else finds them:

    root of COMMON_SPACE ──"You are a helpful…"──► A ──"What is 2+2?"──► B        A is common, B one space's own,
                                                    └──"What is 2+2?"──► C        C another's
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import numpy as np

TOKEN_BYTES = 4
COMMON_SPACE = b"common to all"
V = TypeVar("V")


class Node(Generic[V]):
    """An edge and the node it leads to. `references` counts the sequences and pins whose path runs through it."""

    __slots__ = (
        "children",
        "hits",
        "key",
        "marks",
        "names",
        "number",
        "parent",
        "pins",
        "rank",
        "references",
        "space",
        "value",
    )

    def __init__(self, parent: Node[V] | None, key: bytearray, value: V, space: bytes) -> None:
        self.parent = parent
        self.key = key
        self.value = value
        self.space = space
        self.children: dict[bytes, Node[V]] = {}
        self.references = 0
        self.hits = 0
        self.pins = 0
        """How many of the references are pins."""
        self.rank = -inf
        """The highest rank that eviction has given to it or to what is below it."""
        self.number = 0
        """The owner's id for it."""
        self.names: list[bytes] = []
        """One name per unit of the edge, if the owner names them."""
        self.marks: dict[int, Any] = {}
        """What the owner keeps behind that many units of the edge."""

    def path(self) -> Iterator[Node[V]]:
        """This node and its ancestors, deepest first, without the root."""
        node: Node[V] = self
        while node.parent is not None:
            yield node
            node = node.parent

    def root(self) -> Node[V]:
        node: Node[V] = self
        while node.parent is not None:
            node = node.parent
        return node


class _Root(Node[V]):
    """Kept alive by its children, or by a sequence that has nothing in the tree yet."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True)
class PrefixMatch(Generic[V]):
    """Where a key leaves the tree: `matched` bytes in all, the last `inside` of them on `node`'s edge."""

    node: Node[V]
    inside: int
    matched: int


class RadixTree(Generic[V]):
    __slots__ = ("_roots", "_split_value", "root", "unit_bytes")

    def __init__(self, unit_tokens: int, root_value: V, split_value: Callable[[V, int], tuple[V, V]]) -> None:
        """`split_value(value, units)` divides an edge's value where the edge is cut, `units` from its beginning."""
        self.unit_bytes = unit_tokens * TOKEN_BYTES
        self.root: Node[V] = _Root(None, bytearray(), root_value, b"")
        self._split_value = split_value
        self._roots: WeakValueDictionary[bytes, Node[V]] = WeakValueDictionary({b"": self.root})

    def root_of(self, space: bytes) -> Node[V]:
        """The root of a space. It lives only while it, or something below it, is referenced."""
        root = self._roots.get(space)
        if root is None:
            root = self._roots[space] = _Root(None, bytearray(), self.root.value, space)
        return root

    def find_for(self, key: bytes, space: bytes) -> PrefixMatch[V]:
        """The longest prefix of `key` visible to a space: its own, or one that begins in the common space."""
        best = self.find(key, self.root_of(space))
        common = self._roots.get(COMMON_SPACE)
        if common is None or space == COMMON_SPACE:
            return best
        shared = self.find(key, common)
        if shared.matched > best.matched:
            best = shared
        node, begin = shared.node, shared.matched - shared.inside
        while True:
            end = begin + len(node.key)
            if end <= shared.matched and node.children:
                own = self.find(key[end:], node, space)
                if end + own.matched > best.matched:
                    best = PrefixMatch(own.node, own.inside, end + own.matched)
            if node.parent is None:
                return best
            node = node.parent
            begin -= len(node.key)

    def find(self, key: bytes, start: Node[V] | None = None, space: bytes | None = None) -> PrefixMatch[V]:
        """Follow `key` from `start` (the default space's root) as far as whole units match. Changes nothing.

        `space`: continue into children of this space, if it is not `start`'s.
        """
        node = start or self.root
        unit = self.unit_bytes
        offset = 0
        first = key[:unit] if space is None else _filed(node, space, key[:unit])
        while child := node.children.get(key[offset : offset + unit] if offset else first):
            length = len(child.key)
            if key[offset : offset + length] == child.key:
                offset += length
                node = child
                continue
            inside = _common_prefix(key, offset, child.key, unit)
            return PrefixMatch(child, inside, offset + inside)
        return PrefixMatch(node, len(node.key), offset)

    def cut(self, found: PrefixMatch[V]) -> Node[V]:
        """The node that ends exactly where `found` does; splits its edge if necessary."""
        node = found.node
        if found.inside == len(node.key):
            return node
        return self._split(node, found.inside)

    def add(self, parent: Node[V], key: bytes, value: V, space: bytes | None = None) -> Node[V]:
        """A new leaf below `parent`, in its space unless another is given. `parent` must have no child of that space
        that begins with the same unit."""
        node = Node(parent, bytearray(key), value, parent.space if space is None else space)
        parent.children[_filed(parent, node.space, key[: self.unit_bytes])] = node
        return node

    def remove(self, leaf: Node[V]) -> Node[V]:
        """Remove a leaf; returns its parent."""
        parent = leaf.parent
        if parent is None or leaf.children:
            raise ValueError("only a leaf can be removed")
        del parent.children[_filed(parent, leaf.space, leaf.key[: self.unit_bytes])]
        leaf.parent = None
        return parent

    def nodes(self) -> Iterator[Node[V]]:
        """Every node but the roots, lazily. The tree must not change meanwhile."""
        roots = list(self._roots.values())
        levels: list[Iterator[Node[V]]] = [chain.from_iterable(root.children.values() for root in roots)]
        while levels:
            node = next(levels[-1], None)
            if node is None:
                levels.pop()
                continue
            yield node
            levels.append(iter(node.children.values()))

    def examine(self) -> Iterator[Node[V]]:
        """Every node, after checking it: edges are whole units, children are filed under their first unit, links go
        both ways."""
        for node in self.nodes():
            parent = node.parent
            if (
                parent is None
                or parent.children.get(_filed(parent, node.space, node.key[: self.unit_bytes])) is not node
            ):
                raise AssertionError("a node is not filed under its parent")
            if node.space != parent.space != COMMON_SPACE:
                raise AssertionError("a node goes on from one of another space, which is not common to all")
            if not node.key or len(node.key) % self.unit_bytes:
                raise AssertionError(f"an edge of {len(node.key)} bytes is not a multiple of the unit")
            if parent.parent is not None and parent.references < node.references:
                raise AssertionError("a path runs through a child but not through its parent")
            yield node

    def _split(self, node: Node[V], at: int) -> Node[V]:
        """Cut `node`'s edge and return the new upper part; `node` keeps the lower part and its identity."""
        parent = node.parent
        assert parent is not None
        unit = self.unit_bytes
        upper_value, lower_value = self._split_value(node.value, at // unit)
        upper = Node(parent, node.key[:at], upper_value, node.space)
        upper.references = node.references
        upper.hits = node.hits
        upper.pins = node.pins
        upper.rank = node.rank
        units, marks = at // unit, node.marks
        upper.names, node.names = node.names[:units], node.names[units:]
        upper.marks = {place: mark for place, mark in marks.items() if place <= units}
        node.marks = {place - units: mark for place, mark in marks.items() if place > units}
        parent.children[_filed(parent, node.space, node.key[:unit])] = upper
        node.key = node.key[at:]
        node.value = lower_value
        node.parent = upper
        upper.children[bytes(node.key[:unit])] = node
        return upper


def _filed(parent: Node[V], space: bytes, unit: bytes | bytearray) -> bytes:
    """The key under which `parent` files a child that begins with `unit`; longer than a unit for another space."""
    return bytes(unit) if space == parent.space else space + b"/" + unit


def _common_prefix(key: bytes, offset: int, edge: bytearray, unit: int) -> int:
    """How many bytes of `edge` match `key` from `offset` on, in whole units. They are known to differ somewhere."""
    length = min(len(edge), len(key) - offset)
    length -= length % unit
    ours = np.frombuffer(key, dtype=np.uint8, count=length, offset=offset)
    theirs = np.frombuffer(bytes(edge[:length]), dtype=np.uint8)
    differing = ours != theirs
    first = int(differing.argmax()) if differing.size else 0
    if differing.size == 0 or not differing[first]:
        return length
    return first - first % unit

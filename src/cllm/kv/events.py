"""Events: which blocks enter and leave the prefix cache, for anything that mirrors it elsewhere.

A block's name is a chained hash of its tokens, all tokens before it, and its space (see block_names.py): stable across
restarts and servers, and meaningless without the tokens.

Events are numbered. Each listener has a bounded queue; one that falls behind loses its queue and finds a *gap* instead:
the mirror must then be rebuilt from `KVManager.held_names`. Numbers are consecutive, except across gaps and *cleared*,
which stands for everything before it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple
from weakref import WeakSet

MOST_WAITING = 4096


class KVEvent(NamedTuple):
    number: int
    kind: Literal["stored", "removed", "cleared", "gap"]
    names: tuple[bytes, ...] = ()
    parent: bytes = b""
    """stored: the name of the block before the first."""


class Listener:
    """The events since the last `take`. Filled by the engine's thread, emptied by another."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: deque[KVEvent] = deque()
        self._gap_at: int | None = None
        self._lock = threading.Lock()

    def put(self, event: KVEvent) -> None:
        with self._lock:
            if event.kind == "cleared":  # a mirror is right again from here on, whatever was lost
                self._waiting.clear()
                self._gap_at = None
            elif self._gap_at is not None or len(self._waiting) >= self._most:
                self._waiting.clear()
                self._gap_at = event.number
                return
            self._waiting.append(event)

    def take(self) -> list[KVEvent]:
        """All queued events. A gap stands for everything up to its number."""
        with self._lock:
            events, gap_at = list(self._waiting), self._gap_at
            self._waiting.clear()
            self._gap_at = None
        return events if gap_at is None else [KVEvent(gap_at, "gap")]


class KVEvents:
    """Counts events and passes them to listeners."""

    def __init__(self) -> None:
        self.number = 0
        """The latest event's number."""
        self.blocks_stored = self.blocks_removed = 0
        self._listeners: WeakSet[Listener] = WeakSet()

    def listen(self, most: int = MOST_WAITING) -> Listener:
        """A listener that receives events for as long as it is referenced. Call on the engine's thread."""
        listener = Listener(most)
        self._listeners.add(listener)
        return listener

    def stored(self, parent: bytes, names: Sequence[bytes]) -> None:
        self.blocks_stored += len(names)
        self._tell("stored", names, parent)

    def removed(self, names: Sequence[bytes]) -> None:
        self.blocks_removed += len(names)
        self._tell("removed", names)

    def cleared(self) -> None:
        """The cache is empty."""
        self._tell("cleared", ())

    def _tell(self, kind: Literal["stored", "removed", "cleared"], names: Sequence[bytes], parent: bytes = b"") -> None:
        self.number += 1
        if self._listeners:
            event = KVEvent(self.number, kind, tuple(names), parent)
            for listener in list(self._listeners):
                listener.put(event)

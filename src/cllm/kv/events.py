"""What comes into the prefix tree and leaves it, block by block, for whoever keeps a picture of it elsewhere.

A block's name is a chained hash of its tokens, all tokens before it, and the space they are found in (see
disk/names.py): the same after a restart, and the same on every server. A name tells nothing of the tokens to who does
not know them.

Events are numbered. A listener has a queue of its own that holds so many; who does not keep up loses what is in it,
and finds a *gap* instead: then the picture has to be made anew, from `KVManager.held_names`. Numbers are without holes,
but for gaps and for *cleared*, which stands for all before it.
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
    """stored: the name that the first one follows on."""


class Listener:
    """What happened since it was asked last. Filled by the engine's thread, emptied by another one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: deque[KVEvent] = deque()
        self._gap_at: int | None = None
        self._lock = threading.Lock()

    def put(self, event: KVEvent) -> None:
        with self._lock:
            if event.kind == "cleared":  # from here on a picture is right again, whatever was lost
                self._waiting.clear()
                self._gap_at = None
            elif self._gap_at is not None or len(self._waiting) >= self._most:
                self._waiting.clear()
                self._gap_at = event.number
                return
            self._waiting.append(event)

    def take(self) -> list[KVEvent]:
        """All that wait. A gap stands for everything up to its own number."""
        with self._lock:
            events, gap_at = list(self._waiting), self._gap_at
            self._waiting.clear()
            self._gap_at = None
        return events if gap_at is None else [KVEvent(gap_at, "gap")]


class KVEvents:
    """Counts for everybody, tells those who listen."""

    def __init__(self) -> None:
        self.number = 0
        """Of the latest event."""
        self.blocks_stored = self.blocks_removed = 0
        self._listeners: WeakSet[Listener] = WeakSet()

    def listen(self, most: int = MOST_WAITING) -> Listener:
        """From now on, for as long as somebody holds the listener. On the engine's thread, like all that changes."""
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
        """Whatever was there is gone."""
        self._tell("cleared", ())

    def _tell(self, kind: Literal["stored", "removed", "cleared"], names: Sequence[bytes], parent: bytes = b"") -> None:
        self.number += 1
        if self._listeners:
            event = KVEvent(self.number, kind, tuple(names), parent)
            for listener in list(self._listeners):
                listener.put(event)

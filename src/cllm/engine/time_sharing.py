"""Turns on the CPU for the engines of several models: one computes at a time, with all threads.

    model A   ▇▇▇▇      ▇▇▇▇      ▇▇▇▇        a step each while both have work, so that neither starves;
    model B       ▇▇▇▇▇▇    ▇▇▇▇▇▇            each keeps its steps to its part of the target, so that answers
              └─ one target ─┘                of both get their next token in time

Not used with a single model.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class TimeShare:
    """One engine's member of `TimeSharing`. The engine's thread holds it (`with`) while it computes; others read it."""

    def __init__(self, sharing: TimeSharing) -> None:
        self.busy = False
        """Whether it has something to compute."""
        self.answering = False
        """Whether its last step had answers, which wait for their next token."""
        self._sharing = sharing

    def __enter__(self) -> None:
        self._sharing.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sharing.release()

    def rest(self) -> None:
        """Nothing to compute for now."""
        self.busy = self.answering = False

    def begin(self) -> tuple[float, bool]:
        """Before a step is planned: its part of the time that all may take together, and whether others have
        answers."""
        self.busy = True
        others = [share for share in self._sharing.members if share is not self and share.busy]
        return 1 / (1 + len(others)), any(share.answering for share in others)

    def leave(self) -> None:
        """The engine has stopped."""
        self.rest()
        self._sharing.remove(self)


class TimeSharing:
    """A fair lock: it goes to the engine that has waited longest."""

    def __init__(self) -> None:
        self.members: tuple[TimeShare, ...] = ()
        """Replaced as a whole, so that reading it needs no lock."""
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    def join(self) -> TimeShare:
        share = TimeShare(self)
        with self._lock:
            self.members = (*self.members, share)
        return share

    def remove(self, share: TimeShare) -> None:
        with self._lock:
            self.members = tuple(member for member in self.members if member is not share)

    def acquire(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        gate.acquire()

    def release(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False

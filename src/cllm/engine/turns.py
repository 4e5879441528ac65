"""Engines of several models on one machine compute one at a time, each with all threads, in the order they come.

    model A   ▇▇▇▇      ▇▇▇▇      ▇▇▇▇        a step each while both have work, so that neither starves;
    model B       ▇▇▇▇▇▇    ▇▇▇▇▇▇            and each keeps its steps to its part of the target, so that
              └─ one target ─┘                answers of both get their next token in time

A model that is alone has no turns to wait for, and nothing of this runs.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class Turn:
    """One engine's place. Its own thread enters and leaves; others read what it says of itself."""

    def __init__(self, turns: Turns) -> None:
        self.busy = False
        """There is something to compute."""
        self.answering = False
        """Its last step had answers in it, which wait for their next token."""
        self._turns = turns

    def __enter__(self) -> None:
        self._turns.take()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turns.pass_on()

    def rest(self) -> None:
        """There is nothing to compute for now."""
        self.busy = self.answering = False

    def begin(self) -> tuple[float, bool]:
        """A step is about to be planned: its part of the time that all may take together, and whether others answer."""
        self.busy = True
        others = [turn for turn in self._turns.members if turn is not self and turn.busy]
        return 1 / (1 + len(others)), any(turn.answering for turn in others)

    def leave(self) -> None:
        """The engine has ended."""
        self.rest()
        self._turns.remove(self)


class Turns:
    """A lock that is handed to whoever has waited longest."""

    def __init__(self) -> None:
        self.members: tuple[Turn, ...] = ()
        """Replaced as a whole, so that whoever looks needs no lock."""
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    def join(self) -> Turn:
        turn = Turn(self)
        with self._lock:
            self.members = (*self.members, turn)
        return turn

    def remove(self, turn: Turn) -> None:
        with self._lock:
            self.members = tuple(member for member in self.members if member is not turn)

    def take(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        gate.acquire()

    def pass_on(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False

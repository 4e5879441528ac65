"""The one interface through which the scheduler uses the KV cache."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from cllm.kv.events import Listener
from cllm.kv.operations import check_range
from cllm.kv.pins import LostPin, PinMark
from cllm.kv.sequence import KVSequence
from cllm.kv.usage import KVUsage
from cllm.kv.view import KVView

log = logging.getLogger("cllm.kv")

CHECK_SLICE = 1024
"""Units (blocks or tokens) per slice of a check: some milliseconds."""

EvictionListener = Callable[[int, float], None]
"""Called with the number of evicted units and the seconds it took."""


class PositionMismatchError(Exception):
    """Backend and manager disagree on how many positions a sequence has: its content cannot be trusted."""


class KVManager(ABC):
    """Owns all KV memory. Used by one thread; only `usage` and `view` results travel to others.

    Life of a sequence: `admit` -> (`grow` -> step -> `commit`)... -> `release`; `fork` starts twins.

    A call that raises a non-fatal `BackendError` has changed nothing for the sequences. After any other exception only
    `reset` may be called.
    """

    max_tokens: int
    """The longest sequence that fits with the cache otherwise empty."""

    unit_tokens: int = 1
    """Prefixes are shared in multiples of this."""

    commits_each_step = False
    """Whether every step is to be committed, or only those that complete a unit."""

    verifies = False
    """Whether the backend keeps its own count of positions; if not, there is nothing to `verify` or `rewind`."""

    allocation_failures: int = 0
    """Times a sequence had to wait, or was preempted, for lack of memory. Counted by the caller, which alone knows
    whether it is a retry."""

    demand: int = 0
    """Sequences that run or wait, for a manager that allocates in steps. Set before `admit`."""

    token_s: float = 0.0
    """Seconds to compute a token, as the engine measures it; 0: unknown."""

    on_eviction: EvictionListener | None = None

    on_arrival: Callable[[], None] | None = None
    """Called from another thread when a load has ended, or loads have become possible."""

    dropped_tokens: int = 0
    """Tokens dropped by windows, of all sequences."""

    @abstractmethod
    def peek(self, key: bytes, space: bytes = b"") -> int:
        """Tokens of `key` (int32 bytes) that `admit` would find cached for a sequence of `space`. Changes nothing."""

    @abstractmethod
    def fetch(self, sequence: KVSequence) -> bool:
        """Whether a waiting sequence should go on waiting, because a load from another tier will beat computing. Ask
        before `admit`, until it says False; other sequences may be admitted meanwhile. A sequence that stops waiting
        need not say so."""

    @property
    def awaits_memory(self) -> bool:
        """Whether a sequence could not be admitted, but may be once other models give memory back."""
        return False

    def nobody_waits(self) -> None:  # noqa: B027 - most have nothing to do
        """The sequence that could not be admitted is gone."""

    @property
    @abstractmethod
    def loading(self) -> int:
        """Loads under way. They hold memory, which becomes free again."""

    @abstractmethod
    def admit(self, sequence: KVSequence) -> int | None:
        """Give `sequence` memory for its tokens, and what is cached of them; sets and returns `num_computed`.

        At least one token is left to compute. None: there is no room now, and nothing has changed.
        """

    def arrange(self) -> None:  # noqa: B027 - blocks may lie in any order
        """Called before each step, after admissions: place running sequences so that they compute fast."""

    def meet(self, running: KVSequence, waiting: KVSequence) -> None:  # noqa: B027 - most keep everything anyway
        """`waiting` is going to wait for the beginning that it shares with `running`."""

    @abstractmethod
    def grow(self, sequence: KVSequence, count: int) -> bool:
        """Make room to compute `count` more tokens. False: there is none, and nothing has changed."""

    @abstractmethod
    def grow_within_free(self, sequence: KVSequence, count: int) -> int:
        """Make room to compute up to `count` more tokens in free memory only, without evicting anything. Returns how
        many; `truncate` gives the room back."""

    @abstractmethod
    def commit(self, sequence: KVSequence) -> None:
        """A step has computed up to `num_computed`: complete units can be shared from now on."""

    def verify(self, sequence: KVSequence) -> None:  # noqa: B027
        """Compare positions with the backend's; raises `PositionMismatchError`."""

    def rewind(self, sequence: KVSequence) -> None:  # noqa: B027
        """Discard what an unfinished step may have written past `num_computed`."""

    @abstractmethod
    def fork(self, parent: KVSequence, child: KVSequence) -> bool:
        """Let `child`, which has the same tokens and space, start from all that `parent` has computed.

        False: it cannot now, and nothing has changed for either.
        """

    @abstractmethod
    def release(self, sequence: KVSequence, *, keep: bool = True) -> None:
        """Take the sequence's memory back. `keep` leaves what was computed in the cache, evictable."""

    # -- pins and events ---------------------------------------------------------------------------------------

    @abstractmethod
    def pin(self, sequence: KVSequence, mark: PinMark) -> None:
        """Protect the beginning of a sequence, which is about to be released, from eviction. `mark` says how much and
        for how long, and takes the outcome: a refused pin is no error."""

    @abstractmethod
    def unpin(self, name: str, space: bytes | None = None) -> bool:
        """End a pin early. False: there is no such pin (in that space)."""

    @abstractmethod
    def lost_pins(self) -> list[LostPin]:
        """Pins lost in a `reset` and neither renewed nor ended since."""

    @abstractmethod
    def held_names(self) -> tuple[int, set[bytes]]:
        """The names of all cached blocks, and the number of the latest event they include."""

    @abstractmethod
    def listen(self) -> Listener:
        """A listener for blocks stored and removed from now on."""

    # -- operations on a sequence's memory ---------------------------------------------------------------------
    # Positions are places in memory, [0, held). Impossible operations raise `UnsupportedOperationError`. Shared memory
    # never changes. A copy of everything is `fork`.

    @abstractmethod
    def remove_range(self, sequence: KVSequence, start: int, end: int) -> bool:
        """Free positions [start, end), which leaves a hole. False: there is no room for private copies of the shared
        blocks that follow; nothing has changed."""

    @abstractmethod
    def shift(self, sequence: KVSequence, start: int, delta: int) -> None:
        """Add `delta` to all positions from `start` on, to close a hole. Nothing can be computed before."""

    @abstractmethod
    def truncate(self, sequence: KVSequence, length: int) -> int:
        """Discard everything computed from token `length` on. Returns how many tokens stay computed; up to one unit
        fewer, because shared memory is given up in whole units, and fewer where windows or states are known only
        further back."""

    def keep_range(self, sequence: KVSequence, start: int, end: int) -> bool:
        """Free all positions but [start, end), which move to the beginning. False: there is no room to do so now, and
        nothing has changed. If `start` is 0, up to one unit fewer is kept, as in `truncate`."""
        check_range(sequence, start, end)
        if start:
            if not self.remove_range(sequence, 0, start):
                return False
            self.shift(sequence, start, -start)
        if end - start < sequence.held:
            self.truncate(sequence, sequence.dropped + end - start)
        return True

    def copy_range(self, parent: KVSequence, child: KVSequence, start: int, end: int) -> bool:
        """Let `child`, which has the same tokens and space, begin with a copy of positions [start, end) of `parent`.
        Otherwise as `fork` and `keep_range`."""
        check_range(parent, start, end)
        if not self.fork(parent, child):
            return False
        copied = False
        try:
            copied = self.keep_range(child, start, end)
        finally:
            if not copied:
                self.release(child, keep=False)
        return copied

    def roll(self, sequence: KVSequence) -> bool:
        """Drop what is outside the window for the next token. False: there is no room to do so now."""
        window = sequence.window
        if window is None:
            return True
        due = window.dropped_at(sequence.num_computed) - sequence.dropped
        if due > 0:
            start, end = window.keep, window.keep + due
            if not self.remove_range(sequence, start, end):
                return False
            self.shift(sequence, end, -due)
            self.dropped_tokens += due
        return True

    @abstractmethod
    def maintain(self, budget_s: float) -> bool:
        """Between steps or while idle, for about `budget_s`: evict down to the threshold, compact, offload.

        True: there is more to do.
        """

    @abstractmethod
    def upkeep_at(self) -> float | None:
        """When, by the manager's clock, `maintain` next has work to do without further events; None: never."""

    @abstractmethod
    def drain(self, seconds: float) -> None:
        """Shutting down: write what should be kept to the slower tiers, for about `seconds` at most."""

    @abstractmethod
    def reset(self) -> None:
        """The backend's memory is new and empty: every sequence loses its memory. Works in any state."""

    @abstractmethod
    def usage(self) -> KVUsage: ...

    @abstractmethod
    def details(self) -> dict[str, Any]:
        """What `GET /kv` shows beyond the numbers."""

    @abstractmethod
    def view(self) -> KVView:
        """Which sequence or prefix holds each piece of memory."""

    @abstractmethod
    def examine(self) -> Iterator[int]:
        """Check every invariant, piece by piece; raises AssertionError.

        Yields the units checked in each piece. Nothing may change in between.
        """

    def check(self) -> None:
        """All of `examine` at once."""
        deque(self.examine(), maxlen=0)

    def check_in_slices(self) -> Iterator[int]:
        """All of `examine`, pausing after about every `CHECK_SLICE` units; yields how many were checked."""
        seen = 0
        for units in self.examine():
            seen += units
            if seen >= CHECK_SLICE:
                yield seen
                seen = 0

    def _notify_arrival(self) -> None:
        """From other threads, too."""
        if self.on_arrival is not None:
            self.on_arrival()

    def _tell_eviction(self, count: int, seconds: float) -> None:
        """A failing listener must not disturb the cache, which is in the middle of an operation."""
        if self.on_eviction is None:
            return
        try:
            self.on_eviction(count, seconds)
        except Exception:
            log.exception("an eviction listener failed")

"""The one interface through which the scheduler uses the KV cache."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from cllm.errors import UnsupportedOperationError
from cllm.kv.events import Listener
from cllm.kv.pins import LostPin, PinMark
from cllm.kv.sequence import KVSequence
from cllm.kv.usage import KVUsage
from cllm.kv.view import KVView

log = logging.getLogger("cllm.kv")

CHECK_SLICE = 1024
"""Units (blocks or tokens) that a slice of a check looks at, about: some milliseconds."""

EvictionListener = Callable[[int, float], None]
"""Called with the number of evicted units and the seconds it took."""


class PositionMismatchError(Exception):
    """The backend holds another number of positions for a sequence than the manager: its content is not trusted."""


class KVManager(ABC):
    """Owns all KV memory. One thread uses it; only `usage` results travel to others.

    Life of a sequence: `admit` -> (`grow` -> step -> `commit`)... -> `release`, or `fork` for its twins.

    A call that raises a `BackendError` which is not fatal has changed nothing for the sequences. After any other
    exception nothing but `reset` may be called.
    """

    max_tokens: int
    """The longest sequence that can ever be held, all others gone."""

    unit_tokens: int = 1
    """Prefixes are shared in whole multiples of this."""

    verifies = True
    """Whether the backend has an account of its own to compare with; if not, `verify` is not called."""

    allocation_failures: int = 0
    """Times that a sequence had to wait, or to be preempted, for want of memory. Whoever asks counts, because only it
    knows whether it asks again for the same."""

    demand: int = 0
    """Sequences that run or want to, for a manager that takes memory in steps. Whoever admits sets it before."""

    token_s: float = 0.0
    """What computing a token takes, as measured by who computes; 0: not known yet."""

    awaits_memory: bool = False
    """Somebody could not be admitted, but may be once other models have given memory back."""

    on_eviction: EvictionListener | None = None

    on_arrival: Callable[[], None] | None = None
    """Called from another thread when something arrived that a sequence waits for, or may now be looked for."""

    dropped_tokens: int = 0
    """Tokens that windows have dropped, of all sequences."""

    @abstractmethod
    def peek(self, key: bytes, space: bytes = b"") -> int:
        """Tokens of `key` (int32 bytes) that `admit` would find now for a sequence of `space`. Changes nothing."""

    def fetch(self, sequence: KVSequence) -> bool:
        """Whether `sequence`, which waits, has to wait for something of it that is brought from elsewhere, because that
        is there sooner than computed. Asked before `admit`, until the answer is False; other sequences may be admitted
        meanwhile. Whoever does not wait any more need not say so."""
        return False

    @property
    def loading(self) -> int:
        """How many such things are on their way. They hold memory, which comes free again."""
        return 0

    @abstractmethod
    def admit(self, sequence: KVSequence) -> int | None:
        """Give `sequence` memory for its tokens and whatever is cached of them; sets and returns `num_computed`.

        At least one token is left to compute. None means there is no room now: nothing changed.
        """

    @abstractmethod
    def arrange(self) -> None:
        """Admissions are done, a step follows: place what runs so that it computes fast."""

    @abstractmethod
    def grow(self, sequence: KVSequence, count: int) -> bool:
        """Make room to compute `count` more tokens; False means there is none: nothing changed."""

    def stretch(self, sequence: KVSequence, count: int) -> int:
        """Make room to compute up to `count` more tokens, of memory that nothing is in: neither a sequence nor the
        cache loses any for it. How many there is room for. `truncate` gives it back."""
        return 0

    @abstractmethod
    def commit(self, sequence: KVSequence) -> None:
        """A step has computed up to `num_computed`: what is complete may be shared from now on."""

    @abstractmethod
    def verify(self, sequence: KVSequence) -> None:
        """Compare positions with the backend's own; raises `PositionMismatchError`."""

    @abstractmethod
    def rewind(self, sequence: KVSequence) -> None:
        """Forget what an unfinished step may have written past `num_computed`."""

    @abstractmethod
    def fork(self, parent: KVSequence, child: KVSequence) -> bool:
        """Let `child`, which has the same tokens and the same space, start from all that `parent` has computed.

        False means that it cannot, now: nothing changed for either of them.
        """

    @abstractmethod
    def release(self, sequence: KVSequence, *, keep: bool = True) -> None:
        """Take everything back. `keep` leaves the computed part in the cache, evictable."""

    # -- what stays --------------------------------------------------------------------------------------------

    def pin(self, sequence: KVSequence, mark: PinMark) -> None:
        """Keep the beginning of a sequence, which is about to be released, from being evicted. `mark` says how much of
        it, for how long, and, from now on, what came of it: a pin that is refused is no error."""
        mark.refusal = f"{type(self).__name__} has no pins"

    def unpin(self, name: str, space: bytes | None = None) -> bool:
        """End a pin before its time. False: there is none of that name (in that space)."""
        return False

    def lost_pins(self) -> list[LostPin]:
        """Pins that `reset` lost, and that were neither pinned again nor ended since."""
        return []

    def held_names(self) -> tuple[int, set[bytes]]:
        """The names of all blocks in the prefix tree, and the number of the event after which they are so."""
        raise self._cannot("name what it holds")

    def listen(self) -> Listener | None:
        """From now on, what comes into the cache of prefixes and leaves it. None: there is no such cache."""
        return None

    # -- operations on a sequence's memory ---------------------------------------------------------------------
    # Positions are places in memory, [0, held). What cannot be done raises `UnsupportedOperationError`; nothing that
    # others share ever changes. A copy is `fork`.

    def remove_range(self, sequence: KVSequence, start: int, end: int) -> bool:
        """Give the memory of positions [start, end) back, which leaves a hole. False: there is no room to make what
        follows the sequence's own; nothing changed."""
        raise self._cannot("remove a range")

    def shift(self, sequence: KVSequence, start: int, delta: int) -> None:
        """Add `delta` to all positions from `start` on: what follows a hole closes it. Nothing can be computed
        before."""
        raise self._cannot("shift positions")

    def truncate(self, sequence: KVSequence, length: int) -> int:
        """Forget all that was computed from token `length` on. Returns how many stay computed, which may be fewer by
        less than `unit_tokens`: what is shared is given up in whole units."""
        raise self._cannot("truncate a sequence")

    def roll(self, sequence: KVSequence) -> bool:
        """Drop what the window no longer shows to the next token. False: there is no room to do that now."""
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

    def _cannot(self, what: str) -> UnsupportedOperationError:
        return UnsupportedOperationError(f"{type(self).__name__} cannot {what}")

    @abstractmethod
    def maintain(self, budget_s: float) -> bool:
        """Between steps, or while idle: evict down to the threshold, tidy up, for about so many seconds at most.

        True: there is more to do.
        """

    def upkeep_at(self) -> float | None:
        """The time, by the manager's clock, at which `maintain` has something to do though nothing happens until
        then; None: never."""
        return None

    def wind_up(self, seconds: float) -> None:  # noqa: B027 - most have nothing to do
        """No more sequences come: hand over what is to be kept elsewhere, for about so long at most."""

    @abstractmethod
    def reset(self) -> None:
        """The backend's memory is new and empty: every sequence loses what it had. Works in whatever state we are."""

    @abstractmethod
    def usage(self) -> KVUsage: ...

    @abstractmethod
    def details(self) -> dict[str, Any]:
        """What `/kv` shows beyond the numbers."""

    def view(self) -> KVView:
        """A picture of who holds which memory, for who looks at the cache."""
        raise NotImplementedError(f"{type(self).__name__} has no picture of its memory")

    @abstractmethod
    def examine(self) -> Iterator[int]:
        """Look at everything, piece by piece, and raise AssertionError if an invariant is broken.

        Yields how many units each piece had. Nothing may change in between.
        """

    def check(self) -> None:
        """All of `examine` at once."""
        deque(self.examine(), maxlen=0)

    def check_in_slices(self) -> Iterator[int]:
        """All of `examine`, interrupted after every `CHECK_SLICE` units or a little more; yields how many they were."""
        seen = 0
        for units in self.examine():
            seen += units
            if seen >= CHECK_SLICE:
                yield seen
                seen = 0

    def _tell_eviction(self, count: int, seconds: float) -> None:
        """A listener that fails is no fault of the cache, which is in the middle of something."""
        if self.on_eviction is None:
            return
        try:
            self.on_eviction(count, seconds)
        except Exception:
            log.exception("an eviction listener failed")

"""What a manager knows of the disk that keeps its blocks: where they go, what they are called, how it went so far."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable

from cllm.errors import BackendError
from cllm.kv.disk.names import chain
from cllm.kv.disk.store import DiskStore, Space
from cllm.kv.loads import patience
from cllm.kv.usage import TierNumbers

log = logging.getLogger("cllm.kv")

LATENCY_S = 0.005
"""What loading takes whatever its size: another turn of the engine, opening files."""

LEAST_TOKENS = 64
"""Fewer are computed sooner than they are looked for."""

WORTH_TOKENS = 512
"""A prefix of so many tokens is kept, though nobody has used it a second time."""

STRIKES = 3
"""Faults in a row of our own, not of the disk, after which the disk is not used any more."""


class Tier:
    """One model's blocks on disk. Nothing is found or kept until `attach`, which another thread may call."""

    def __init__(
        self,
        store: DiskStore,
        *,
        block_tokens: int,
        block_bytes: int,
        least_tokens: int = LEAST_TOKENS,
        worth_tokens: int = WORTH_TOKENS,
    ) -> None:
        self.store = store
        self.least_blocks = -(-least_tokens // block_tokens)
        self.worth_blocks = -(-worth_tokens // block_tokens)
        self.block_tokens = block_tokens
        self.block_bytes = block_bytes
        self.token_s = 0.0
        """What computing a token takes; 0: not known yet."""
        self.wake: Callable[[], None] | None = None
        """Called from other threads when there is something to take in."""
        self.loads = self.loaded_tokens = self.failed_loads = 0
        self._space: Space | None = None
        self._strikes = 0

    def attach(self, space: Space) -> None:
        """It is known now what the model's blocks are called."""
        if space.block_bytes != self.block_bytes:
            raise ValueError(f"blocks have {self.block_bytes} bytes, those on disk {space.block_bytes}")
        self._space = space
        self.tell()

    @property
    def space(self) -> Space | None:
        """None: nothing can be found or kept, now or at all."""
        space = self._space
        return space if self._strikes < STRIKES and space is not None and space.ready() else None

    def names(self, space: Space, owner: bytes, tokens: array[int] | bytes) -> list[bytes]:
        """Of all whole blocks of a sequence; `owner` is the space of the cache that it belongs to."""
        return self.next_names(space.root(owner), tokens)

    def next_names(self, last: bytes, tokens: array[int] | bytes) -> list[bytes]:
        """Of all whole blocks of what follows the block of that name."""
        return chain(last, tokens, self.block_tokens)

    def patience(self, blocks: int, nbytes: int) -> float | None:
        """How long to wait for so many bytes, which save computing so many blocks. None: it is better not to."""
        expected, computing = self.store.load_seconds(nbytes) + LATENCY_S, self.compute_seconds(blocks)
        return None if blocks < self.least_blocks else patience(expected, computing, measured=self.measured)

    def compute_seconds(self, blocks: int) -> float:
        """0: not known yet."""
        return blocks * self.block_tokens * self.token_s

    @property
    def measured(self) -> bool:
        """Whether it is known how fast the disk is. As long as it is not, it is tried."""
        return self.store.read_speed_known

    @property
    def pays(self) -> bool:
        """Whether a block is loaded sooner than computed, once loading has begun, as far as that is known."""
        if self.token_s == 0.0 or not self.measured:
            return True
        return self.block_bytes / self.store.read_bytes_per_s < self.compute_seconds(1)

    def note_load(self, tokens: int, asked: int) -> None:
        """A load is over."""
        self.loads += 1
        self.loaded_tokens += tokens
        self.failed_loads += tokens < asked

    def tell(self) -> None:
        if self.wake is not None:
            self.wake()

    def fault(self, doing: str, error: Exception) -> None:
        """Something of ours failed, of which no request may suffer, unless all memory is in doubt."""
        if isinstance(error, BackendError) and error.fatal:
            raise error
        self._strikes += 1
        last = "; the disk is not used any more" if self._strikes >= STRIKES else ""
        log.error("%s failed: %s%s", doing, error or type(error).__name__, last, exc_info=error)

    def worked(self) -> None:
        self._strikes = 0

    def numbers(self, loading: int) -> TierNumbers:
        store, space = self.store, self._space
        return TierNumbers(
            self.loads,
            self.loaded_tokens,
            self.failed_loads,
            space.written_bytes if space is not None else 0,
            space.read_bytes if space is not None else 0,
            store.writer.queued_bytes,
            loading,
            store.kept_bytes,
            store.limit,
        )

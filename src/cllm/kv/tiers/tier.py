"""What the disk tier and the host tier have in common: does loading beat computing, how many loads, what failed."""

from __future__ import annotations

import logging

from cllm.errors import BackendError
from cllm.kv.throughput import Throughput

log = logging.getLogger("cllm.kv")

LEAST_TOKENS = 64
"""Shorter prefixes are recomputed: that is faster than looking them up."""

STRIKES = 3
"""After this many faults in a row the tier is switched off."""

UNKNOWN_COMPUTE_FACTOR = 4.0
"""While the speed of computing is unknown, a load may take this many times as long as expected."""

GRACE_S = 0.1
"""How much later than computing a load may be before its sequence stops waiting."""


class Tier:
    place: str
    """What log lines call it."""

    def __init__(self, block_tokens: int, block_bytes: int, least_tokens: int, speed: Throughput) -> None:
        """`speed`: of loading, as measured by whoever does it. Until it is known, loads are tried."""
        self.speed = speed
        self.block_tokens = block_tokens
        self.block_bytes = block_bytes
        self.least_blocks = -(-least_tokens // block_tokens)
        self.token_s = 0.0
        """Seconds to compute a token; 0: unknown."""
        self.loads = self.loaded_tokens = self.failed_loads = 0
        self._strikes = 0

    @property
    def working(self) -> bool:
        return self._strikes < STRIKES

    @property
    def pays(self) -> bool:
        """Whether loading a block beats computing it, as far as is known."""
        if self.token_s == 0.0 or not self.speed.is_known:
            return True
        return self.speed.seconds(self.block_bytes) < self.compute_seconds(1)

    def compute_seconds(self, blocks: int) -> float:
        """0: unknown."""
        return blocks * self.block_tokens * self.token_s

    def _wait_limit(self, blocks: int, load_s: float) -> float | None:
        """How long to wait for a load that should take `load_s`. None: compute instead."""
        compute_s = self.compute_seconds(blocks)
        if blocks < self.least_blocks or (compute_s and self.speed.is_known and load_s >= compute_s):
            return None
        return max(2 * load_s, compute_s) + GRACE_S if compute_s else UNKNOWN_COMPUTE_FACTOR * load_s + 1.0

    def note_load(self, tokens: int, asked: int) -> None:
        """A load has ended."""
        self.loads += 1
        self.loaded_tokens += tokens
        self.failed_loads += tokens < asked

    def fault(self, doing: str, error: Exception) -> None:
        """Something failed. Requests go on without the tier, unless the error leaves the KV memory in doubt."""
        if isinstance(error, BackendError) and error.fatal:
            raise error
        self._strikes += 1
        last = "" if self.working else f"; {self.place} is no longer used"
        log.error("%s failed: %s%s", doing, error or type(error).__name__, last, exc_info=error)

    def worked(self) -> None:
        self._strikes = 0

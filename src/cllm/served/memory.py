"""How much memory each of several models gets, and what cannot fit, told before anything is loaded.

The machine's memory has one budget, and so has that of every GPU that models lie on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from cllm.config import Config
from cllm.errors import ConfigError
from cllm.kv.ledger import MemoryLedger
from cllm.kv.limits import extent_size
from cllm.kv.memory import MIB
from cllm.machine import Room, mib, read_rooms, tightest
from cllm.on_torch import GPU_KV_FRACTION, gpu_room
from cllm.served.entries import Served

log = logging.getLogger("cllm")

SHARE = 0.5
"""Of the memory that is free at the start: what several models take together unless the configuration says more."""
IMITATED_CONTEXTS = 256
"""K/V memory that is only imitated is no larger than so many contexts."""
ADVICE = "raise resources.max_memory_mb, lower resources.max_context_length, or use a smaller model"


class Shares:
    def __init__(self, models: Sequence[Served], budget: int, device: str = "cpu") -> None:
        self.budget = budget
        self._models = models
        self._device = device

    def fixed(self, served: Served) -> int:
        """Bytes that are taken as long as it is loaded."""
        return served.estimate.weights + (0 if served.estimate.is_elastic else self.most_kv(served))

    def least(self, served: Served) -> int:
        """Bytes of K/V that an elastic one is entitled to: one context, in whole extents, or all that it can have."""
        found = served.estimate
        if not found.is_elastic:
            return 0
        block_bytes = found.token_bytes * served.config.resources.block_size
        blocks = self.most_kv(served) // block_bytes
        extent = extent_size(blocks, block_bytes) * block_bytes
        return min(-(-found.context_bytes // extent) * extent, blocks * block_bytes)

    def most_kv(self, served: Served) -> int:
        """Bytes of K/V that it can have at most. What cannot shrink gets an equal part of what the weights leave, or,
        if that is less, one context; then not all of them are loaded at once."""
        asked = served.config.resources.kv_cache_max_memory_mb
        room = self.budget - served.estimate.weights
        if not served.estimate.is_elastic:
            equal = (self.budget - sum(each.estimate.weights for each in self._models)) // len(self._models)
            room = max(equal, min(room, served.estimate.context_bytes))
        if served.estimate.kind == "fake":
            room = min(room, IMITATED_CONTEXTS * served.estimate.context_bytes)
        return max(0, room if asked is None else min(room, int(asked * MIB)))

    def _needed(self, served: Served) -> int:
        return served.estimate.weights + served.estimate.context_bytes

    def check(self) -> None:
        """Refuse at the start what can never be."""
        for served in self._models:
            self.check_one(served)
        together = [served for served in self._models if served.at_start or served.entry.pinned]
        if sum(map(self._reserved, together)) > self.budget:
            parts = "; ".join(map(self._estimate, together))
            raise ConfigError(
                f"{len(together)} models are to be loaded together, but do not fit into {self._limit}: {parts}; "
                f"set load: first_use for some of them, or {ADVICE}"
            )

    def check_one(self, served: Served) -> None:
        if self._needed(served) > self.budget or self.most_kv(served) < served.estimate.context_bytes:
            raise ConfigError(f"{self._estimate(served)}: more than {self._limit}; {ADVICE}")

    def _reserved(self, served: Served) -> int:
        return self.fixed(served) + self.least(served)

    def no_room(self, served: Served) -> str:
        loaded = [each for each in self._models if each.account is not None and each is not served]
        parts = ", ".join(
            f"{each.name} ({mib(self._reserved(each))}, {'pinned' if each.entry.pinned else 'in use'})"
            for each in loaded
        )
        return f"{self._estimate(served)}; of {self._limit} that is not free: {parts}; try again later"

    def _estimate(self, served: Served) -> str:
        found = served.estimate
        return (
            f"{served.name} needs {mib(found.weights)} for its weights and at least {mib(found.context_bytes)} for the "
            f"K/V of one context of {found.context} tokens"
        )

    @property
    def _limit(self) -> str:
        where = "" if self._device == "cpu" else f" on {self._device}"
        return f"the {mib(self.budget)} that all models may take together{where} (resources.max_memory_mb)"


class Memory:
    """The machine's or a GPU's: who has how much of it."""

    def __init__(self, config: Config, models: Sequence[Served], device: str) -> None:
        rooms, share = (read_rooms(), SHARE) if device == "cpu" else ([gpu_room(device)], GPU_KV_FRACTION)
        self.device = device
        self.ledger = MemoryLedger(_choose_budget(config, rooms, share))
        self.shares = Shares(models, self.ledger.budget, device)
        self.shares.check()


def choose_memories(config: Config, models: Sequence[Served]) -> dict[str, Memory]:
    """By device."""
    devices = dict.fromkeys(served.estimate.device for served in models)
    return {
        device: Memory(config, [served for served in models if served.estimate.device == device], device)
        for device in devices
    }


def _choose_budget(config: Config, rooms: Sequence[Room], share: float) -> int:
    asked = config.resources.max_memory_mb
    if asked is None:
        room = tightest(rooms)
        budget = int(room.free * share)
        log.info("memory of all models: %s (%g of %s)", mib(budget), share, room)
        return budget
    budget = int(asked * MIB)
    log.info("memory of all models: %s (resources.max_memory_mb)", mib(budget))
    hard = [room for room in rooms if room.hard]
    if hard and budget > tightest(hard).free:
        raise ConfigError(f"resources.max_memory_mb is {asked:.12g}, more than {tightest(hard)}; lower it")
    if budget > tightest(rooms).free:
        log.warning("resources.max_memory_mb is %g, more than %s: expect it to be slow", asked, tightest(rooms))
    return budget

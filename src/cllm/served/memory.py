"""How much memory each of several models gets. What cannot fit is refused before anything is loaded.

The machine's memory has one budget, and each GPU in use has its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cllm.config import Config
from cllm.errors import ConfigError
from cllm.kv.ledger import MemoryLedger
from cllm.kv.paged.resizing import extent_size
from cllm.kv.sizing import MIB
from cllm.loading.context import context_within
from cllm.loading.torch_model import GPU_KV_FRACTION, gpu_room
from cllm.machine import MemoryLimit, mib, read_memory_limits, tightest
from cllm.machine.resident import resident_bytes
from cllm.served.entries import ServedModel

log = logging.getLogger("cllm")

SHARE = 0.5
"""The share of the free memory that all models may take together by default."""
CONTEXT_SHARE = 0.5
FAKE_CONTEXTS = 256
"""The K/V memory of the fake backend holds at most this many contexts."""
ADVICE = "raise resources.max_memory_mb, lower resources.max_context_length, or use a smaller model"


class DeviceMemory:
    """The machine's or a GPU's memory, and what each model has of it."""

    def __init__(self, config: Config, models: Sequence[ServedModel], device: str) -> None:
        limits, share = (read_memory_limits(), SHARE) if device == "cpu" else ([gpu_room(device)], GPU_KV_FRACTION)
        self.ledger = MemoryLedger(_choose_budget(config, limits, share))
        self.budget = self.ledger.budget
        self._all = models
        self._device = device
        for served in self._models:
            self.choose_context(served)
        self._check()

    def choose_context(self, served: ServedModel) -> None:
        """A context that nobody asked for takes at most `CONTEXT_SHARE` of an equal part of the memory for K/V, since
        an elastic model always has room reserved for it."""
        found = served.estimate
        if served.config.resources.max_context_length is None:
            part = int(max(self._equal_part, 0) * (CONTEXT_SHARE if found.is_elastic else 1))
            tokens = max(part - found.local_bytes, 0) // found.token_bytes
            served.estimate = replace(found, context=context_within(found.context, tokens))

    @property
    def _models(self) -> list[ServedModel]:
        """The models on this device: a model whose files have changed may run on another one."""
        return [served for served in self._all if served.estimate.device == self._device]

    @property
    def _equal_part(self) -> int:
        return (self.budget - sum(each.estimate.weights for each in self._models)) // len(self._models)

    def fixed(self, served: ServedModel) -> int:
        """Bytes that it takes as long as it is loaded."""
        return served.estimate.weights + (0 if served.estimate.is_elastic else self.most_kv(served))

    def least(self, served: ServedModel) -> int:
        """K/V bytes that are always reserved for an elastic model: one context in whole extents, or all it can have."""
        found = served.estimate
        if not found.is_elastic:
            return 0
        block_bytes = found.token_bytes * served.config.resources.block_size
        blocks = self.most_kv(served) // block_bytes
        extent = extent_size(blocks, block_bytes) * block_bytes
        return min(-(-found.context_bytes // extent) * extent, blocks * block_bytes)

    def most_kv(self, served: ServedModel) -> int:
        """The most K/V bytes it can have. A model that is not elastic gets an equal part of what the weights leave, but
        at least one context; then not all models can be loaded at once."""
        asked = served.config.resources.kv_cache_max_memory_mb
        room = self.budget - served.estimate.weights
        if not served.estimate.is_elastic:
            room = max(self._equal_part, min(room, served.estimate.context_bytes))
        if served.estimate.kind == "fake":
            room = min(room, FAKE_CONTEXTS * served.estimate.context_bytes)
        return max(0, room if asked is None else min(room, int(asked * MIB)))

    def _needed(self, served: ServedModel) -> int:
        return served.estimate.weights + served.estimate.context_bytes

    def _check(self) -> None:
        """Raise `ConfigError` for models that can never fit."""
        for served in self._models:
            self.check_one(served)
        together = [served for served in self._models if served.at_start or served.entry.pinned]
        if sum(map(self._reserved, together)) > self.budget:
            parts = "; ".join(map(self._estimate, together))
            raise ConfigError(
                f"{len(together)} models should be loaded together, but do not fit into {self._limit}: {parts}; "
                f"set load: first_use for some of them, or {ADVICE}"
            )

    def check_one(self, served: ServedModel) -> None:
        if self._needed(served) > self.budget or self.most_kv(served) < served.estimate.context_bytes:
            raise ConfigError(f"{self._estimate(served)}: more than {self._limit}; {ADVICE}")

    def _reserved(self, served: ServedModel) -> int:
        return self.fixed(served) + self.least(served)

    @property
    def evictable(self) -> list[ServedModel]:
        """Loaded models that may be unloaded."""
        return [each for each in self._models if each.account is not None and not each.entry.pinned]

    def least_recently_used(self) -> ServedModel | None:
        idle = [served for served in self.evictable if not (served.is_wanted or served.changing)]
        return min(idle, key=lambda served: served.last_used, default=None)

    def may_have_room(self, served: ServedModel) -> bool:
        """Whether it fits once all models are unloaded that may be."""
        freed = sum(each.account.needed for each in self.evictable if each.account is not None)
        return self.ledger.fits(self._reserved(served) - freed)

    def no_room(self, served: ServedModel) -> str:
        loaded = [each for each in self._models if each.account is not None and each is not served]
        parts = ", ".join(
            f"{each.name} ({mib(self._reserved(each))}, {'pinned' if each.entry.pinned else 'in use'})"
            for each in loaded
        )
        return f"{self._estimate(served)}, but {self._limit} are in use by {parts}; try again later"

    def _estimate(self, served: ServedModel) -> str:
        found = served.estimate
        return (
            f"{served.name} needs {mib(found.weights)} for its weights and at least {mib(found.context_bytes)} for the "
            f"K/V of one context of {found.context} tokens"
        )

    @property
    def _limit(self) -> str:
        where = "" if self._device == "cpu" else f" on {self._device}"
        return f"the {mib(self.budget)} that all models may take together{where} (resources.max_memory_mb)"


def choose_memories(config: Config, models: Sequence[ServedModel]) -> dict[str, DeviceMemory]:
    """By device."""
    devices = dict.fromkeys(served.estimate.device for served in models)
    return {device: DeviceMemory(config, models, device) for device in devices}


def say_what_is_held(memories: Mapping[str, DeviceMemory], before: int) -> None:
    """`before`: bytes of the process before any model was loaded."""
    held, memory = resident_bytes(), memories.get("cpu")
    counted = sum(each.fixed + each.kv for each in memory.ledger.account_status()) if memory else 0
    log.info(
        "the process holds %s: %s of weights and K/V (resources.max_memory_mb), %s from before any model, and %s of "
        "tokenizers, vocabularies and buffers, which no limit counts",
        *(mib(size) for size in (held, counted, before, max(0, held - counted - before))),
    )


def _choose_budget(config: Config, limits: Sequence[MemoryLimit], share: float) -> int:
    asked = config.resources.max_memory_mb
    if asked is None:
        limit = tightest(limits)
        budget = int(limit.free * share)
        log.info("memory for all models: %s (%g of %s)", mib(budget), share, limit)
        return budget
    budget = int(asked * MIB)
    log.info("memory for all models: %s (resources.max_memory_mb)", mib(budget))
    hard = [limit for limit in limits if limit.hard]
    if hard and budget > tightest(hard).free:
        raise ConfigError(f"resources.max_memory_mb is {asked:.12g}, more than {tightest(hard)}; lower it")
    if budget > tightest(limits).free:
        log.warning("resources.max_memory_mb is %g, more than %s: expect it to be slow", asked, tightest(limits))
    return budget

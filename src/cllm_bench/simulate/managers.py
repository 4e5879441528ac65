"""The KV managers of the product, with memory for as many tokens as the settings say, and nothing behind it."""

from __future__ import annotations

from cllm.errors import ConfigError
from cllm.kv.manager import KVManager
from cllm.kv.ops import BlockGeometry, SlotGeometry
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.slots.manager import SlotKVManager
from cllm_bench.simulate.backend import SimulatedBackend, SimulatedBlocks, SimulatedSlots
from cllm_bench.simulate.settings import Settings


def make_manager(settings: Settings, backend: SimulatedBackend) -> KVManager:
    if settings.policy == "slots":
        return _make_slots(settings, backend)
    # The clock stands still: it would only time evictions, and have free spans counted, which takes longer the
    # more blocks there are.
    return PagedKVManager(
        SimulatedBlocks(),
        BlockGeometry(settings.blocks, settings.block_size),
        bytes_per_token=backend.cost.kv_bytes_per_token,
        eviction_threshold=settings.threshold,
        eviction_policy=settings.eviction,
        watermark=settings.watermark,
        clock=lambda: 0.0,
    )


def _make_slots(settings: Settings, backend: SimulatedBackend) -> SlotKVManager:
    """Slots for all that run, or as many as fit; what is left of the memory stores finished sequences."""
    per_slot = settings.context or settings.kv_tokens // settings.max_running
    slots = min(settings.max_running, settings.kv_tokens // per_slot if per_slot else 0)
    if slots < 1:
        raise ConfigError(
            f"{settings.kv_tokens} tokens of memory do not hold one slot of {settings.context} tokens; "
            "make max-running or context smaller, or --blocks larger"
        )
    geometry = SlotGeometry(slots, per_slot)
    backend.allocate(geometry)
    assert isinstance(backend.ops, SimulatedSlots)
    bytes_per_token = backend.cost.kv_bytes_per_token
    return SlotKVManager(
        backend.ops,
        geometry,
        bytes_per_token=bytes_per_token,
        store_bytes=(settings.kv_tokens - geometry.tokens) * bytes_per_token,
        eviction_threshold=settings.threshold,
        eviction_policy=settings.eviction,
        block_tokens=settings.block_size,
        clock=lambda: 0.0,
    )

"""From the name of a policy to its KV manager. All of them get the same number of tokens of memory."""

from __future__ import annotations

from collections.abc import Callable

from cllm.engine.request import Sequence
from cllm.errors import ConfigError
from cllm.kv.ops import BlockGeometry, SlotGeometry
from cllm.kv.sequence import KVSequence
from cllm_bench.simulate.backend import SimulatedBackend, SimulatedSlots
from cllm_bench.simulate.contiguous import ContiguousKVManager, Tidying
from cllm_bench.simulate.managers import RollingWindow, SimulatedManager, SimulatedPaged, SimulatedSlotManager
from cllm_bench.simulate.settings import Settings

_TIDYING: dict[str, Tidying] = {"contiguous": "none", "hole-filling": "holes", "compaction": "compact"}


def make_manager(settings: Settings, backend: SimulatedBackend) -> SimulatedManager:
    bytes_per_token = backend.cost.kv_bytes_per_token
    policy = settings.policy
    if policy in _TIDYING:
        return ContiguousKVManager(
            settings.kv_tokens,
            bytes_per_token=bytes_per_token,
            tidying=_TIDYING[policy],
            reserve=_reservation(settings.reserve),
        )
    if policy == "slots":
        return _make_slots(settings, backend)
    geometry = BlockGeometry(settings.blocks, settings.block_size)
    if policy == "window":
        return _make_window(settings, geometry, bytes_per_token)
    return SimulatedPaged(
        geometry,
        bytes_per_token=bytes_per_token,
        sharing=policy == "paged+prefix",
        eviction_threshold=settings.threshold,
        eviction_policy=settings.eviction,
        watermark=settings.watermark,
    )


def window_of(settings: Settings) -> int | None:
    """How far back a token reads at most."""
    return settings.window + settings.sinks if settings.policy == "window" else None


def _make_window(settings: Settings, geometry: BlockGeometry, bytes_per_token: int) -> RollingWindow:
    manager = RollingWindow(
        geometry,
        bytes_per_token=bytes_per_token,
        watermark=settings.watermark,
        window=settings.window,
        sinks=settings.sinks,
    )
    if manager.blocks_per_sequence > geometry.blocks:
        raise ConfigError(
            f"window={settings.window}: one sequence needs {manager.blocks_per_sequence} blocks, there are "
            f"{geometry.blocks}; make it smaller, or --blocks larger"
        )
    return manager


def _make_slots(settings: Settings, backend: SimulatedBackend) -> SimulatedSlotManager:
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
    return SimulatedSlotManager(
        backend.ops,
        geometry,
        bytes_per_token=bytes_per_token,
        store_bytes=(settings.kv_tokens - geometry.tokens) * bytes_per_token,
        eviction_threshold=settings.threshold,
        eviction_policy=settings.eviction,
        block_tokens=settings.block_size,
        clock=lambda: 0.0,
    )


def _reservation(reserve: str) -> Callable[[KVSequence], int]:
    """How long a sequence is taken to become, given how its answer's length is guessed."""
    fixed = int(reserve) if reserve.isdigit() else None

    def expected(sequence: KVSequence) -> int:
        assert isinstance(sequence, Sequence)
        answer = sequence.max_length - sequence.n_prompt
        if fixed is not None:
            answer = max(answer, fixed)
        elif reserve == "pow2":
            answer = 1 << (answer - 1).bit_length()
        return sequence.n_prompt + answer

    return expected

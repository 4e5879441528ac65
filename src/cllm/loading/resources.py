"""How many compute threads and how much K/V memory a model gets.

Decided before the weights are loaded, so that a model that cannot fit is refused with one line instead of being killed
by the system half-way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from cllm.config import Config
from cllm.config.schema import ResourcesConfig
from cllm.errors import ConfigError, ModelError
from cllm.kv.groups import GroupCost, KVLayout
from cllm.kv.paged.local import MOST_STATES, LocalShape, SnapshotLimits, most_blocks
from cllm.kv.sizing import MIB
from cllm.machine import Cpus, MemoryLimit, default_threads, mib, tightest
from cllm.models.spec import ModelSpec

log = logging.getLogger("cllm")

NEARLY_ALL = 0.9
"""A cache that takes more of a hard limit than this leaves too little for buffers, requests and Python."""


@dataclass(frozen=True, slots=True)
class Weights:
    name: str
    """The file's name."""
    size: int
    """Bytes they take in memory."""
    mapped: bool = False
    """They are pages of the file, which the system may drop and read again."""


def choose_threads(asked: int | None, cpus: Cpus) -> int:
    """As many as configured, or as suit the CPUs that this process may use."""
    if asked is None:
        threads = default_threads(cpus)
        log.info("threads: %d (%s)", threads.count, threads.reason)
        return threads.count
    log.info("threads: %d (backend.threads)", asked)
    if asked > cpus.usable:
        why = cpus.limit() or f"the machine has {cpus.machine}"
        log.warning("backend.threads is %d, more than there are CPUs: %s", asked, why)
    return asked


def kv_bytes_per_token(settings: ResourcesConfig, spec: ModelSpec) -> int:
    """In all layers."""
    return spec.kv_bytes_per_token(settings.kv_type_k, settings.kv_type_v)


def kv_layout(config: Config, spec: ModelSpec, *, frees_windows: bool, in_slots: bool = False) -> KVLayout:
    """How K and V are laid out. `frees_windows`: whether the backend can keep those of layers with a window apart;
    `in_slots`: whether it keeps states with a sequence's slot."""
    settings = config.resources
    types, apart = (settings.kv_type_k, settings.kv_type_v), frees_windows and config.kv.free_behind_windows
    return spec.kv_layout(*types, settings.block_size, apart=apart, with_states=not in_slots)


def local_shape(config: Config, layout: KVLayout, step_tokens: int) -> LocalShape | None:
    """`step_tokens`: most tokens of a prompt that a step computes by default."""
    state = 0 if layout.states is None else layout.states.cells
    limits = SnapshotLimits(config.kv.snapshots.most, config.kv.snapshots.share)
    if layout.local is None:
        return LocalShape(state=state, limits=limits) if state else None
    ahead = config.scheduler.max_step_tokens or step_tokens
    return LocalShape(layout.local.window, layout.local.cells, ahead, state, layout.local.reach, limits)


def local_bytes(shape: LocalShape | None, layout: KVLayout, context: int) -> int:
    """What local layers and states take for one sequence, however long it is."""
    return 0 if shape is None else window_bytes(shape, layout, context) + state_bytes(shape, layout)


def window_bytes(shape: LocalShape, layout: KVLayout, context: int) -> int:
    blocks = min(most_blocks(shape, layout.block_size), -(-context // layout.block_size))
    return blocks * shape.cells * layout.cell_bytes


def state_bytes(shape: LocalShape, layout: KVLayout) -> int:
    return MOST_STATES * shape.state * layout.cell_bytes


def group_costs(layout: KVLayout, shape: LocalShape | None, context: int, in_slot: int = 0) -> tuple[GroupCost, ...]:
    """What each group takes. `in_slot`: bytes of a slot's state."""
    full, local, states = layout.groups[0], layout.local, layout.states
    costs = [GroupCost("full", len(full.layers), full.window, layout.token_bytes, None)]
    if shape is not None and local is not None:
        most = window_bytes(shape, layout, context)
        costs.append(GroupCost("window", len(local.layers), local.window, layout.local_bytes, most))
    if shape is not None and states is not None:
        costs.append(GroupCost("state", len(states.layers), 0, 0, state_bytes(shape, layout)))
    if in_slot:
        costs.append(GroupCost("state", 0, 0, 0, in_slot))
    return tuple(costs)


def check_local_room(budget: int, windows: int, states: int, full: int) -> None:
    """Raise if not even one sequence would fit, of which the full layers have a fair part. `full`: what those take for
    a whole context."""
    needed = windows + states
    if needed + min(needed, full) <= budget:
        return
    takes = {"with a sliding window": windows, "that carry a state": states}
    alone = " and ".join(f"those {what} {mib(size)}" for what, size in takes.items() if size)
    remedy = ", or lower scheduler.max_step_tokens" if windows else ""
    raise ConfigError(
        f"the KV budget is {mib(budget)}, but for a sequence some layers take memory however short it is, {alone}, and "
        f"at least {mib(min(needed, full))} must be left for the others; raise resources.kv_cache_max_memory_mb{remedy}"
    )


def choose_kv_bytes(settings: ResourcesConfig, weights: Weights, limits: Sequence[MemoryLimit]) -> int:
    """The K/V budget. Raises `ModelError` or `ConfigError` where a hard limit leaves no room."""
    asked = settings.kv_cache_max_memory_mb
    if settings.max_memory_mb is not None:
        limit = int(settings.max_memory_mb * MIB)
        limits = [*limits, MemoryLimit("resources.max_memory_mb", limit, limit, hard=True, counts_mapped=True)]
    _check_weights(weights, limits)
    if asked is None:
        return _share(settings.kv_memory_fraction, weights, limits)
    budget = int(asked * MIB)
    log.info("KV cache: %s (resources.kv_cache_max_memory_mb)", mib(budget))
    _check_asked(f"resources.kv_cache_max_memory_mb is {asked:.12g}", budget, weights, limits)
    return budget


def _share(fraction: float, weights: Weights, limits: Sequence[MemoryLimit]) -> int:
    limit = tightest(limits)
    left = limit.free - weights.size
    budget = int(left * fraction)
    if budget < 1:
        raise ConfigError(
            f"{weights.name} takes {mib(weights.size)} of {limit}, which leaves nothing for the KV cache; use a "
            "smaller model, or set resources.kv_cache_max_memory_mb to start anyway"
        )
    log.info("KV cache: %s (%g of %s, less %s of weights)", mib(budget), fraction, limit, mib(weights.size))
    if limit.hard and fraction > NEARLY_ALL:
        log.warning(
            "resources.kv_memory_fraction is %g, which leaves too little of %s for anything else; use at most %g",
            *(fraction, limit.name, NEARLY_ALL),
        )
    return budget


def _check_weights(weights: Weights, limits: Sequence[MemoryLimit]) -> None:
    if hard := [limit for limit in limits if limit.hard and _held(weights, limit) > limit.free]:
        raise ModelError(
            f"the weights of {weights.name} take {mib(weights.size)}, more than {tightest(hard)}; "
            "raise the limit or use a smaller model"
        )
    limit = tightest(limits)
    if weights.size > limit.free:
        log.warning(
            "the weights of %s take %s, more than %s: expect it to be slow", weights.name, mib(weights.size), limit
        )


def _check_asked(setting: str, budget: int, weights: Weights, limits: Sequence[MemoryLimit]) -> None:
    def left(limit: MemoryLimit) -> int:
        return limit.free - _held(weights, limit)

    hard = [limit for limit in limits if limit.hard]
    narrowest = min(hard, key=left, default=None)
    if narrowest is not None and budget > left(narrowest):
        most = left(narrowest) // MIB
        advice = f"set it to at most {most}" if most > 0 else "use a smaller model"
        raise ConfigError(
            f"{setting}, but {narrowest.name} of {mib(narrowest.limit)} has {mib(max(0, left(narrowest)))} left after "
            f"the weights ({mib(_held(weights, narrowest))}); {advice}, or raise the limit"
        )
    limit = tightest(limits)
    if budget + weights.size > limit.free:
        log.warning("%s and the weights take %s, together more than %s", setting, mib(weights.size), limit)
    elif narrowest is not None and budget > NEARLY_ALL * left(narrowest):
        log.warning("%s: with the weights, that leaves hardly anything of %s", setting, narrowest)


def _held(weights: Weights, limit: MemoryLimit) -> int:
    """Bytes of the weights that count towards a limit: all, unless they are mapped and it does not count mappings."""
    return weights.size if limit.counts_mapped or not weights.mapped else 0

"""How much of the machine a model gets: compute threads and K/V memory, with the limit that decided.

The numbers are taken before the weights are loaded, so that what cannot fit is refused with one line instead of being
ended by the system half way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from cllm.config.tree import ResourcesConfig
from cllm.errors import ConfigError, ModelError
from cllm.kv.memory import MIB
from cllm.machine import Cpus, Room, default_threads, mib, tightest

log = logging.getLogger("cllm")

NEARLY_ALL = 0.9
"""A cache that takes more of a hard limit than this leaves too little to buffers, requests and Python."""


@dataclass(frozen=True, slots=True)
class Weights:
    name: str
    """Of the file."""
    size: int
    """Bytes they take in memory."""
    mapped: bool = False
    """They are the file's own pages: the system may drop them, and then reads them again."""


def choose_threads(asked: int | None, cpus: Cpus) -> int:
    """As many as the user wants, or as the CPUs that this process may use are good for. The log says which."""
    if asked is None:
        threads = default_threads(cpus)
        log.info("threads: %d (%s)", threads.count, threads.reason)
        return threads.count
    log.info("threads: %d (backend.threads)", asked)
    if asked > cpus.usable:
        why = cpus.limit() or f"the machine has {cpus.machine}"
        log.warning("backend.threads is %d, more than the CPUs there are for them: %s", asked, why)
    return asked


def choose_kv_bytes(settings: ResourcesConfig, weights: Weights, rooms: Sequence[Room]) -> int:
    """The K/V budget. Raises `ModelError` or `ConfigError` for what a hard limit leaves no room for."""
    asked = settings.kv_cache_max_memory_mb
    if settings.max_memory_mb is not None:
        limit = int(settings.max_memory_mb * MIB)
        rooms = [*rooms, Room("resources.max_memory_mb", limit, limit, hard=True, counts_mapped=True)]
    _check_weights(weights, rooms)
    if asked is None:
        return _share(settings.kv_memory_fraction, weights, rooms)
    budget = int(asked * MIB)
    log.info("KV cache: %s (resources.kv_cache_max_memory_mb)", mib(budget))
    _check_asked(f"resources.kv_cache_max_memory_mb is {asked:.12g}", budget, weights, rooms)
    return budget


def _share(fraction: float, weights: Weights, rooms: Sequence[Room]) -> int:
    room = tightest(rooms)
    left = room.free - weights.size
    budget = int(left * fraction)
    if budget < 1:
        raise ConfigError(
            f"{weights.name} takes {mib(weights.size)} of {room}, so that nothing is left for the KV cache; use a "
            "smaller model, or set resources.kv_cache_max_memory_mb to start anyway"
        )
    log.info("KV cache: %s (%g of %s, less %s of weights)", mib(budget), fraction, room, mib(weights.size))
    if room.hard and fraction > NEARLY_ALL:
        log.warning(
            "resources.kv_memory_fraction is %g: %s leaves too little beside it; use %g at most",
            *(fraction, room.name, NEARLY_ALL),
        )
    return budget


def _check_weights(weights: Weights, rooms: Sequence[Room]) -> None:
    if hard := [room for room in rooms if room.hard and _held(weights, room) > room.free]:
        raise ModelError(
            f"the weights of {weights.name} take {mib(weights.size)}, more than {tightest(hard)}; "
            "raise the limit or use a smaller model"
        )
    room = tightest(rooms)
    if weights.size > room.free:
        log.warning(
            "the weights of %s take %s, more than %s: expect it to be slow", weights.name, mib(weights.size), room
        )


def _check_asked(setting: str, budget: int, weights: Weights, rooms: Sequence[Room]) -> None:
    def left(room: Room) -> int:
        return room.free - _held(weights, room)

    hard = [room for room in rooms if room.hard]
    narrowest = min(hard, key=left, default=None)
    if narrowest is not None and budget > left(narrowest):
        most = left(narrowest) // MIB
        advice = f"set it to {most} at most" if most > 0 else "use a smaller model"
        raise ConfigError(
            f"{setting}, but beside the weights ({mib(_held(weights, narrowest))}) {narrowest.name} of "
            f"{mib(narrowest.limit)} leaves {mib(max(0, left(narrowest)))}; {advice}, or raise the limit"
        )
    room = tightest(rooms)
    if budget + weights.size > room.free:
        log.warning("%s and the weights take %s: together more than %s", setting, mib(weights.size), room)
    elif narrowest is not None and budget > NEARLY_ALL * left(narrowest):
        log.warning("%s: hardly anything of %s is left beside it and the weights", setting, narrowest)


def _held(weights: Weights, room: Room) -> int:
    """What of the weights a limit cannot do without: all, unless they are mapped and it does not count mappings."""
    return weights.size if room.counts_mapped or not weights.mapped else 0

"""What is simulated: one record of settings, how it is written on the command line, and how sweeps vary it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from cllm.backends.base import BackendTraits
from cllm.config import SchedulerConfig
from cllm.errors import ConfigError
from cllm.kv.eviction import POLICIES as EVICTION_POLICIES
from cllm.routing.index import MOST_BLOCKS
from cllm.routing.policy import POLICIES as ROUTING_POLICIES

_DEFAULTS = SchedulerConfig()

ROUTINGS = tuple(ROUTING_POLICIES)
MAX_BLOCKS = 100_000_000
"""About 1.2 GB of bookkeeping, before anything is cached."""
MAX_REPLICAS = 10_000
MAX_ROUTERS = 100

Value = str | int | float


@dataclass(frozen=True, slots=True)
class Settings:
    """One simulated server, or several equal ones. The scheduler's defaults are the real server's."""

    blocks: int = 2048
    block_size: int = 16
    max_running: int = 256
    step_tokens: int = _DEFAULTS.max_step_tokens or BackendTraits.preferred_step_tokens
    eviction: str = _DEFAULTS.eviction_policy
    threshold: float = _DEFAULTS.kv_cache_eviction_threshold
    watermark: float = _DEFAULTS.watermark
    token_ms: float = _DEFAULTS.inter_token_target_ms
    gap_ms: float = _DEFAULTS.max_gap_ms or BackendTraits.default_gap_ms
    prefill_ms: float = _DEFAULTS.prefill_target_ms
    ageing_s: float = _DEFAULTS.ageing_s
    timeout_s: float = 0.0
    """A request that takes longer ends; 0: none does."""
    queue: int = 0
    """Requests beyond this many waiting ones are turned away; 0: none is."""
    replicas: int = 1
    routing: str = "round-robin"
    report_s: float = 0.5
    """Servers tell the router their load and the events of their caches this often, and it learns it as much later."""
    routers: int = 1
    """Routers that take requests in turn. All get every report; none knows what the others have sent since."""
    index_blocks: int = MOST_BLOCKS
    """Cached blocks that a router remembers, of all servers together."""

    @property
    def kv_tokens(self) -> int:
        return self.blocks * self.block_size


def parse_number(name: str, text: str, low: float, high: float = math.inf, *, whole: bool = False) -> float:
    try:
        number = float(text)  # 1e6 is as good as 1000000
    except ValueError:
        number = math.nan
    if not low <= number <= high or math.isinf(number) or (whole and not number.is_integer()):
        kind = "a whole number" if whole else "a number"
        limits = f"of at least {low:g}" if math.isinf(high) else f"from {low:g} to {_shown(high)}"
        raise ConfigError(f"{name}={text}: it must be {kind} {limits}")
    return int(number) if whole else number


def _shown(number: float) -> str:
    return f"{number:,.0f}" if number >= 1e4 else f"{number:g}"


def _whole(low: int, high: float = math.inf) -> Callable[[str, str], int]:
    return lambda name, text: int(parse_number(name, text, low, high, whole=True))


def _number(low: float, high: float = math.inf) -> Callable[[str, str], float]:
    return lambda name, text: parse_number(name, text, low, high)


def _one_of(choices: Sequence[str]) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        if text not in choices:
            raise ConfigError(f"{name}={text}: it must be one of {', '.join(choices)}")
        return text

    return parse


KEYS: dict[str, tuple[str, Callable[[str, str], Value]]] = {
    "block-size": ("block_size", _whole(1)),
    "blocks": ("blocks", _whole(2, MAX_BLOCKS)),
    "max-running": ("max_running", _whole(1)),
    "step-tokens": ("step_tokens", _whole(1)),
    "eviction": ("eviction", _one_of(list(EVICTION_POLICIES))),
    "threshold": ("threshold", _number(0.01, 1.0)),
    "watermark": ("watermark", _number(0.0, 0.99)),
    "token-ms": ("token_ms", _number(0.001)),
    "gap-ms": ("gap_ms", _number(0.001)),
    "prefill-ms": ("prefill_ms", _number(0.001)),
    "timeout": ("timeout_s", _number(0.0)),
    "queue": ("queue", _whole(0)),
    "replicas": ("replicas", _whole(1, MAX_REPLICAS)),
    "routing": ("routing", _one_of(ROUTINGS)),
    "report-s": ("report_s", _number(0.001)),
    "routers": ("routers", _whole(1, MAX_ROUTERS)),
    "index-blocks": ("index_blocks", _whole(1, MAX_BLOCKS)),
}
"""Name on the command line -> field and how its value is read, in the order in which they are applied."""


def parse_value(key: str, text: str) -> Value:
    if key not in KEYS:
        raise ConfigError(f"there is no setting {key!r} to simulate; there are {', '.join(KEYS)}")
    return KEYS[key][1](key, text)


def parse_assignment(text: str) -> tuple[str, Value]:
    """`key=value`."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} is not an assignment; write key=value")
    return key, parse_value(key, value)


def changed(settings: Settings, values: Mapping[str, Value]) -> Settings:
    """`settings` with other values. Another block size alone keeps the memory: fewer blocks if they are larger."""
    for key in KEYS:
        if key not in values:
            continue
        if key == "block-size":
            size = int(values[key])
            settings = replace(settings, block_size=size, blocks=max(2, settings.kv_tokens // size))
        else:
            settings = replace(settings, **{KEYS[key][0]: values[key]})  # type: ignore[arg-type]
    return settings


def parse_sweep(text: str, parse: Callable[[str, str], Value] = parse_value) -> tuple[str, list[Value]]:
    """`key=v1,v2,...`, each value checked."""
    key, equals, values = text.partition("=")
    if not equals or not values:
        raise ConfigError(f"--what-if {text}: write key=value,value,...")
    return key, [parse(key, value) for value in values.split(",")]


def grid(sweeps: Mapping[str, Sequence[Value]]) -> list[dict[str, Value]]:
    """Every combination; one empty one if nothing is varied."""
    return [dict(zip(sweeps, values, strict=True)) for values in product(*sweeps.values())]

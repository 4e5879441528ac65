"""Checks between settings. Those that depend on the model, such as its KV size, are made when it is loaded.

Some concern one backend only. With `backend.type` auto, they are made once the model has determined the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import gt, lt
from typing import TYPE_CHECKING, Any

from cllm.config.errors import as_yaml

if TYPE_CHECKING:
    from cllm.config.schema import Config

KV_TYPES = {
    "native": ("f16", "q8_0", "q4_0"),
    "llama_cpp": ("f16", "q8_0", "q4_0"),
    "torch": ("f16", "bf16", "f32", "fp8", "int8"),
}
NATIVE_TILE_TOKENS = 16
"""The native engine stores this many tokens of a block together."""

_RAISE = "raise the first or lower the second"
_HOLDS_ALL = "the cache must hold every sequence that may run"
_LOWER = "lower the first or raise the second"
_N_SEQ_MAX, _N_BATCH = "backend.llama_cpp.n_seq_max", "backend.llama_cpp.n_batch"

Describe = Callable[[str], str]
"""Turns a key into "key is value (origin)"."""


def check_consistency(config: Config, origins: Mapping[str, str]) -> list[str]:
    """One line for each contradiction. `origins` says where each value was set."""
    describe = partial(_describe, config, origins)
    less = partial(_compare, config, describe, lt)
    if problems := (
        less(
            "scheduler.max_gap_ms",
            "scheduler.inter_token_target_ms",
            f"the maximum must not be less than the mean; {_RAISE}",
        )
        or less("resources.kv_cache_max_size", "scheduler.max_running", f"{_HOLDS_ALL}; {_RAISE}")
        or less(
            "server.max_bodies_bytes",
            "server.max_body_bytes",
            f"the limit for all bodies must not be less than the limit for one; {_RAISE}",
        )
        or _check_cluster(config, describe)
    ):
        return problems
    kind = config.backend.type
    return [] if kind == "auto" else check_backend_consistency(config, kind, origins)


def check_backend_consistency(config: Config, kind: str, origins: Mapping[str, str] | None = None) -> list[str]:
    """The same for one backend's settings."""
    describe = partial(_describe, config, origins or {})
    problems = _check_kv_types(config, kind, describe)
    if kind == "native" and config.resources.block_size % NATIVE_TILE_TOKENS:
        size = describe("resources.block_size")
        problems.append(f"{size}: the native backend needs a multiple of {NATIVE_TILE_TOKENS}")
    return problems + _check_llama_cpp(config, describe) if kind == "llama_cpp" else problems


def _describe(config: Config, origins: Mapping[str, str], key: str) -> str:
    return f"{key} is {as_yaml(config.at(key))}" + (f" ({origins[key]})" if key in origins else "")


def _compare(
    config: Config, describe: Describe, is_wrong: Callable[[Any, Any], bool], first: str, second: str, why: str
) -> list[str]:
    """The problem of two settings, one line, or none. Settings that are not set have no problem."""
    one, other = config.at(first), config.at(second)
    if one is None or other is None or not is_wrong(one, other):
        return []
    return [f"{describe(first)} but {describe(second)}: {why}"]


def _check_cluster(config: Config, describe: Describe) -> list[str]:
    cluster, scaling = config.cluster, config.cluster.autoscaling
    most, least = "cluster.autoscaling.max_replicas", "cluster.autoscaling.min_replicas"
    problems = _compare(config, describe, lt, most, least, _RAISE)
    scales = scaling.max_replicas is not None and not problems
    if scales and not scaling.min_replicas <= cluster.first_replicas <= cluster.most_replicas:
        problems.append(
            f"{describe('cluster.replicas')}, which is not between {describe(least)} and {describe(most)}: "
            "change or remove the first"
        )
    if cluster.gpus > 1 and not cluster.gpus.is_integer():
        problems.append(f"{describe('cluster.gpus')}: more than one GPU must be a whole number")
    if cluster.gpus > 0 and config.backend.type not in ("auto", "torch"):
        other = f"{describe('backend.type')}: only torch uses GPUs; set the first to 0 or change the second"
        problems.append(f"{describe('cluster.gpus')} but {other}")
    if not cluster.gpus:
        why = f"a replica would need more memory than it reserves; {_LOWER}"
        for key in ("resources.kv_cache_max_memory_mb", "resources.max_memory_mb"):
            problems += _compare(config, describe, gt, key, "cluster.memory_mb", why)
    return problems


def _check_kv_types(config: Config, kind: str, describe: Describe) -> list[str]:
    known = KV_TYPES.get(kind)
    key_type, value_type = "resources.kv_type_k", "resources.kv_type_v"
    problems = [
        f"{describe(key)}: {kind} supports {', '.join(known)}"
        for key in (key_type, value_type)
        if known is not None and config.at(key) not in known
    ]
    if not problems and kind == "torch" and config.resources.kv_type_k != config.resources.kv_type_v:
        return [f"{describe(key_type)} but {describe(value_type)}: torch uses one type for both"]
    return problems


def _check_llama_cpp(config: Config, describe: Describe) -> list[str]:
    compare = partial(_compare, config, describe)
    problems = [
        *compare(lt, "resources.kv_cache_max_size", _N_SEQ_MAX, f"{_HOLDS_ALL}; {_RAISE}"),
        *compare(gt, "scheduler.max_running", _N_SEQ_MAX, f"each running request needs a sequence; {_LOWER}"),
        *compare(gt, "backend.llama_cpp.n_ubatch", _N_BATCH, "the first must not exceed the second"),
        *compare(gt, "scheduler.max_step_tokens", _N_BATCH, f"a step must fit into one batch; {_LOWER}"),
    ]
    if config.resources.kv_type_v != "f16" and not config.backend.llama_cpp.flash_attention:
        problems.append(
            f"{describe('resources.kv_type_v')} but {describe('backend.llama_cpp.flash_attention')}: quantised values "
            "need flash attention; enable it or use f16"
        )
    return problems

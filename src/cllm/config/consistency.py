"""Checks between settings. Those that depend on the model, such as its KV size, are made when it is loaded.

Some concern one backend only. With `backend.type` auto, they are made once the model has determined the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

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

Describe = Callable[[str], str]
"""Turns a key into "key is value (origin)"."""


def check_consistency(config: Config, origins: Mapping[str, str]) -> list[str]:
    """One line for each contradiction. `origins` says where each value was set."""
    gap, target = config.scheduler.max_gap_ms, config.scheduler.inter_token_target_ms
    describe = partial(_describe, config, origins)
    if gap is not None and gap < target:
        return [
            f"{describe('scheduler.max_gap_ms')} but {describe('scheduler.inter_token_target_ms')}: "
            "the maximum must not be less than the mean; raise the first or lower the second"
        ]
    held, running = config.resources.kv_cache_max_size, config.scheduler.max_running
    if held is not None and running is not None and held < running:
        return [
            f"{describe('resources.kv_cache_max_size')} but {describe('scheduler.max_running')}: the cache must hold "
            "every sequence that may run; raise the first or lower the second"
        ]
    if config.server.max_bodies_bytes < config.server.max_body_bytes:
        return [
            f"{describe('server.max_bodies_bytes')} but {describe('server.max_body_bytes')}: "
            "the limit for all bodies must not be less than the limit for one; raise the first or lower the second"
        ]
    if problems := _check_cluster(config, describe):
        return problems
    kind = config.backend.type
    return [] if kind == "auto" else check_backend_consistency(config, kind, origins)


def check_backend_consistency(config: Config, kind: str, origins: Mapping[str, str] | None = None) -> list[str]:
    """The same for one backend's settings."""
    describe = partial(_describe, config, origins or {})
    problems = _check_kv_types(config, kind, describe)
    if kind == "native":
        return problems + _check_native(config, describe)
    return problems + _check_llama_cpp(config, describe) if kind == "llama_cpp" else problems


def _describe(config: Config, origins: Mapping[str, str], key: str) -> str:
    return f"{key} is {as_yaml(config.at(key))}" + (f" ({origins[key]})" if key in origins else "")


def _check_cluster(config: Config, describe: Describe) -> list[str]:
    cluster, scaling = config.cluster, config.cluster.autoscaling
    problems = []
    if scaling.max_replicas is not None and scaling.max_replicas < scaling.min_replicas:
        problems.append(
            f"{describe('cluster.autoscaling.max_replicas')} but {describe('cluster.autoscaling.min_replicas')}: "
            "raise the first or lower the second"
        )
    elif scaling.max_replicas is not None and not (
        scaling.min_replicas <= cluster.first_replicas <= scaling.max_replicas
    ):
        problems.append(
            f"{describe('cluster.replicas')}, which is not between {describe('cluster.autoscaling.min_replicas')} and "
            f"{describe('cluster.autoscaling.max_replicas')}: change or remove the first"
        )
    if cluster.gpus > 1 and not cluster.gpus.is_integer():
        problems.append(f"{describe('cluster.gpus')}: more than one GPU must be a whole number")
    if cluster.gpus > 0 and config.backend.type not in ("auto", "torch"):
        problems.append(
            f"{describe('cluster.gpus')} but {describe('backend.type')}: only torch uses GPUs; set the first to 0 or "
            "change the second"
        )
    problems += [
        f"{describe(key)} but {describe('cluster.memory_mb')}: a replica would need more memory than it reserves; "
        "lower the first or raise the second"
        for key in ("resources.kv_cache_max_memory_mb", "resources.max_memory_mb")
        if cluster.memory_mb is not None and (config.at(key) or 0) > cluster.memory_mb and not cluster.gpus
    ]
    return problems


def _check_kv_types(config: Config, kind: str, describe: Describe) -> list[str]:
    known = KV_TYPES.get(kind)
    problems = [
        f"{describe(key)}: {kind} supports {', '.join(known)}"
        for key in ("resources.kv_type_k", "resources.kv_type_v")
        if known is not None and config.at(key) not in known
    ]
    if not problems and kind == "torch" and config.resources.kv_type_k != config.resources.kv_type_v:
        problems.append(
            f"{describe('resources.kv_type_k')} but {describe('resources.kv_type_v')}: torch uses one type for both"
        )
    return problems


def _check_native(config: Config, describe: Describe) -> list[str]:
    if config.resources.block_size % NATIVE_TILE_TOKENS == 0:
        return []
    return [f"{describe('resources.block_size')}: the native backend needs a multiple of {NATIVE_TILE_TOKENS}"]


def _check_llama_cpp(config: Config, describe: Describe) -> list[str]:
    llama, resources, scheduler = config.backend.llama_cpp, config.resources, config.scheduler
    slots = describe("backend.llama_cpp.n_seq_max")
    batch = describe("backend.llama_cpp.n_batch")
    problems = []
    if resources.kv_cache_max_size is not None and resources.kv_cache_max_size < llama.n_seq_max:
        problems.append(
            f"{describe('resources.kv_cache_max_size')} but {slots}: the cache must hold every sequence that may "
            "run; raise the first or lower the second"
        )
    if scheduler.max_running is not None and scheduler.max_running > llama.n_seq_max:
        problems.append(
            f"{describe('scheduler.max_running')} but {slots}: each running request needs a sequence; "
            "lower the first or raise the second"
        )
    if resources.kv_type_v != "f16" and not llama.flash_attention:
        problems.append(
            f"{describe('resources.kv_type_v')} but {describe('backend.llama_cpp.flash_attention')}: quantised values "
            "need flash attention; enable it or use f16"
        )
    if llama.n_ubatch > llama.n_batch:
        problems.append(f"{describe('backend.llama_cpp.n_ubatch')} but {batch}: the first must not exceed the second")
    if scheduler.max_step_tokens is not None and scheduler.max_step_tokens > llama.n_batch:
        problems.append(
            f"{describe('scheduler.max_step_tokens')} but {batch}: a step must fit into one batch; "
            "lower the first or raise the second"
        )
    return problems

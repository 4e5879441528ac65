"""What must hold between settings. What also needs the model (KV bytes) is checked when it is loaded.

Some of it concerns one backend only. With `backend.type` auto, that is checked once the model has decided which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from cllm.config.problems import as_written

if TYPE_CHECKING:
    from cllm.config.tree import Config

KV_TYPES = {
    "native": ("f16", "q8_0", "q4_0"),
    "llama_cpp": ("f16", "q8_0", "q4_0"),
    "torch": ("f16", "bf16", "f32", "fp8", "int8"),
}
NATIVE_TILE_TOKENS = 16
"""The native engine stores so many tokens of a block together."""

Say = Callable[[str], str]
"""From a key to "key is value", with the place the value comes from where that is known."""


def check_relations(config: Config, origins: Mapping[str, str]) -> list[str]:
    """One line for each contradiction. `origins` tells where a key's value came from, for the message."""
    gap, target = config.scheduler.max_gap_ms, config.scheduler.inter_token_target_ms
    say = _sayer(config, origins)
    if gap is not None and gap < target:
        return [
            f"{say('scheduler.max_gap_ms')} but {say('scheduler.inter_token_target_ms')}: "
            "the longest time may not be less than the mean; raise the first or lower the second"
        ]
    if config.server.max_bodies_bytes < config.server.max_body_bytes:
        return [
            f"{say('server.max_bodies_bytes')} but {say('server.max_body_bytes')}: "
            "all bodies together may not be less than the largest; raise the first or lower the second"
        ]
    kind = config.backend.type
    return [] if kind == "auto" else check_backend_relations(config, kind, origins)


def check_backend_relations(config: Config, kind: str, origins: Mapping[str, str] | None = None) -> list[str]:
    """The same for what only concerns the backend `kind`."""
    say = _sayer(config, origins or {})
    problems = _check_kv_types(config, kind, say)
    if kind == "native":
        return problems + _check_native(config, say)
    return problems + _check_llama_cpp(config, say) if kind == "llama_cpp" else problems


def _sayer(config: Config, origins: Mapping[str, str]) -> Say:
    def say(key: str) -> str:
        return f"{key} is {as_written(config.at(key))}" + (f" ({origins[key]})" if key in origins else "")

    return say


def _check_kv_types(config: Config, kind: str, say: Say) -> list[str]:
    known = KV_TYPES.get(kind)
    problems = [
        f"{say(key)}: {kind} has {', '.join(known)}"
        for key in ("resources.kv_type_k", "resources.kv_type_v")
        if known is not None and config.at(key) not in known
    ]
    if not problems and kind == "torch" and config.resources.kv_type_k != config.resources.kv_type_v:
        problems.append(f"{say('resources.kv_type_k')} but {say('resources.kv_type_v')}: torch has one type for both")
    return problems


def _check_native(config: Config, say: Say) -> list[str]:
    if config.resources.block_size % NATIVE_TILE_TOKENS == 0:
        return []
    return [f"{say('resources.block_size')}: the native backend needs a multiple of {NATIVE_TILE_TOKENS}"]


def _check_llama_cpp(config: Config, say: Say) -> list[str]:
    llama, resources, scheduler = config.backend.llama_cpp, config.resources, config.scheduler
    slots = say("backend.llama_cpp.n_seq_max")
    batch = say("backend.llama_cpp.n_batch")
    problems = []
    if resources.kv_cache_max_size is not None and resources.kv_cache_max_size < llama.n_seq_max:
        problems.append(
            f"{say('resources.kv_cache_max_size')} but {slots}: the cache must hold every sequence that may "
            "run; raise the first or lower the second"
        )
    if scheduler.max_running is not None and scheduler.max_running > llama.n_seq_max:
        problems.append(
            f"{say('scheduler.max_running')} but {slots}: each running request needs a sequence; "
            "lower the first or raise the second"
        )
    if resources.kv_type_v != "f16" and not llama.flash_attention:
        problems.append(
            f"{say('resources.kv_type_v')} but {say('backend.llama_cpp.flash_attention')}: quantised values "
            "need flash attention; switch it on or use f16"
        )
    if llama.n_ubatch > llama.n_batch:
        problems.append(f"{say('backend.llama_cpp.n_ubatch')} but {batch}: the first may not exceed the second")
    if scheduler.max_step_tokens is not None and scheduler.max_step_tokens > llama.n_batch:
        problems.append(
            f"{say('scheduler.max_step_tokens')} but {batch}: a step must fit one batch; "
            "lower the first or raise the second"
        )
    return problems

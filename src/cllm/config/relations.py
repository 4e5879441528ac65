"""What must hold between settings. What also needs the model (KV bytes) is checked when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cllm.config.problems import as_written

if TYPE_CHECKING:
    from cllm.config.tree import Config

AVAILABLE_BACKENDS = ("llama_cpp", "fake")


def check_relations(config: Config, origins: Mapping[str, str]) -> list[str]:
    """One line for each contradiction. `origins` tells where a key's value came from, for the message."""

    def say(key: str) -> str:
        return f"{key} is {as_written(config.at(key))}" + (f" ({origins[key]})" if key in origins else "")

    if config.scheduler.max_gap_ms < config.scheduler.inter_token_target_ms:
        gap, target = say("scheduler.max_gap_ms"), say("scheduler.inter_token_target_ms")
        return [f"{gap} but {target}: the longest time may not be less than the mean; raise the first"]
    kind = config.backend.kind
    if kind not in AVAILABLE_BACKENDS:
        available = " or ".join(AVAILABLE_BACKENDS)
        return [f"{say('backend.type')}, which this version does not have: use {available}"]
    if kind != "llama_cpp":
        return []

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
    if scheduler.max_step_tokens > llama.n_batch:
        problems.append(
            f"{say('scheduler.max_step_tokens')} but {batch}: a step must fit one batch; "
            "lower the first or raise the second"
        )
    return problems

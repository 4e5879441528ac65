"""How many tokens a sequence may have: the model's own context, unless settings or the memory for K/V allow fewer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cllm.config import Config
from cllm.errors import ConfigError
from cllm.kv.sizing import SLOT_PADDING
from cllm.models.spec import ModelSpec

ENOUGH_TOKENS = 8192
"""Where memory is divided, a model's share holds a sequence of this length, or of its whole context, if it can."""

_MEMORY = {
    "slots": "raise resources.kv_cache_max_memory_mb or lower backend.llama_cpp.n_seq_max",
    "blocks": "raise resources.kv_cache_max_memory_mb",
    "shared": "raise resources.max_memory_mb",
}
Memory = Literal["slots", "blocks", "shared"]
"""How K/V are kept: whole sequences, in blocks, or in blocks of a budget that several models share."""


def context_of(config: Config, spec: ModelSpec, cap: int | None = None) -> int:
    """The configured context, else the model's own, which a backend may cap. Raises `ConfigError`."""
    trained, asked = spec.context_length, config.resources.max_context_length
    if asked is not None and asked > trained:
        raise ConfigError(
            f"resources.max_context_length is {asked}, but the model was trained for {trained} tokens; "
            f"set it to at most {trained}"
        )
    return asked or min(trained, cap or trained)


def context_within(context: int, tokens: int) -> int:
    """At most `tokens` of a context that nobody asked for, but `ENOUGH_TOKENS` of it."""
    return min(context, max(tokens // SLOT_PADDING * SLOT_PADDING, ENOUGH_TOKENS))


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """How long a sequence may be, and why no longer."""

    tokens: int
    reason: str
    """For the log."""
    advice: str
    """For a client whose prompt is too long."""


def limit_of(config: Config, spec: ModelSpec, *, allowed: int, tokens: int, memory: Memory) -> ContextLimit:
    """`tokens` are fewer than the `allowed` ones if the memory for K/V holds no more."""
    own = f"the model's own context is {spec.context_length:,}"
    if tokens < allowed:
        return ContextLimit(
            tokens,
            f"the KV cache has room for no more; {own}; for more, {_MEMORY[memory]}",
            f"The KV cache has room for no more: {_MEMORY[memory]} (resources.max_context_length allows {allowed}).",
        )
    if tokens < spec.context_length:
        setting = "resources.max_context_length"
        return ContextLimit(tokens, f"{setting}; {own}", f"{setting} may be raised to {spec.context_length}.")
    advice = "The model was trained for no more, so resources.max_context_length cannot be raised."
    return ContextLimit(tokens, "the model's own context", advice)

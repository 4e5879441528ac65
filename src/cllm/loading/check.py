"""Whether a model can be loaded with its settings, as far as that is known without its weights."""

from __future__ import annotations

from cllm.config import Config
from cllm.config.consistency import check_backend_consistency
from cllm.config.errors import InvalidConfigError
from cllm.kv.sizing import plan_blocks, plan_slots
from cllm.loading.estimate import estimate
from cllm.loading.open_model import TokenizerCache, open_text

MIB = 1 << 20


def check_loadable(config: Config) -> None:
    """Raises the `ModelError` or `ConfigError` that loading would raise on any machine."""
    found = estimate(config)
    if problems := check_backend_consistency(config, found.kind):  # those that `backend.type: auto` left open
        raise InvalidConfigError(problems)
    open_text(config, TokenizerCache())
    asked_mb = config.resources.kv_cache_max_memory_mb
    if asked_mb is None:
        return
    budget, token_bytes = int(asked_mb * MIB), found.token_bytes
    if found.kind == "llama_cpp" or (found.kind == "fake" and config.backend.fake.layout == "slots"):
        plan_slots(
            budget_bytes=budget,
            bytes_per_token=token_bytes,
            context=found.context,
            running=1,
            running_is_asked=False,
            state_bytes=found.local_bytes,
        )
    else:
        plan_blocks(budget_bytes=budget, bytes_per_token=token_bytes, block_size=config.resources.block_size)

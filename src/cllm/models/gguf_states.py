"""Sizes of models some of whose layers carry a state, as llama.cpp keeps them: which layers those are, and how large
their state is. What a layer computes does not matter here."""

from __future__ import annotations

from cllm.errors import ModelError
from cllm.models.gguf_keys import Keys
from cllm.models.spec import AttentionSpec, LayerSpec, OpaqueStateSpec

_STATE_KEYS = ("ssm.conv_kernel", "ssm.state_size", "wkv.head_size", "shortconv.l_cache", "kda.head_dim")
"""Sizes of what layers have in place of attention, or beside it: more than zero in recurrent and hybrid models."""
_WITHOUT_ATTENTION = frozenset(("mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"))
_BOTH_IN_EVERY_LAYER = frozenset(("falcon-h1",))
_OF_ONE_PART = frozenset(("nemotron_h", "nemotron_h_moe"))
"""Every layer is attention, or carries a state, or is a feed-forward."""
_FLOAT = 4


def carries_states(keys: Keys) -> bool:
    heads = keys.any("attention.head_count_kv")
    return (isinstance(heads, list) and 0 in heads) or any(keys.any(key) for key in _STATE_KEYS)


def read_layers(keys: Keys, n_embd: int, n_layers: int) -> tuple[LayerSpec, ...]:
    n_layers -= min(keys.count("nextn_predict_layers", 0), n_layers)
    heads, kv_heads = (keys.counts(f"attention.head_count{part}", n_layers) for part in ("", "_kv"))
    default = n_embd // (max(heads, default=0) or 1)
    dim_k, dim_v = (keys.count(f"attention.{part}_length", 0) or max(1, default) for part in ("key", "value"))
    recurrent = _recurrent(keys, n_layers, kv_heads)
    floats = _state_floats(keys, n_embd, max(heads, default=0))
    if not floats:
        raise ModelError(
            f"{keys.path}: not every layer is attention, and no metadata key says how large the state of the others is "
            f"(one of {', '.join(f'{keys.architecture}.{suffix}' for suffix in _STATE_KEYS)}); use another .gguf file"
        )
    state = OpaqueStateSpec(_FLOAT * floats)
    layers = []
    for index, is_recurrent in enumerate(recurrent):
        attends = kv_heads[index] > 0 and (not is_recurrent or keys.architecture in _BOTH_IN_EVERY_LAYER)
        attention = AttentionSpec(max(1, heads[index]), kv_heads[index], dim_k, dim_v) if attends else None
        layers.append(LayerSpec(attention, recurrence=state if is_recurrent else None))
    return tuple(layers)


def _recurrent(keys: Keys, n_layers: int, kv_heads: list[int]) -> list[bool]:
    if keys.architecture in _WITHOUT_ATTENTION | _BOTH_IN_EVERY_LAYER:
        return [True] * n_layers
    named = keys.any("attention.recurrent_layers")
    if isinstance(named, list) and len(named) >= n_layers:
        return list(map(bool, named[:n_layers]))
    if 0 in kv_heads:
        alone = keys.counts("feed_forward_length", n_layers) if keys.architecture in _OF_ONE_PART else [0] * n_layers
        return [not heads and not n_ff for heads, n_ff in zip(kv_heads, alone, strict=True)]
    interval = keys.size("full_attention_interval", 4)
    return [(index + 1) % interval != 0 for index in range(n_layers)]


def _state_floats(keys: Keys, n_embd: int, n_heads: int) -> int:
    if head := keys.count("wkv.head_size", 0):
        return n_embd * (keys.size("token_shift_count", 2) + head)
    if cached := keys.count("shortconv.l_cache", 0):
        return n_embd * (cached - 1)
    kernel = keys.count("ssm.conv_kernel", 0)
    if dim := keys.count("kda.head_dim", 0):
        return n_heads * dim * (3 * ((kernel or 4) - 1) + dim)
    inner, state = keys.count("ssm.inner_size", 0), keys.count("ssm.state_size", 0)
    return max(0, kernel - 1) * (inner + 2 * keys.count("ssm.group_count", 0) * state) + state * inner

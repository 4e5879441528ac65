"""What a GGUF file says of layers that carry a state."""

from __future__ import annotations

from cllm.errors import ModelError
from cllm.models.gguf import GGUFModel
from cllm.models.gguf_keys import Keys
from cllm.models.spec import MOST_KERNEL, MOST_STATE_HEADS, DeltaNetSpec, Mamba2Spec, ShortConvSpec


def read_delta_net(model: GGUFModel) -> DeltaNetSpec:
    keys = model.keys
    n_k_heads, n_v_heads, head_dim_v = _heads(keys)
    return DeltaNetSpec(
        n_k_heads=n_k_heads,
        n_v_heads=n_v_heads,
        head_dim_k=keys.size("ssm.state_size"),
        head_dim_v=head_dim_v,
        kernel=_kernel(keys, "ssm.conv_kernel"),
        tiled=True,
    )


def read_mamba2(model: GGUFModel) -> Mamba2Spec:
    keys = model.keys
    n_groups, n_heads, head_dim = _heads(keys)
    return Mamba2Spec(
        n_heads=n_heads,
        head_dim=head_dim,
        state_size=keys.size("ssm.state_size"),
        n_groups=n_groups,
        kernel=_kernel(keys, "ssm.conv_kernel"),
        norm=model.spec.architecture != "falcon-h1" or "blk.0.ssm_norm.weight" in model.tensors,
    )


def read_short_conv(model: GGUFModel) -> ShortConvSpec:
    return ShortConvSpec(model.spec.n_embd, _kernel(model.keys, "shortconv.l_cache"))


def _heads(keys: Keys) -> tuple[int, int, int]:
    """Groups of heads, heads, and the values of each."""
    groups, heads, values = (keys.size(f"ssm.{name}") for name in ("group_count", "time_step_rank", "inner_size"))
    for parts, whole, whole_name in ((groups, heads, "time_step_rank"), (heads, values, "inner_size")):
        if whole % parts:
            name = "group_count" if whole == heads else "time_step_rank"
            raise ModelError(
                f"{keys.path}: the metadata key {keys.architecture}.ssm.{name} is {parts}, which does not divide "
                f"ssm.{whole_name}, {whole}; use another .gguf file"
            )
    if heads > MOST_STATE_HEADS:
        raise keys.wrong_kind(f"{keys.architecture}.ssm.time_step_rank", str(heads), f"up to {MOST_STATE_HEADS} heads")
    return groups, heads, values // heads


def _kernel(keys: Keys, suffix: str) -> int:
    size = keys.size(suffix)
    if size > MOST_KERNEL:
        raise keys.wrong_kind(f"{keys.architecture}.{suffix}", str(size), f"up to {MOST_KERNEL} tokens")
    return size

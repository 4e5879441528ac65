"""The tensors of a Hugging Face model, under the names that it has for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from cllm.models.hf_architectures import TEXT_PREFIXES, HFArchitecture
from cllm.models.spec import ModelSpec
from cllm.models.tensors import TensorSpec, all_tensors, hf_name

Stored = TypeVar("Stored")
_UNUSED = (".rotary_emb.inv_freq",)
_WHOLE = ("layer_output_scale", "ssm_a", "ssm_d", "ssm_dt.bias")
"""Roles whose names are complete."""
_CONVOLUTIONS = ("ssm_conv1d", "shortconv.conv")
_KEYS = (".self_attn.k_proj.", ".self_attn.v_proj.", ".self_attn.k_norm.", ".self_attn.v_norm.")


def text_tensors(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors of the text part, as if there were nothing else."""
    return {
        new + name[len(old) :]: tensor
        for name, tensor in tensors.items()
        for old, new in TEXT_PREFIXES.items()
        if name.startswith(old)
    }


def stored_tensors(spec: ModelSpec, architecture: HFArchitecture) -> Iterator[tuple[TensorSpec, tuple[int, ...]]]:
    """Where each tensor lies, and the shape of what is stored there."""
    for item in all_tensors(spec):
        name = _name(item, architecture)
        for fused in architecture.fused:
            parts = _parts(spec, item, fused)
            if item.role in parts:
                before = list(parts)[: list(parts).index(item.role)]
                first, rows = sum(parts[role] for role in before), sum(parts.values())
                name = f"{name.rpartition('.weight')[0].rpartition('.')[0]}.{fused}.weight"
                yield item._replace(name=name, first=first), (rows, item.cols)
                break
        else:
            shape = (item.rows, 1, item.cols) if item.role in _CONVOLUTIONS else item.shape
            yield item._replace(name=name), shape


def _parts(spec: ModelSpec, item: TensorSpec, fused: str) -> dict[str, int]:
    """The rows of what is one tensor in a layer, by role."""
    if item.layer < 0:
        return {}
    layer = spec.layers[item.layer]
    if fused == "qkv_proj":
        attention = layer.attends
        return {"attn_q": attention.q_rows, "attn_k": attention.k_size, "attn_v": attention.v_size}
    return {"ffn_gate": layer.feeds.size, "ffn_up": layer.feeds.size}


def _name(item: TensorSpec, architecture: HFArchitecture) -> str:
    base, _, kind = (item.role, "", "") if item.role in architecture.names else item.role.partition(".")
    other = architecture.names.get(base)
    if other is None:
        return hf_name(item.name)
    place = f"{architecture.root}.layers.{item.layer}." if item.layer >= 0 else ""
    return f"{place}{other}" if item.role in _WHOLE else f"{place}{other}.{kind or 'weight'}"


def is_unused(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor that nothing asks for may be there: frequencies, a tied head, keys that another layer has,
    layers that predict further tokens (MTP)."""
    if name.endswith(_UNUSED) or (name == "lm_head.weight" and spec.tied):
        return True
    if spec.recurrent:
        return name.startswith("mtp.")
    layer = name.removeprefix("model.layers.").partition(".")[0]
    shares = layer.isdecimal() and int(layer) < spec.n_layers and spec.layers[int(layer)].attends.kv_from is not None
    return shares and any(part in name for part in _KEYS)

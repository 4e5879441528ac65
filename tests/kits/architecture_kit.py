"""Tiny random models of every architecture that we read, in files that llama.cpp loads, too.

The tensors of a file are those that our own reader asks for. llama.cpp refuses a file that lacks one, has one too many
or one of another size: so what it loads has the right ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray

from cllm.models.architectures import ARCHITECTURES
from cllm.models.gguf import GGUFModel
from cllm.models.gguf_decoder import decoder_spec
from cllm.models.spec import LayerSpec, Mamba2Spec, ModelSpec
from cllm.models.tensors import TensorSpec, all_tensors
from gguf_kit import add_value, write_gguf

Floats = NDArray[np.float32]
_NOT_QUANTISED = ("ssm_a", "ssm_d", "ssm_norm", "ssm_conv1d", "conv")

_COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "context_length": 256,
    "embedding_length": 64,
    "block_count": 4,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-3,
}


@dataclass(frozen=True)
class TinyArchitecture:
    architecture: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Suffixes, and what differs from the common ones."""
    head_dim: int = 32
    biases: tuple[str, ...] = ()
    """Roles that have one."""
    fused: tuple[str, ...] = ()
    """What is one tensor: queries, keys and values (qkv), gate and up (gate_up)."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Tensors of factors for the rotation, which grow from 1 to so much; their length is half of what is turned."""
    lacks: tuple[str, ...] = ()
    """Tensors that would be there."""
    has: tuple[str, ...] = ()
    """Tensors that the layers' sizes do not ask for; one of the first layer stands for all."""
    scales: bool = False
    """Every layer has an output scale."""

    def metadata(self) -> dict[str, Any]:
        dims = {f"attention.{part}_length": self.head_dim for part in ("key", "value")}
        keys = _COMMON | dims | {"rope.dimension_count": self.head_dim} | dict(self.keys)
        return {f"{self.architecture}.{key}": value for key, value in keys.items()} | {
            "tokenizer.ggml.model": "no_vocab"
        }


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
GEMMA4 = TinyArchitecture(
    "gemma4",
    {
        "block_count": 6,
        "attention.head_count_kv": [2, 2, 1, 2, 2, 1],
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": [True, True, False, True, True, False],
        "attention.key_length_swa": 32,
        "attention.value_length_swa": 32,
        "rope.dimension_count_swa": 32,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "embedding_length_per_layer_input": 0,
        "attention.shared_kv_layers": 0,
    },
    head_dim=64,
    factors={"rope_freqs": 1e4},
    lacks=("blk.2.attn_v.weight", "blk.5.attn_v.weight"),
    scales=True,
)
GEMMA3 = TinyArchitecture(
    "gemma3",
    {
        "block_count": 7,
        "attention.sliding_window": 16,
        "rope.freq_base": 1e6,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    },
)
LONGROPE = TinyArchitecture(
    "phi3",
    {
        "rope.dimension_count": 12,
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": 64,
        "rope.scaling.attn_factor": 1.19,
    },
    head_dim=16,
    fused=("qkv", "gate_up"),
    factors={"rope_factors_long": 8.0, "rope_factors_short": 1.5},
)
EXAONE4 = TinyArchitecture(
    "exaone4",
    {"block_count": 64, "attention.sliding_window": 16, "feed_forward_length": 32},
    head_dim=16,
    factors={"rope_freqs": 8.0},
)
MAMBA2 = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 128,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 8,
    "ssm.group_count": 2,
}
QWEN35 = TinyArchitecture(
    "qwen35",
    {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 96,
        "ssm.state_size": 16,
        "ssm.time_step_rank": 6,
        "ssm.group_count": 2,
        "rope.dimension_count": 8,
        "rope.dimension_sections": [11, 11, 10, 0],
        "full_attention_interval": 4,
    },
)
SCALED_GRANITE = {"attention.scale": 0.1, "embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 5.0}

TINY: Mapping[str, TinyArchitecture] = {
    "llama": TinyArchitecture("llama", biases=("attn_q", "attn_k", "attn_v", "attn_output")),
    "llama, llama3 rope": TinyArchitecture("llama", factors={"rope_freqs": 8.0}),
    "llama, yarn": TinyArchitecture("llama", YARN),
    "qwen2": TinyArchitecture("qwen2", head_dim=16, biases=("attn_q", "attn_k", "attn_v")),
    "qwen3": TinyArchitecture("qwen3"),
    "qwen3, yarn": TinyArchitecture("qwen3", YARN | {"rope.freq_base": 1e6, "rope.scaling.attn_factor": 1.1}),
    "mistral3": TinyArchitecture(
        "mistral3", YARN | {"attention.temperature_scale": 0.1, "rope.scaling.yarn_log_multiplier": 1.0}
    ),
    "mistral3, betas": TinyArchitecture(
        "mistral3", YARN | {"rope.scaling.yarn_beta_fast": 4.0, "rope.scaling.yarn_beta_slow": 0.5}
    ),
    "gemma": TinyArchitecture("gemma"),
    "gemma2": TinyArchitecture("gemma2", {"attention.sliding_window": 16}),
    "gemma2, other caps": TinyArchitecture(
        "gemma2",
        {"attention.sliding_window": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma2 27B": TinyArchitecture("gemma2", {"block_count": 46, "attention.sliding_window": 16}),
    "gemma3": GEMMA3,
    "gemma3, another period": replace(
        GEMMA3, keys={**GEMMA3.keys, "attention.sliding_window_pattern": 3, "rope.freq_base_swa": 5e3}
    ),
    "gemma3 27B": replace(GEMMA3, keys={**GEMMA3.keys, "block_count": 62}),
    "gemma3 without windows": TinyArchitecture("gemma3", {"final_logit_softcapping": 3.0}),
    "gemma4": GEMMA4,
    "gemma4 E2B": replace(
        GEMMA4,
        keys={
            **GEMMA4.keys,
            "attention.shared_kv_layers": 3,
            "embedding_length_per_layer_input": 32,
            "feed_forward_length": [96, 96, 96, 192, 192, 192],
            "final_logit_softcapping": 3.0,
        },
        lacks=(),
    ),
    "phi3": LONGROPE,
    "phi3, short": replace(LONGROPE, keys={**LONGROPE.keys, "rope.scaling.original_context_length": 256}),
    "phi3, windows": TinyArchitecture("phi3", {"attention.sliding_window": 16}, head_dim=16, fused=("qkv", "gate_up")),
    "granite": TinyArchitecture("granite", SCALED_GRANITE),
    "granite without positions": TinyArchitecture("granite", SCALED_GRANITE | {"rope.scaling.finetuned": False}),
    "smollm3": TinyArchitecture("smollm3"),
    "olmo2": TinyArchitecture("olmo2", head_dim=16),
    "olmo3": TinyArchitecture("olmo2", YARN | {"attention.sliding_window": 16}, head_dim=16),
    "exaone4": EXAONE4,
    "exaone4 without windows": TinyArchitecture("exaone4", head_dim=16),
    "glm4": TinyArchitecture(
        "glm4", {"rope.dimension_count": 16}, fused=("qkv", "gate_up"), biases=("attn_q", "attn_k", "attn_v")
    ),
    "ernie4_5": TinyArchitecture("ernie4_5"),
    "hunyuan-dense": TinyArchitecture("hunyuan-dense", {"rope.scaling.alpha": 1000.0}),
    "seed_oss": TinyArchitecture("seed_oss", biases=("attn_q", "attn_k", "attn_v")),
    "qwen35": QWEN35,
    "qwen35, listed layers": replace(
        QWEN35,
        keys={
            **{key: value for key, value in QWEN35.keys.items() if key != "full_attention_interval"},
            "attention.recurrent_layers": [True, False, True, False],
            "rope.dimension_count": 32,
            "rope.dimension_sections": [4, 4, 4, 4],
        },
        fused=("qkv",),
    ),
    "lfm2": TinyArchitecture("lfm2", {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 0, 2, 0]}, head_dim=16),
    "granitehybrid": TinyArchitecture(
        "granitehybrid",
        MAMBA2 | SCALED_GRANITE | {"attention.head_count_kv": [0, 2, 0, 0], "rope.scaling.finetuned": False},
    ),
    "granitehybrid, positions": TinyArchitecture(
        "granitehybrid", MAMBA2 | SCALED_GRANITE | {"ssm.group_count": 1, "attention.head_count_kv": [0, 2, 0, 0]}
    ),
    "nemotron_h": TinyArchitecture(
        "nemotron_h",
        MAMBA2
        | {
            "block_count": 5,
            "attention.head_count_kv": [0, 0, 2, 0, 0],
            "feed_forward_length": [0, 96, 0, 0, 64],
            "attention.layer_norm_epsilon": 1e-3,
        },
        biases=("attn_output",),
    ),
    "falcon-h1": TinyArchitecture("falcon-h1", MAMBA2),
    "falcon-h1, norms": TinyArchitecture("falcon-h1", MAMBA2, has=("blk.0.ssm_norm.weight",)),
    "mamba2": TinyArchitecture(
        "mamba2",
        MAMBA2 | {"attention.head_count": 0, "attention.head_count_kv": 0, "feed_forward_length": 0},
        head_dim=0,
    ),
}


WITHOUT_STATES = [name for name, tiny in TINY.items() if ARCHITECTURES[tiny.architecture].recurrence is None]
"""Those that an engine without recurrences can run."""


def write_tiny(
    path: Path,
    tiny: TinyArchitecture,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    vocabulary: Mapping[str, Any] | None = None,
) -> Path:
    """`kind` is the type of its matrices, `vocabulary` the metadata of one."""
    tensors, metadata = _tensors(path, tiny), tiny.metadata() | dict(vocabulary or {})
    writer = GGUFWriter(path, tiny.architecture)
    for key, value in metadata.items():
        add_value(writer, key, value)
    for name, values in tensors.items():
        if values.ndim == 2 and not name.split(".")[-2 if name.endswith(".weight") else -1].startswith(_NOT_QUANTISED):
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(path: Path, tiny: TinyArchitecture) -> dict[str, Floats]:
    rng = np.random.default_rng(7)
    spec = _spec(path, tiny)
    found = {item.name: _stored(spec, item, _values(rng, item)) for item in _named(tiny, spec)}
    found = {name: values for name, values in found.items() if name not in tiny.lacks}
    dims = tiny.keys.get("rope.dimension_count", tiny.head_dim)
    for name, most in tiny.factors.items():
        found[f"{name}.weight"] = np.geomspace(1.0, most, dims // 2, dtype=np.float32)
    if tiny.fused:
        for index in (index for index, layer in enumerate(spec.layers) if layer.attention is not None):
            _fuse(found, f"blk.{index}.", tiny)
    return found


def _spec(path: Path, tiny: TinyArchitecture) -> ModelSpec:
    """What a file with these keys asks for."""
    probe = path.with_suffix(".probe")
    try:
        tensors = {f"blk.{i}.layer_output_scale.weight": np.ones(1, np.float32) for i in range(64) if tiny.scales}
        present = {f"blk.{i}.attn_v.weight": np.ones((1, 1), np.float32) for i in range(64)}
        for name in tiny.lacks:
            present.pop(name, None)
        present |= {name: np.ones((1, 1), np.float32) for name in tiny.has}
        write_gguf(probe, tiny.metadata(), architecture=tiny.architecture, tensors=tensors | present)
        spec = decoder_spec(GGUFModel.open(probe))
    finally:
        probe.unlink(missing_ok=True)
    layers = tuple(_with_biases(tiny, layer) for layer in spec.layers)
    return replace(spec, layers=layers, tied=tiny.architecture.startswith("gemma"))


def _with_biases(tiny: TinyArchitecture, layer: LayerSpec) -> LayerSpec:
    if layer.attention is None:
        return layer
    attention = replace(layer.attention, qkv_bias="attn_q" in tiny.biases, output_bias="attn_output" in tiny.biases)
    return replace(layer, attention=attention)


def _named(tiny: TinyArchitecture, spec: ModelSpec) -> list[TensorSpec]:
    names = ARCHITECTURES[tiny.architecture]
    return [item._replace(name=names.name_in_file(item)) for item in all_tensors(spec)]


def _values(rng: np.random.Generator, item: TensorSpec) -> Floats:
    """Large enough that every part of a model matters."""
    if item.role == "layer_output_scale" or item.role.endswith("norm"):
        found = rng.uniform(0.5, 1.5, item.shape)
    elif item.role == "ssm_a":
        found = -rng.uniform(0.1, 2.0, item.shape)
    elif item.role.endswith(".bias"):
        found = rng.normal(0, 0.3, item.shape)
    else:
        found = rng.normal(0, 1 if item.role == "token_embd" else 1.2 / math.sqrt(item.cols), item.shape)
    return found.astype(np.float32)


def _stored(spec: ModelSpec, item: TensorSpec, values: Floats) -> Floats:
    """As files have it: some vectors of Mamba 2 with rows."""
    recurrence = spec.layers[item.layer].recurrence
    if item.role not in ("ssm_a", "ssm_d", "ssm_norm") or not isinstance(recurrence, Mamba2Spec):
        return values
    return values.reshape((recurrence.n_groups, -1) if item.role == "ssm_norm" else (-1, 1))


def _fuse(tensors: dict[str, Floats], prefix: str, tiny: TinyArchitecture) -> None:
    for kind in ("weight", "bias") if "attn_q" in tiny.biases else ("weight",):
        parts = [tensors.pop(f"{prefix}attn_{part}.{kind}") for part in "qkv"]
        tensors[f"{prefix}attn_qkv.{kind}"] = np.concatenate(parts)
    if "gate_up" in tiny.fused:
        gate = tensors.pop(f"{prefix}ffn_gate.weight")
        tensors[f"{prefix}ffn_up.weight"] = np.concatenate((gate, tensors[f"{prefix}ffn_up.weight"]))

"""Architectures of Hugging Face's transformers: what their code does that a `config.json` does not say.

An architecture that needs nothing new is one row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_INPUTS = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}


@dataclass(frozen=True, slots=True)
class HFArchitecture:
    name: str
    qkv_bias: bool | str = "attention_bias"
    """Whether there are biases, or the key that says so."""
    output_bias: bool | str = "attention_bias"
    qk_norm: Literal["", "head", "row"] = ""
    qk_norm_last: bool = False
    norms: Literal["before", "after", "both"] = "before"
    adds_one: bool = False
    """Norms multiply by 1 + weight."""
    gated: bool = False
    """What a head gives is gated."""
    neox: bool = True
    period: int | None = None
    """Every so many layers one has no window; 0: all have one; None: none has."""
    rope_by_kind: bool = False
    """Layers with a window turn in another way than those without."""
    unturned: Literal["", "listed", "full", "all", "unless_rope"] = ""
    """Layers without rotation: none, those that are listed, those without a window where others have one, all, or all
    unless position_embedding_type is rope."""
    scaled_embedding: bool = False
    """By the square root of its size."""
    reads: frozenset[str] = frozenset()
    """Keys that it knows; for others they are refused."""
    defaults: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    """What a missing key means."""
    names: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    """Tensors that are called otherwise than in most models, by role."""
    fused: tuple[str, ...] = ()
    """Which of qkv_proj and gate_up_proj (or input_linear) are one tensor."""
    recurrence: Literal["", "delta_net", "mamba2", "short_conv"] = ""
    """What layers have that carry a state."""
    state_keys: tuple[str, ...] = ()
    """Its sizes, in the order in which its spec has them."""
    layers: Literal["listed", "both", "state"] = "listed"
    """Which layers carry one: those that are listed, in place of attention; all, beside attention or alone."""
    single: bool = False
    """Whether every layer has one part: attention, a state, or a feed-forward."""
    eps: str = "rms_norm_eps"
    root: str = "model"
    """How the names of a layer's tensors begin."""


_GEMMA: Mapping[str, Any] = {
    "norms": "both",
    "scaled_embedding": True,
    "names": _AROUND,
    "defaults": {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 4, "head_dim": 256},
}
_GEMMA_2: Mapping[str, Any] = {**_GEMMA} | {"adds_one": True}
_AFTER: Any = {"norms": "after", "names": _AROUND}

_MAMBA_KEYS = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
_MAMBA_DEFAULTS = {"mamba_n_heads": 128, "mamba_d_state": 256, "mamba_n_groups": 1, "mamba_d_conv": 4}
_FEED_FORWARD = {
    "output_norm": "model.final_layernorm",
    "ffn_norm": "pre_ff_layernorm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}


def _mamba(name: str) -> dict[str, str]:
    """The tensors of Mamba 2, which is this part of a layer."""
    return {
        "ssm_in": f"{name}.in_proj",
        "ssm_conv1d": f"{name}.conv1d",
        "ssm_dt.bias": f"{name}.dt_bias",
        "ssm_a": f"{name}.A_log",
        "ssm_d": f"{name}.D",
        "ssm_norm": f"{name}.norm",
        "ssm_out": f"{name}.out_proj",
    }


_BACKBONE: Mapping[str, Any] = {
    "eps": "layer_norm_epsilon",
    "single": True,
    "root": "backbone",
    "recurrence": "mamba2",
    "defaults": {"n_groups": 8, "conv_kernel": 4, "head_dim": 128, "max_position_embeddings": 1 << 20},
}
_BACKBONE_NAMES = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "attn_norm": "norm",
    "ffn_norm": "norm",
    **_mamba("mixer"),
}

ARCHITECTURES: Mapping[str, HFArchitecture] = {
    "LlamaForCausalLM": HFArchitecture("llama"),
    "MistralForCausalLM": HFArchitecture("mistral", period=0),
    "Ministral3ForCausalLM": HFArchitecture(
        "mistral3", qkv_bias=False, output_bias=False, period=0, reads=frozenset({"llama_4_scaling_beta"})
    ),
    "Qwen2ForCausalLM": HFArchitecture(
        "qwen2", qkv_bias=True, output_bias=False, reads=frozenset({"use_sliding_window"})
    ),
    "Qwen3ForCausalLM": HFArchitecture("qwen3", qk_norm="head", reads=frozenset({"use_sliding_window"})),
    "Gemma2ForCausalLM": HFArchitecture(
        "gemma2",
        period=2,
        reads=frozenset({"attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"}),
        **_GEMMA_2,
    ),
    "Gemma3ForCausalLM": HFArchitecture(
        "gemma3",
        qk_norm="head",
        period=6,
        rope_by_kind=True,
        reads=frozenset({"final_logit_softcapping", "query_pre_attn_scalar", "sliding_window_pattern"}),
        **_GEMMA_2,
    ),
    "Gemma4ForCausalLM": HFArchitecture(
        "gemma4",
        qk_norm="head",
        period=6,
        rope_by_kind=True,
        reads=frozenset({"attention_k_eq_v", "final_logit_softcapping"}),
        **({**_GEMMA} | {"names": _AROUND | _LAYER_INPUTS | {"layer_output_scale": "layer_scalar"}}),
    ),
    "Phi3ForCausalLM": HFArchitecture(
        "phi3",
        qkv_bias=False,
        output_bias=False,
        period=0,
        reads=frozenset({"partial_rotary_factor"}),
        fused=("qkv_proj", "gate_up_proj"),
    ),
    "GraniteForCausalLM": HFArchitecture(
        "granite",
        reads=frozenset({"attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"}),
    ),
    "SmolLM3ForCausalLM": HFArchitecture(
        "smollm3",
        unturned="listed",
        reads=frozenset({"use_sliding_window", "no_rope_layers"}),
        defaults={"num_key_value_heads": 4},
    ),
    "Olmo2ForCausalLM": HFArchitecture("olmo2", qk_norm="row", **_AFTER),
    "Olmo3ForCausalLM": HFArchitecture("olmo3", qk_norm="row", period=4, rope_by_kind=True, **_AFTER),
    "Exaone4ForCausalLM": HFArchitecture(
        "exaone4",
        qkv_bias=False,
        output_bias=False,
        qk_norm="head",
        period=4,
        unturned="full",
        reads=frozenset({"sliding_window_pattern"}),
        **_AFTER,
    ),
    "Glm4ForCausalLM": HFArchitecture(
        "glm4",
        output_bias=False,
        norms="both",
        neox=False,
        reads=frozenset({"partial_rotary_factor"}),
        defaults={"attention_bias": True, "partial_rotary_factor": 0.5},
        names={"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
        fused=("gate_up_proj",),
    ),
    "Ernie4_5ForCausalLM": HFArchitecture("ernie4_5", qkv_bias=False, output_bias=False, neox=False),
    "HunYuanDenseV1ForCausalLM": HFArchitecture(
        "hunyuan-dense",
        qk_norm="head",
        qk_norm_last=True,
        reads=frozenset({"alpha"}),
        names={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    ),
    "Qwen3_5ForCausalLM": HFArchitecture(
        "qwen35",
        qk_norm="head",
        adds_one=True,
        gated=True,
        reads=frozenset({"partial_rotary_factor"}),
        defaults={
            "head_dim": 256,
            "partial_rotary_factor": 0.25,
            "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
        names={
            "attn_qkv": "linear_attn.in_proj_qkv",
            "attn_gate": "linear_attn.in_proj_z",
            "ssm_alpha": "linear_attn.in_proj_a",
            "ssm_beta": "linear_attn.in_proj_b",
            "ssm_conv1d": "linear_attn.conv1d",
            "ssm_dt.bias": "linear_attn.dt_bias",
            "ssm_a": "linear_attn.A_log",
            "ssm_norm": "linear_attn.norm",
            "ssm_out": "linear_attn.out_proj",
        },
        recurrence="delta_net",
        state_keys=(
            *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
            "linear_conv_kernel_dim",
        ),
    ),
    "Lfm2ForCausalLM": HFArchitecture(
        "lfm2",
        qkv_bias=False,
        output_bias=False,
        qk_norm="head",
        eps="norm_eps",
        defaults={"conv_L_cache": 3, "num_key_value_heads": 8, "full_attention_interval": 1},
        names={
            "output_norm": "model.embedding_norm",
            "attn_norm": "operator_norm",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "attn_output": "self_attn.out_proj",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_down": "feed_forward.w2",
            "ffn_up": "feed_forward.w3",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.conv": "conv.conv",
            "shortconv.out_proj": "conv.out_proj",
        },
        recurrence="short_conv",
        state_keys=("conv_L_cache",),
    ),
    "GraniteMoeHybridForCausalLM": HFArchitecture(
        "granitehybrid",
        unturned="unless_rope",
        reads=frozenset({"attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"}),
        defaults=_MAMBA_DEFAULTS,
        names={
            **_mamba("mamba"),
            "ffn_gate": "shared_mlp.gate_proj",
            "ffn_up": "shared_mlp.up_proj",
            "ffn_down": "shared_mlp.output_linear",
        },
        fused=("input_linear",),
        recurrence="mamba2",
        state_keys=_MAMBA_KEYS,
    ),
    "NemotronHForCausalLM": HFArchitecture(
        "nemotron_h",
        unturned="all",
        names={
            **_BACKBONE_NAMES,
            "attn_q": "mixer.q_proj",
            "attn_k": "mixer.k_proj",
            "attn_v": "mixer.v_proj",
            "attn_output": "mixer.o_proj",
            "ffn_up": "mixer.up_proj",
            "ffn_down": "mixer.down_proj",
        },
        state_keys=("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
        **_BACKBONE,
    ),
    "FalconH1ForCausalLM": HFArchitecture(
        "falcon-h1",
        reads=frozenset({"embedding_multiplier", "lm_head_multiplier"}),
        defaults=_MAMBA_DEFAULTS,
        names={**_mamba("mamba"), **_FEED_FORWARD},
        recurrence="mamba2",
        state_keys=_MAMBA_KEYS,
        layers="both",
    ),
    "BambaForCausalLM": HFArchitecture(
        "bamba",
        reads=frozenset({"partial_rotary_factor"}),
        defaults={**_MAMBA_DEFAULTS, "partial_rotary_factor": 0.5},
        names={**_mamba("mamba"), **_FEED_FORWARD},
        recurrence="mamba2",
        state_keys=_MAMBA_KEYS,
    ),
    "Mamba2ForCausalLM": HFArchitecture(
        "mamba2",
        names=_BACKBONE_NAMES,
        state_keys=("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel"),
        layers="state",
        **_BACKBONE,
    ),
    "SeedOssForCausalLM": HFArchitecture(
        "seed_oss", output_bias="attention_out_bias", defaults={"attention_bias": True, "head_dim": 128}
    ),
}

TEXT_PARTS = (
    *("Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration", "Mistral3ForConditionalGeneration"),
    "Qwen3_5ForConditionalGeneration",
)
"""Models of text and images, of which the text part is read: their `text_config`, by its `model_type`."""
TEXT_CLASSES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}
TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
"""How the tensors of a text part begin there, and in a model of text alone."""

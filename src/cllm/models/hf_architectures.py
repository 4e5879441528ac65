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
    neox: bool = True
    period: int | None = None
    """Every so many layers one has no window; 0: all have one; None: none has."""
    rope_by_kind: bool = False
    """Layers with a window turn in another way than those without."""
    unturned: Literal["", "listed", "full"] = ""
    """Layers without rotation: none, those that are listed, or those without a window where others have one."""
    scaled_embedding: bool = False
    """By the square root of its size."""
    reads: frozenset[str] = frozenset()
    """Keys that it knows; for others they are refused."""
    defaults: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    """What a missing key means."""
    names: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    """Tensors that are called otherwise than in most models, by role."""
    fused: tuple[str, ...] = ()
    """Which of qkv_proj and gate_up_proj are one tensor."""


_GEMMA: Mapping[str, Any] = {
    "norms": "both",
    "scaled_embedding": True,
    "names": _AROUND,
    "defaults": {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 4, "head_dim": 256},
}
_GEMMA_2: Mapping[str, Any] = {**_GEMMA} | {"adds_one": True}
_AFTER: Any = {"norms": "after", "names": _AROUND}

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
    "SeedOssForCausalLM": HFArchitecture(
        "seed_oss", output_bias="attention_out_bias", defaults={"attention_bias": True, "head_dim": 128}
    ),
}

TEXT_PARTS = ("Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration", "Mistral3ForConditionalGeneration")
"""Models of text and images, of which the text part is read: their `text_config`, by its `model_type`."""
TEXT_CLASSES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
}
TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
"""How the tensors of a text part begin there, and in a model of text alone."""

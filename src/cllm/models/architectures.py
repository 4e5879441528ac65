"""What the architectures of GGUF files are, in a few lines each.

A row says what all files of an architecture have in common: `gguf_decoder` reads the rest. What a row does not mention
is as in Llama: norms before, rotated in halves, SiLU. `layer` and `base` are for what only this architecture does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from cllm.models.gguf import GGUFModel
from cllm.models.gguf_recurrence import read_delta_net, read_mamba2, read_short_conv
from cllm.models.spec import Activation, LayerSpec, RecurrenceSpec
from cllm.models.tensors import TensorSpec

LayerChange = Callable[[GGUFModel, int, bool, LayerSpec], LayerSpec]
"""Makes the layer of this index, which is a sliding one or not, what it really is."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Some layers attend to a window of the last tokens."""

    period: int
    """Every layer but each of this number, unless the file says which; 0: all."""
    default: int = 0
    """The window of files that do not state one; 0: they have none."""
    base: float | None = None
    """Sliding layers are turned from this base (or what the file says) and not scaled; 0: from the base of all layers.
    None: they are turned like the others."""


@dataclass(frozen=True, slots=True)
class Architecture:
    models: str
    """Known ones."""
    neox: bool = True
    """Whether RoPE pairs dimension i of a head with i + half of them (otherwise 2i with 2i + 1)."""
    divisors: bool = False
    """Whether its files may have tensors of what slows down the turning."""
    norms: Literal["before", "after", "both"] = "before"
    qk_norm: Literal["", "head", "row"] = ""
    activation: Activation = "silu"
    """relu2: its feed-forward has no gate."""
    recurrence: Callable[[GGUFModel], RecurrenceSpec] | None = None
    """What layers have that carry a state."""
    scaled_embedding: bool = False
    """By the square root of its size."""
    windows: Windows | None = None
    keys: Mapping[str, float] = field(default_factory=dict)
    """Keys that mean something here, not everywhere: what they are in files that lack them."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Tensors that have another name in its files: both without the layer's number."""
    layer: LayerChange | None = None

    def name_in_file(self, item: TensorSpec) -> str:
        layer = f"blk.{item.layer}." if item.layer >= 0 else ""
        name = item.name.removeprefix(layer)
        return layer + self.names.get(name, name)


def _wide(n_layers: int) -> LayerChange:
    """The 27B models, known by their layers, scale scores by what each head has of the model's width."""

    def change(model: GGUFModel, index: int, slides: bool, layer: LayerSpec) -> LayerSpec:
        if model.spec.n_layers != n_layers:
            return layer
        width = model.spec.n_embd // layer.attends.n_heads
        return replace(layer, attention=replace(layer.attends, scale=1 / math.sqrt(width)))

    return change


def _gemma4(model: GGUFModel, index: int, slides: bool, layer: LayerSpec) -> LayerSpec:
    own = f"blk.{index}."
    attention = replace(
        layer.attends,
        scale=1.0,
        v_norm=True,
        v_is_k=layer.attends.kv_from is None and f"{own}attn_v.weight" not in model.tensors,
    )
    return replace(layer, attention=attention, output_scale=f"{own}layer_output_scale.weight" in model.tensors)


def _smollm3(model: GGUFModel, index: int, slides: bool, layer: LayerSpec) -> LayerSpec:
    return _unturned(layer) if index % 4 == 3 else layer


def _exaone4(model: GGUFModel, index: int, slides: bool, layer: LayerSpec) -> LayerSpec:
    return layer if slides or not model.keys.number("attention.sliding_window", 0) else _unturned(layer)


def _granite(model: GGUFModel, index: int, slides: bool, layer: LayerSpec) -> LayerSpec:
    turns = model.get(f"{model.spec.architecture}.rope.scaling.finetuned", True)
    return layer if turns else _unturned(layer)


def _nemotron_h(model: GGUFModel, index: int, slides: bool, layer: LayerSpec) -> LayerSpec:
    return _unturned(layer)


def _mamba2(model: GGUFModel, index: int, slides: bool, layer: LayerSpec) -> LayerSpec:
    return replace(layer, feed_forward=None)


def _qwen35(model: GGUFModel, index: int, slides: bool, layer: LayerSpec) -> LayerSpec:
    return layer if layer.attention is None else replace(layer, attention=replace(layer.attention, gated=True))


def _hunyuan(model: GGUFModel, index: int, slides: bool, layer: LayerSpec) -> LayerSpec:
    return replace(layer, attention=replace(layer.attends, qk_norm_last=True))


def _unturned(layer: LayerSpec) -> LayerSpec:
    return layer if layer.attention is None else replace(layer, attention=replace(layer.attention, rotation=None))


_FFN_NORM_AFTER_ATTENTION = {"ffn_norm.weight": "post_attention_norm.weight"}
_GEMMA = Architecture("Gemma", activation="gelu", scaled_embedding=True)

_GRANITE = Architecture(
    "Granite 3 (dense)",
    neox=False,
    divisors=True,
    keys={"attention.scale": 0.0, "embedding_scale": 0.0, "residual_scale": 0.0, "logit_scale": 0.0},
    layer=_granite,
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("Llama 2 and 3, Mistral 7B, SmolLM2, TinyLlama", neox=False, divisors=True),
    "qwen2": Architecture("Qwen2 and Qwen2.5"),
    "qwen3": Architecture("Qwen3 (dense)", qk_norm="head"),
    "mistral3": Architecture(
        "Ministral 3, Devstral 2", neox=False, divisors=True, keys={"attention.temperature_scale": 0.0}
    ),
    "gemma": _GEMMA,
    "gemma2": replace(
        _GEMMA,
        models="Gemma 2",
        norms="both",
        windows=Windows(period=2, default=4096),
        keys={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        layer=_wide(46),
    ),
    "gemma3": replace(
        _GEMMA,
        models="Gemma 3",
        norms="both",
        qk_norm="head",
        windows=Windows(period=6, base=10000.0),
        keys={"final_logit_softcapping": 0.0},
        layer=_wide(62),
    ),
    "gemma4": replace(
        _GEMMA,
        models="Gemma 4 (dense, E2B, E4B)",
        divisors=True,
        norms="both",
        qk_norm="head",
        windows=Windows(period=6, base=10000.0),
        keys={"final_logit_softcapping": 30.0},
        layer=_gemma4,
    ),
    "phi3": Architecture("Phi-3, Phi-3.5 mini, Phi-4, Phi-4 mini", divisors=True, windows=Windows(period=0)),
    "granite": _GRANITE,
    "granitehybrid": replace(_GRANITE, models="Granite 4 H (dense)", recurrence=read_mamba2),
    "smollm3": Architecture("SmolLM3", neox=False, layer=_smollm3),
    "olmo2": Architecture("OLMo 2 and 3", norms="after", qk_norm="row", windows=Windows(period=4, base=0.0)),
    "exaone4": Architecture(
        "EXAONE 4.0", divisors=True, norms="after", qk_norm="head", windows=Windows(period=4), layer=_exaone4
    ),
    "glm4": Architecture("GLM-4 0414 (dense)", neox=False, norms="both"),
    "ernie4_5": Architecture("ERNIE 4.5 0.3B", neox=False),
    "hunyuan-dense": Architecture(
        "Hunyuan dense", divisors=True, qk_norm="head", keys={"rope.scaling.alpha": 0.0}, layer=_hunyuan
    ),
    "seed_oss": Architecture("Seed-OSS", names=_FFN_NORM_AFTER_ATTENTION),
    "qwen35": Architecture(
        "Qwen3.5 to 3.8 (dense)",
        qk_norm="head",
        recurrence=read_delta_net,
        keys={"rope.dimension_sections": 0.0, "nextn_predict_layers": 0.0},
        names=_FFN_NORM_AFTER_ATTENTION,
        layer=_qwen35,
    ),
    "lfm2": Architecture(
        "LFM2, LFM2.5 (dense)",
        qk_norm="head",
        recurrence=read_short_conv,
        names={"output_norm.weight": "token_embd_norm.weight"},
    ),
    "nemotron_h": Architecture(
        "Nemotron-H, Nemotron Nano 2 (dense)",
        activation="relu2",
        recurrence=read_mamba2,
        keys={"attention.layer_norm_epsilon": 0.0},
        names={"ffn_norm.weight": "attn_norm.weight"},
        layer=_nemotron_h,
    ),
    "falcon-h1": Architecture("Falcon-H1", recurrence=read_mamba2, names={"ffn_norm.weight": "ffn_norm"}),
    "mamba2": Architecture("Mamba 2, Codestral Mamba", recurrence=read_mamba2, layer=_mamba2),
}

"""What a model needs of a backend beyond a plain decoder: Llama and Qwen need nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cllm.models.spec import AttentionSpec, DeltaNetSpec, LayerSpec, Mamba2Spec, ModelSpec, ShortConvSpec

_OF_ATTENTION: Mapping[str, Callable[[AttentionSpec], object]] = {
    "sliding windows": lambda each: each.window,
    "layers without positions": lambda each: each.rotation is None,
    "scaled rotations": lambda each: each.rotation is not None and each.rotation.magnitude != 1.0,
    "biases of outputs": lambda each: each.output_bias,
    "norms over all heads": lambda each: each.qk_norm == "row",
    "norms behind the rotation": lambda each: each.qk_norm_last,
    "norms of values": lambda each: each.v_norm,
    "a scale of scores": lambda each: each.scale is not None,
    "capped scores": lambda each: each.softcap,
    "sinks": lambda each: each.sinks,
    "temperature": lambda each: each.temperature is not None,
    "K/V of other layers": lambda each: each.kv_from is not None,
    "values made from keys": lambda each: each.v_is_k,
    "gated attention": lambda each: each.gated,
}
_OF_LAYERS: Mapping[str, Callable[[LayerSpec], object]] = {
    "norms of outputs": lambda each: each.norms != "before",
    "GELU": lambda each: each.feed_forward is not None and each.feed_forward.activation == "gelu",
    "scaled layers": lambda each: each.output_scale,
    "ungated feed-forward": lambda each: each.feed_forward is not None and not each.feed_forward.gated,
    "layers of one part": lambda each: each.feed_forward is None or not (each.attention or each.recurrence),
    "gated delta nets": lambda each: isinstance(each.recurrence, DeltaNetSpec),
    "Mamba 2": lambda each: isinstance(each.recurrence, Mamba2Spec),
    "short convolutions": lambda each: isinstance(each.recurrence, ShortConvSpec),
}
_OF_MODELS: Mapping[str, Callable[[ModelSpec], object]] = {
    "layers of different sizes": lambda each: len(_heads(each)) > 1 or len(_widths(each)) > 1,
    "a scale of embeddings": lambda each: each.embedding_scale != 1.0,
    "a scale of residuals": lambda each: each.residual_scale != 1.0,
    "a scale of logits": lambda each: each.logit_scale != 1.0,
    "capped logits": lambda each: each.logit_softcap,
    "embeddings of layers": lambda each: each.layer_input_size,
}
FEATURES: tuple[str, ...] = (*_OF_ATTENTION, *_OF_LAYERS, *_OF_MODELS)


def features_of(spec: ModelSpec) -> list[str]:
    """In the order of `FEATURES`."""
    kinds, attentions = set(spec.layers), set(spec.attentions)
    return [
        *(name for name, has in _OF_ATTENTION.items() if any(map(has, attentions))),
        *(name for name, has in _OF_LAYERS.items() if any(map(has, kinds))),
        *(name for name, has in _OF_MODELS.items() if has(spec)),
    ]


def _heads(spec: ModelSpec) -> set[tuple[int, ...]]:
    return {(each.n_heads, each.n_kv_heads, each.head_dim_k, each.head_dim_v) for each in set(spec.attentions)}


def _widths(spec: ModelSpec) -> set[int]:
    return {layer.feed_forward.size for layer in set(spec.layers) if layer.feed_forward is not None}

"""A model as its description says it, in numpy and float32: slow, short, and for everything that can be described.

It shares the reading of files with the engines, and nothing of what computes. Where it agrees with llama.cpp and
Hugging Face transformers, a file is understood; and then it says what an engine must compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cllm.models.dequantise import dequantised_rows
from cllm.models.gguf import GGUFModel, TensorFile
from cllm.models.gguf_decoder import decoder_spec, stored_tensors
from cllm.models.spec import AttentionSpec, Rotation

Floats = NDArray[np.float32]


class PlainModel:
    """Has all weights in memory, as float32."""

    def __init__(self, model: GGUFModel, context: int | None = None) -> None:
        self.spec = decoder_spec(model, context)
        self._weights: dict[tuple[int, str], Floats] = {}
        with TensorFile(model) as file:
            for item in stored_tensors(model, self.spec):
                whole = np.concatenate(list(dequantised_rows(file, model, item.name)))
                rows = whole.reshape(model.tensors[item.name].shape[::-1])
                self._weights[item.layer, item.role] = rows[item.first : item.first + item.shape[0]]

    def logits(self, tokens: Sequence[int]) -> Floats:
        """A row for every position."""
        spec = self.spec
        x = self._get(-1, "token_embd")[list(tokens)] * np.float32(spec.embedding_scale)
        inputs = self._layer_inputs(tokens, x) if spec.layer_input_size else None
        kept: list[tuple[Floats, Floats]] = []
        for index, layer in enumerate(spec.layers):
            attended = self._attend(index, self._before(index, "attn_norm", x), kept)
            x = x + self._after(index, "post_attention_norm", attended)
            x = x + self._after(index, "post_ffw_norm", self._feed_forward(index, self._before(index, "ffn_norm", x)))
            if inputs is not None:
                gated = gelu(x @ self._get(index, "inp_gate").T) * inputs[:, index]
                x = x + self._norm(gated @ self._get(index, "proj").T, self._get(index, "post_norm"))
            if layer.output_scale:
                x = x * self._get(index, "layer_output_scale")
        head = self._get(-1, "token_embd" if spec.tied else "output")
        found = self._norm(x, self._get(-1, "output_norm")) @ head.T
        return capped(found * np.float32(spec.logit_scale), spec.logit_softcap)

    def _get(self, layer: int, role: str) -> Floats:
        return self._weights[layer, role]

    def _norm(self, x: Floats, weights: Floats | None) -> Floats:
        found: Floats = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + np.float32(self.spec.rms_eps))
        return found if weights is None else found * weights

    def _before(self, index: int, role: str, x: Floats) -> Floats:
        return x if self.spec.layers[index].norms == "after" else self._norm(x, self._get(index, role))

    def _after(self, index: int, role: str, x: Floats) -> Floats:
        found = x if self.spec.layers[index].norms == "before" else self._norm(x, self._get(index, role))
        return found * np.float32(self.spec.residual_scale)

    def _layer_inputs(self, tokens: Sequence[int], x: Floats) -> Floats:
        size, shape = self.spec.layer_input_size, (len(tokens), self.spec.n_layers, self.spec.layer_input_size)
        own = self._get(-1, "per_layer_token_embd")[list(tokens)].reshape(shape) * np.float32(math.sqrt(size))
        made = (x @ self._get(-1, "per_layer_model_proj").T / np.float32(math.sqrt(self.spec.n_embd))).reshape(shape)
        return (self._norm(made, self._get(-1, "per_layer_proj_norm")) + own) * np.float32(math.sqrt(0.5))

    def _feed_forward(self, index: int, x: Floats) -> Floats:
        activate = gelu if self.spec.layers[index].feed_forward.activation == "gelu" else silu
        gated = activate(x @ self._get(index, "ffn_gate").T) * (x @ self._get(index, "ffn_up").T)
        return gated @ self._get(index, "ffn_down").T

    def _attend(self, index: int, x: Floats, kept: list[tuple[Floats, Floats]]) -> Floats:
        """`kept` are keys and values of the layers before, and then of this one, too."""
        spec = self.spec.layers[index].attention
        queries = self._turned(index, "q", self._project(index, "attn_q", x), spec.n_heads)
        if spec.temperature is not None:
            far = np.floor(np.arange(len(x)) / spec.temperature.context)
            queries = queries * (1 + spec.temperature.beta * np.log1p(far)).astype(np.float32)[:, None, None]
        kept.append(self._keys_and_values(index, x) if spec.kv_from is None else kept[spec.kv_from])
        sinks = self._get(index, "attn_sinks") if spec.sinks else None
        found = attention(spec, queries, *kept[index], sinks).reshape(len(x), spec.output_size)
        return self._with_bias(index, "attn_output", found @ self._get(index, "attn_output").T)

    def _keys_and_values(self, index: int, x: Floats) -> tuple[Floats, Floats]:
        spec = self.spec.layers[index].attention
        keys = self._project(index, "attn_k", x)
        values = keys if spec.v_is_k else self._project(index, "attn_v", x)
        values = values.reshape(len(x), spec.n_kv_heads, spec.head_dim_v)
        return self._turned(index, "k", keys, spec.n_kv_heads), self._norm(values, None) if spec.v_norm else values

    def _project(self, index: int, role: str, x: Floats) -> Floats:
        return self._with_bias(index, role, x @ self._get(index, role).T)

    def _with_bias(self, index: int, role: str, x: Floats) -> Floats:
        bias = self._weights.get((index, f"{role}.bias"))
        return x if bias is None else x + bias

    def _turned(self, index: int, part: str, x: Floats, n_heads: int) -> Floats:
        """Heads of queries or keys, normalised and turned."""
        spec = self.spec.layers[index].attention
        weights = self._get(index, f"attn_{part}_norm") if spec.qk_norm else None
        x = self._norm(x, weights) if spec.qk_norm == "row" else x
        x = x.reshape(len(x), n_heads, spec.head_dim_k)
        x = self._norm(x, weights) if spec.qk_norm == "head" and not spec.qk_norm_last else x
        x = x if spec.rotation is None else turned(spec.rotation, x)
        return self._norm(x, weights) if spec.qk_norm_last else x


def attention(spec: AttentionSpec, queries: Floats, keys: Floats, values: Floats, sinks: Floats | None) -> Floats:
    """All are [tokens, heads, dimensions]."""
    keys, values = (np.repeat(each, spec.group, axis=1) for each in (keys, values))
    scale = spec.head_dim_k**-0.5 if spec.scale is None else spec.scale
    scores = capped(np.einsum("qhd,khd->hqk", queries, keys) * np.float32(scale), spec.softcap)
    back = np.arange(len(queries))[:, None] - np.arange(len(queries))
    hidden = (back < 0) | (back >= spec.window) if spec.window else back < 0
    scores = np.where(hidden, np.float32(-np.inf), scores)
    if sinks is not None:
        scores = np.concatenate((scores, np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))), -1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights[..., : len(keys)], values)


def turned(rotation: Rotation, x: Floats) -> Floats:
    pairs = rotation.dims // 2
    frequencies = rotation.base ** -(np.arange(pairs) / pairs) / rotation.scale
    if rotation.divisors is not None:
        frequencies /= np.array(rotation.divisors)
    angles = np.outer(np.arange(len(x)), frequencies)[:, None]
    cos, sin = (each.astype(np.float32) * np.float32(rotation.magnitude) for each in (np.cos(angles), np.sin(angles)))
    first = np.arange(pairs) if rotation.neox else np.arange(0, rotation.dims, 2)
    second = first + (pairs if rotation.neox else 1)
    found = x.copy()
    found[..., first] = x[..., first] * cos - x[..., second] * sin
    found[..., second] = x[..., second] * cos + x[..., first] * sin
    return found


def capped(x: Floats, cap: float) -> Floats:
    return np.float32(cap) * np.tanh(x / np.float32(cap)) if cap else x


def silu(x: Floats) -> Floats:
    return x / (1 + np.exp(-x))


def gelu(x: Floats) -> Floats:
    """Its approximation by tanh."""
    return x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3))) / 2

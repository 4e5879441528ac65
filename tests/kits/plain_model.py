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
from cllm.models.spec import AttentionSpec, DeltaNetSpec, Mamba2Spec, ModelSpec, Rotation, ShortConvSpec

Floats = NDArray[np.float32]


class PlainModel:
    """Has all weights in memory, as float32."""

    def __init__(self, model: GGUFModel, context: int | None = None) -> None:
        self.spec = decoder_spec(model, context)
        self._weights: dict[tuple[int, str], Floats] = {}
        with TensorFile(model) as file:
            for item in stored_tensors(model, self.spec):
                whole = np.concatenate(list(dequantised_rows(file, model, item.name)))
                rows = whole.reshape(-1 if len(item.shape) == 1 else model.tensors[item.name].shape[::-1])
                self._weights[item.layer, item.role] = rows[item.first : item.first + item.shape[0]]

    @classmethod
    def of(cls, spec: ModelSpec, weights: dict[tuple[int, str], Floats]) -> PlainModel:
        """Weights by layer and role, wherever they come from."""
        made = cls.__new__(cls)
        made.spec, made._weights = spec, weights
        return made

    @property
    def weights(self) -> dict[tuple[int, str], Floats]:
        """By layer and role."""
        return self._weights

    def logits(self, tokens: Sequence[int]) -> Floats:
        """A row for every position."""
        spec = self.spec
        x = self._get(-1, "token_embd")[list(tokens)] * np.float32(spec.embedding_scale)
        inputs = self._layer_inputs(tokens, x) if spec.layer_input_size else None
        kept: dict[int, tuple[Floats, Floats]] = {}
        for index, layer in enumerate(spec.layers):
            if layer.attention is not None or layer.recurrence is not None:
                mixed = self._mix(index, self._before(index, "attn_norm", x), kept)
                x = x + self._after(index, "post_attention_norm", mixed)
            if layer.feed_forward is not None:
                fed = self._feed_forward(index, self._before(index, "ffn_norm", x))
                x = x + self._after(index, "post_ffw_norm", fed)
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
        spec = self.spec.layers[index].feeds
        activate = {"gelu": gelu, "silu": silu, "relu2": relu2}[spec.activation]
        up = x @ self._get(index, "ffn_up").T
        made = activate(x @ self._get(index, "ffn_gate").T) * up if spec.gated else activate(up)
        return made @ self._get(index, "ffn_down").T

    def _mix(self, index: int, x: Floats, kept: dict[int, tuple[Floats, Floats]]) -> Floats:
        """What attention and a recurrence beside it give together."""
        spec = self.spec.layers[index]
        if spec.attention is None:
            return self._recur(index, x)
        attended = self._attend(index, x, kept)
        return attended if spec.recurrence is None else attended + self._recur(index, x)

    def _recur(self, index: int, x: Floats) -> Floats:
        spec = self.spec.layers[index].recurrence
        if isinstance(spec, ShortConvSpec):
            b, c, values = np.split(x @ self._get(index, "shortconv.in_proj").T, 3, -1)
            return (c * convolved(b * values, self._get(index, "shortconv.conv"))) @ self._get(
                index, "shortconv.out_proj"
            ).T
        if isinstance(spec, DeltaNetSpec):
            return self._delta_net(index, spec, x)
        assert isinstance(spec, Mamba2Spec)
        return self._mamba2(index, spec, x)

    def _delta_net(self, index: int, spec: DeltaNetSpec, x: Floats) -> Floats:
        mixed = silu(convolved(x @ self._get(index, "attn_qkv").T, self._get(index, "ssm_conv1d")))
        q, k, v = np.split(mixed, (spec.k_size, 2 * spec.k_size), -1)
        q, k = (unit(each.reshape(len(x), spec.n_k_heads, -1), self.spec.rms_eps) for each in (q, k))
        heads = np.arange(spec.n_v_heads)
        own = heads % spec.n_k_heads if spec.tiled else heads // (spec.n_v_heads // spec.n_k_heads)
        q, k, v = q[:, own] * np.float32(spec.head_dim_k**-0.5), k[:, own], v.reshape(len(x), spec.n_v_heads, -1)
        steps = softplus(x @ self._get(index, "ssm_alpha").T + self._get(index, "ssm_dt.bias"))
        decays = np.exp(steps * self._get(index, "ssm_a"))
        betas = 1 / (1 + np.exp(-(x @ self._get(index, "ssm_beta").T)))
        state, found = np.zeros((spec.n_v_heads, spec.head_dim_v, spec.head_dim_k), np.float32), np.empty_like(v)
        for t in range(len(x)):
            state *= decays[t, :, None, None]
            known = np.einsum("hvk,hk->hv", state, k[t])
            state += np.einsum("hv,hk->hvk", betas[t, :, None] * (v[t] - known), k[t])
            found[t] = np.einsum("hvk,hk->hv", state, q[t])
        normed = self._norm(found, self._get(index, "ssm_norm")).reshape(len(x), -1)
        return (normed * silu(x @ self._get(index, "attn_gate").T)) @ self._get(index, "ssm_out").T

    def _mamba2(self, index: int, spec: Mamba2Spec, x: Floats) -> Floats:
        made = x @ self._get(index, "ssm_in").T
        gates, mixed, steps = np.split(made, (spec.inner_size, spec.inner_size + spec.conv_size), -1)
        bias = self._get(index, "ssm_conv1d.bias")
        mixed = silu(convolved(mixed, self._get(index, "ssm_conv1d")) + bias)
        groups = spec.n_groups * spec.state_size
        v, b, c = np.split(mixed, (spec.inner_size, spec.inner_size + groups), -1)
        v = v.reshape(len(x), spec.n_heads, spec.head_dim)
        shared = spec.n_heads // spec.n_groups
        b, c = (np.repeat(each.reshape(len(x), spec.n_groups, -1), shared, 1) for each in (b, c))
        steps = softplus(steps + self._get(index, "ssm_dt.bias"))
        decays = np.exp(steps * self._get(index, "ssm_a"))
        state, found = np.zeros((spec.n_heads, spec.head_dim, spec.state_size), np.float32), np.empty_like(v)
        for t in range(len(x)):
            state = state * decays[t, :, None, None] + np.einsum("hv,hs->hvs", steps[t, :, None] * v[t], b[t])
            found[t] = np.einsum("hvs,hs->hv", state, c[t])
        found = (found + v * self._get(index, "ssm_d")[:, None]).reshape(len(x), -1) * silu(gates)
        if spec.norm:
            grouped = self._norm(found.reshape(len(x), spec.n_groups, -1), None).reshape(len(x), -1)
            found = grouped * self._get(index, "ssm_norm")
        return found @ self._get(index, "ssm_out").T

    def _attend(self, index: int, x: Floats, kept: dict[int, tuple[Floats, Floats]]) -> Floats:
        """`kept` are keys and values of the layers before, and then of this one, too."""
        spec = self.spec.layers[index].attends
        projected, gates = self._project(index, "attn_q", x), None
        if spec.gated:
            both = projected.reshape(len(x), spec.n_heads, 2, spec.head_dim_k)
            projected, gates = both[:, :, 0].reshape(len(x), -1), both[:, :, 1].reshape(len(x), -1)
        queries = self._turned(index, "q", projected, spec.n_heads)
        if spec.temperature is not None:
            far = np.floor(np.arange(len(x)) / spec.temperature.context)
            queries = queries * (1 + spec.temperature.beta * np.log1p(far)).astype(np.float32)[:, None, None]
        kept[index] = self._keys_and_values(index, x) if spec.kv_from is None else kept[spec.kv_from]
        sinks = self._get(index, "attn_sinks") if spec.sinks else None
        found = attention(spec, queries, *kept[index], sinks).reshape(len(x), spec.output_size)
        found = found if gates is None else found / (1 + np.exp(-gates))
        return self._with_bias(index, "attn_output", found @ self._get(index, "attn_output").T)

    def _keys_and_values(self, index: int, x: Floats) -> tuple[Floats, Floats]:
        spec = self.spec.layers[index].attends
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
        spec = self.spec.layers[index].attends
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


def convolved(x: Floats, weights: Floats) -> Floats:
    """Every channel with its own weights, over its last inputs; before the text there are zeros."""
    kernel = weights.shape[1]
    padded = np.concatenate((np.zeros((kernel - 1, x.shape[1]), np.float32), x))
    return sum(padded[i : i + len(x)] * weights[:, i] for i in range(kernel))


def unit(x: Floats, eps: float) -> Floats:
    """Vectors of length 1."""
    return x / np.sqrt(np.square(x).sum(-1, keepdims=True) + np.float32(eps))


def softplus(x: Floats) -> Floats:
    return np.logaddexp(x, np.float32(0))


def relu2(x: Floats) -> Floats:
    return np.square(np.maximum(x, 0))


def silu(x: Floats) -> Floats:
    return x / (1 + np.exp(-x))


def gelu(x: Floats) -> Floats:
    """Its approximation by tanh."""
    return x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3))) / 2

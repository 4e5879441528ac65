"""Models whose layers differ: specs, random weights for them, what they compute in plain numpy, and a rig whose K/V
lies in groups of cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from numpy.typing import NDArray

from cllm._native import Engine
from cllm.models.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, Rotation, Temperature
from recurrence_kit import recurred, recurrence_sizes
from step_kit import Floats, spans

Doubles = NDArray[np.float64]
Weights = dict[tuple[int, str], Floats]
Q8_0, F32 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32
BLOCK = 16


# --- specs ---


def attention(heads: int = 4, kv_heads: int = 2, dim: int = 32, **changes: Any) -> AttentionSpec:
    changes.setdefault("rotation", Rotation(10000.0, dim, neox=True))
    return AttentionSpec(heads, kv_heads, dim, dim, **changes)


def layer(of: AttentionSpec, n_ff: int = 96, activation: Any = "silu", **changes: Any) -> LayerSpec:
    return LayerSpec(of, FeedForwardSpec(n_ff, activation), **changes)


def model(*layers: LayerSpec, n_embd: int = 64, n_vocab: int = 101, **changes: Any) -> ModelSpec:
    return ModelSpec("made up", n_embd, n_vocab, 4096, layers, 1e-3, **changes)


PLAIN = model(layer(attention()), layer(attention()))


def with_attention(**changes: Any) -> ModelSpec:
    """Of the second layer only."""
    first, second = PLAIN.layers
    return replace(PLAIN, layers=(first, replace(second, attention=replace(second.attention, **changes))))


def with_layer(**changes: Any) -> ModelSpec:
    first, second = PLAIN.layers
    return replace(PLAIN, layers=(first, replace(second, **changes)))


SCALED = replace(PLAIN, layers=(replace(PLAIN.layers[0], output_scale=True),) * 2)
"""Not only in the last layer, where the last norm would undo it."""
TURN = Rotation(10000.0, 32, neox=True)
FEATURES: dict[str, ModelSpec] = {
    "window": with_attention(window=21),
    "window of one": with_attention(window=1),
    "softcap": with_attention(softcap=1.5),
    "sinks": with_attention(sinks=True),
    "scale": with_attention(scale=0.7),
    "temperature": with_attention(temperature=Temperature(1.5, 8)),
    "norm of values": with_attention(v_norm=True),
    "norm of heads": with_attention(qk_norm="head"),
    "norm of turned heads": with_attention(qk_norm="head", qk_norm_last=True),
    "norm of all heads": with_attention(qk_norm="row"),
    "norm of all heads, biases": with_attention(qk_norm="row", qkv_bias=True),
    "biases": with_attention(qkv_bias=True),
    "bias of the output": with_attention(output_bias=True),
    "magnitude": with_attention(rotation=replace(TURN, magnitude=1.4)),
    "partial rotation": with_attention(rotation=replace(TURN, dims=16)),
    "neighbours turn": with_attention(rotation=replace(TURN, neox=False)),
    "slowed down": with_attention(rotation=replace(TURN, scale=2.0, divisors=(1.0, *[3.0] * 14, 1e30))),
    "no rotation": with_attention(rotation=None),
    "values are keys": with_attention(v_is_k=True),
    "values are keys, with norms": with_attention(v_is_k=True, qk_norm="head", v_norm=True),
    "keys of an earlier layer": with_attention(kv_from=0),
    "norms after": with_layer(norms="after"),
    "norms both": with_layer(norms="both"),
    "gelu": with_layer(feed_forward=FeedForwardSpec(96, "gelu")),
    "output scale": SCALED,
    "embedding scale": replace(PLAIN, embedding_scale=8.0),
    "residual scale": replace(PLAIN, residual_scale=0.4),
    "logit scale": replace(PLAIN, logit_scale=0.3),
    "logit softcap": replace(PLAIN, logit_softcap=1.2),
    "inputs of layers": replace(PLAIN, layer_input_size=32),
    "inputs of layers, scaled": replace(SCALED, layer_input_size=32),
    "other sizes": model(layer(attention()), layer(attention(6, 3, 64), 160), layer(attention(8, 1, 16), 64)),
}

_LOCAL = {"qk_norm": "head", "rotation": Rotation(1e4, 32, neox=True), "scale": 0.25}
_GLOBAL = _LOCAL | {"rotation": Rotation(1e6, 32, neox=True, scale=8.0)}
_YARN = Rotation(150000.0, 64, neox=True, divisors=tuple(np.geomspace(1, 32, 32)), magnitude=1.3466)
_OSS = {"rotation": _YARN, "qkv_bias": True, "output_bias": True, "sinks": True}
_SMALL = {"qk_norm": "head", "v_norm": True, "scale": 1.0, "rotation": Rotation(1e4, 32, neox=True)}
_LARGE = _SMALL | {"rotation": Rotation(1e6, 64, neox=True, divisors=(*[1.0] * 8, *[1e30] * 24))}
_SANDWICH: dict[str, Any] = {"norms": "both", "activation": "gelu"}


def like_gemma3(window: int) -> ModelSpec:
    local, whole = attention(window=window, **_LOCAL), attention(**_GLOBAL)
    layers = (layer(each, **_SANDWICH) for each in (local, local, whole, local))
    return model(*layers, embedding_scale=8.0)


def like_gemma2(window: int) -> ModelSpec:
    local, whole = attention(window=window, softcap=4.0), attention(softcap=4.0)
    layers = (layer(each, **_SANDWICH) for each in (local, whole))
    return model(*layers, embedding_scale=8.0, logit_softcap=3.0)


def like_gpt_oss(window: int) -> ModelSpec:
    local, whole = attention(8, 2, 64, window=window, **_OSS), attention(8, 2, 64, **_OSS)
    return model(layer(local), layer(whole), layer(local))


def like_gemma4(window: int) -> ModelSpec:
    """Heads of two sizes, K/V of earlier layers, V = K, inputs of layers."""
    local, whole = attention(4, 2, 32, window=window, **_SMALL), attention(4, 1, 64, v_is_k=True, **_LARGE)
    reused = (replace(local, kv_from=0), replace(whole, kv_from=1))
    sizes = (96, 96, 192, 192)
    layers = (
        layer(each, n_ff, output_scale=True, **_SANDWICH)
        for each, n_ff in zip((local, whole, *reused), sizes, strict=True)
    )
    return model(*layers, embedding_scale=8.0, logit_softcap=3.0, layer_input_size=32)


def like_olmo2(window: int) -> ModelSpec:
    local, whole = attention(window=window, qk_norm="row"), attention(qk_norm="row")
    return model(*(layer(each, norms="after") for each in (local, whole)))


MODELS = {
    "gemma3": like_gemma3, "gemma2": like_gemma2, "gpt-oss": like_gpt_oss, "gemma4": like_gemma4, "olmo2": like_olmo2
}  # fmt: skip


# --- weights ---


def sizes_of(spec: ModelSpec) -> dict[tuple[int, str], tuple[int, ...]]:
    n_embd, own = spec.n_embd, spec.layer_input_size
    found: dict[tuple[int, str], tuple[int, ...]] = {
        (-1, "token_embd"): (spec.n_vocab, n_embd),
        (-1, "output_norm"): (n_embd,),
        (-1, "output"): (spec.n_vocab, n_embd),
    }
    if own:
        every = own * spec.n_layers
        found |= {(-1, "per_layer_token_embd"): (spec.n_vocab, every), (-1, "per_layer_model_proj"): (every, n_embd)}
        found[-1, "per_layer_proj_norm"] = (own,)
    for index, each in enumerate(spec.layers):
        found |= {(index, role): size for role, size in _layer_sizes(spec, each).items()}
    return found


def _layer_sizes(spec: ModelSpec, of: LayerSpec) -> dict[str, tuple[int, ...]]:
    n_embd, own, feed = spec.n_embd, spec.layer_input_size, of.feed_forward
    n_ff = feed.size if feed is not None else 0
    mixes = of.attention is not None or of.recurrence is not None
    wanted: dict[str, tuple[bool, tuple[int, ...]]] = {
        "attn_norm": (mixes and of.norms != "after", (n_embd,)),
        "ffn_norm": (n_ff > 0 and of.norms != "after", (n_embd,)),
        "post_attention_norm": (of.norms != "before", (n_embd,)),
        "post_ffw_norm": (of.norms != "before", (n_embd,)),
        **(_attention_sizes(spec, of.attention) if of.attention is not None else {}),
        "ffn_gate": (feed is not None and feed.gated, (n_ff, n_embd)),
        "ffn_up": (n_ff > 0, (n_ff, n_embd)),
        "ffn_down": (n_ff > 0, (n_embd, n_ff)),
        "layer_output_scale": (of.output_scale, (1,)),
        "inp_gate": (own > 0, (own, n_embd)),
        "proj": (own > 0, (n_embd, own)),
        "post_norm": (own > 0, (n_embd,)),
    }
    found = {role: size for role, (there, size) in wanted.items() if there}
    return found | (recurrence_sizes(of.recurrence, n_embd) if of.recurrence is not None else {})


def _attention_sizes(spec: ModelSpec, heads: AttentionSpec) -> dict[str, tuple[bool, tuple[int, ...]]]:
    n_embd, stores, row = spec.n_embd, heads.kv_from is None, heads.qk_norm == "row"
    return {
        "attn_q": (True, (heads.q_size * (2 if heads.gated else 1), n_embd)),
        "attn_k": (stores, (heads.k_size, n_embd)),
        "attn_v": (stores and not heads.v_is_k, (heads.v_size, n_embd)),
        "attn_q.bias": (heads.qkv_bias, (heads.q_size,)),
        "attn_k.bias": (heads.qkv_bias and stores, (heads.k_size,)),
        "attn_v.bias": (heads.qkv_bias and stores, (heads.v_size,)),
        "attn_q_norm": (bool(heads.qk_norm), (heads.q_size if row else heads.head_dim_k,)),
        "attn_k_norm": (bool(heads.qk_norm) and stores, (heads.k_size if row else heads.head_dim_k,)),
        "attn_sinks": (heads.sinks, (heads.n_heads,)),
        "attn_output": (True, (n_embd, heads.output_size)),
        "attn_output.bias": (heads.output_bias, (n_embd,)),
    }


def random_weights(spec: ModelSpec, seed: int = 0) -> Weights:
    """A tensor's values depend on its name and size alone. Activations keep a size of about 1."""
    found: Weights = {}
    for (index, role), size in sizes_of(spec).items():
        rng = np.random.default_rng([seed, index + 1, *role.encode()])
        if role.endswith(("norm", "scale")):
            values = rng.normal(1.0, 0.2, size)
        elif role == "ssm_a":
            values = -np.exp(rng.normal(-1.0, 1.0, size))
        elif len(size) == 1:
            values = rng.normal(0.0, 0.5, size)
        else:
            values = rng.normal(0.0, 1.0 if role.endswith("token_embd") else size[1] ** -0.5, size)
        found[index, role] = values.astype(np.float32)
    return found


def quantised(weights: Weights) -> dict[tuple[int, str], NDArray[np.uint8]]:
    """Matrices as q8_0."""
    matrices = {name: values for name, values in weights.items() if values.ndim == 2 and "conv" not in name[1][-6:]}
    return {name: quantize(values, Q8_0) for name, values in matrices.items()}


def load(
    spec: ModelSpec, weights: Weights, *, instruction_set: str = "auto", threads: int = 1, q8: bool = False
) -> Engine:
    engine = Engine(instruction_set=instruction_set, threads=threads, spec=spec)
    packed: Mapping[tuple[int, str], NDArray[np.uint8]] = quantised(weights) if q8 else {}
    for (index, role), values in weights.items():
        raw = packed.get((index, role), values)
        rows, cols = values.shape if values.ndim == 2 else (1, len(values))
        kind = Q8_0 if (index, role) in packed else F32
        engine.load(index, role, int(kind), rows, cols, np.ascontiguousarray(raw).view(np.uint8).ravel())
    engine.seal()
    return engine


# --- what is computed, plainly ---


def reference(spec: ModelSpec, weights: Weights, tokens: Sequence[int]) -> Doubles:
    """Logits of every position. Keys and values are rounded to f16, as they are kept."""
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    first = x = w[-1, "token_embd"][list(tokens)] * spec.embedding_scale
    kept: dict[int, tuple[Doubles, Doubles]] = {}
    for index, each in enumerate(spec.layers):
        own = {role: values for (at, role), values in w.items() if at == index}
        given, normed = np.zeros_like(x), _norm(spec, x, own.get("attn_norm"))
        if each.attention is not None:
            given = given + _attend(spec, each.attention, own, normed, index, kept)
        if each.recurrence is not None:
            given = given + recurred(each.recurrence, own, normed, spec.rms_eps)
        x = x + spec.residual_scale * _norm(spec, given, own.get("post_attention_norm"))
        if each.feed_forward is not None:
            given = _feed_forward(each.feed_forward, own, _norm(spec, x, own.get("ffn_norm")))
            x = x + spec.residual_scale * _norm(spec, given, own.get("post_ffw_norm"))
        if spec.layer_input_size:
            gate = _gelu(x @ own["inp_gate"].T) * _layer_input(spec, w, tokens, first, index)
            x = x + _norm(spec, gate @ own["proj"].T, own["post_norm"])
        x = x * own.get("layer_output_scale", np.ones(1))
    logits: Doubles = _norm(spec, x, w[-1, "output_norm"]) @ w[-1, "output"].T * spec.logit_scale
    return _capped(logits, spec.logit_softcap)


def _feed_forward(of: FeedForwardSpec, own: Mapping[str, Doubles], x: Doubles) -> Doubles:
    up = x @ own["ffn_up"].T
    if not of.gated:
        made = np.maximum(up, 0) ** 2
    else:
        made = (_gelu if of.activation == "gelu" else _silu)(x @ own["ffn_gate"].T) * up
    return made @ own["ffn_down"].T


def _norm(spec: ModelSpec, x: Doubles, weight: Doubles | None) -> Doubles:
    """None: there is none."""
    if weight is None:
        return x
    found: Doubles = x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.rms_eps) * weight
    return found


def _silu(x: Doubles) -> Doubles:
    found: Doubles = x / (1 + np.exp(-x))
    return found


def _gelu(x: Doubles) -> Doubles:
    found: Doubles = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return found


def _capped(x: Doubles, cap: float) -> Doubles:
    return cap * np.tanh(x / cap) if cap else x


def _layer_input(
    spec: ModelSpec, w: Mapping[tuple[int, str], Doubles], tokens: Sequence[int], first: Doubles, index: int
) -> Doubles:
    own = spec.layer_input_size
    rows = slice(index * own, (index + 1) * own)
    projected = first @ w[-1, "per_layer_model_proj"][rows].T / np.sqrt(spec.n_embd)
    embedded = w[-1, "per_layer_token_embd"][list(tokens)][:, rows] * np.sqrt(own)
    found: Doubles = (_norm(spec, projected, w[-1, "per_layer_proj_norm"]) + embedded) / np.sqrt(2)
    return found


def _turned(rotation: Rotation | None, x: Doubles) -> Doubles:
    """x: [positions, heads, dimensions]."""
    if rotation is None:
        return x
    half = rotation.dims // 2
    speed = rotation.base ** -(np.arange(half) * 2 / rotation.dims) / rotation.scale
    if rotation.divisors is not None:
        speed = speed / np.array(rotation.divisors)
    angles = (np.arange(len(x))[:, None] * speed)[:, None]
    cos, sin = np.cos(angles) * rotation.magnitude, np.sin(angles) * rotation.magnitude
    one = np.arange(half) if rotation.neox else 2 * np.arange(half)
    other = one + (half if rotation.neox else 1)
    found = x.copy()
    found[..., one] = x[..., one] * cos - x[..., other] * sin
    found[..., other] = x[..., one] * sin + x[..., other] * cos
    return found


def _half(x: Doubles) -> Doubles:
    return x.astype(np.float16).astype(np.float64)


def _attend(
    spec: ModelSpec,
    of: AttentionSpec,
    own: Mapping[str, Doubles],
    x: Doubles,
    index: int,
    kept: dict[int, tuple[Doubles, Doubles]],
) -> Doubles:
    def heads(name: str, count: int, norm: bool) -> Doubles:
        """`norm`: and turned."""
        rows = x @ own[name].T + own.get(f"{name}.bias", 0.0)
        if of.gated and name == "attn_q":
            rows = rows.reshape(len(x), count, 2, -1)[:, :, 0].reshape(len(x), -1)
        if norm and of.qk_norm == "row":
            rows = _norm(spec, rows, own[f"{name}_norm"])
        cut = rows.reshape(len(x), count, -1)
        by_head = norm and of.qk_norm == "head"
        cut = _norm(spec, cut, own[f"{name}_norm"]) if by_head and not of.qk_norm_last else cut
        cut = _turned(of.rotation, cut) if norm else cut
        return _norm(spec, cut, own[f"{name}_norm"]) if by_head and of.qk_norm_last else cut

    if of.kv_from is None:
        values = heads("attn_k" if of.v_is_k else "attn_v", of.n_kv_heads, norm=False)
        values = _norm(spec, values, np.ones(of.head_dim_v)) if of.v_norm else values
        kept[index] = _half(heads("attn_k", of.n_kv_heads, norm=True)), _half(values)
    keys, values = (np.repeat(each, of.group, 1) for each in kept[index if of.kv_from is None else of.kv_from])
    queries = heads("attn_q", of.n_heads, norm=True)
    queries = queries * (of.head_dim_k**-0.5 if of.scale is None else of.scale)
    at = np.arange(len(x))
    if of.temperature is not None:
        factor = 1 + of.temperature.beta * np.log(1 + at // of.temperature.context)
        queries = queries * factor[:, None, None]
    scores = _capped(np.einsum("qhd,khd->hqk", queries, keys), of.softcap)
    back = at[:, None] - at
    seen = (back >= 0) & ((back < of.window) | (of.window == 0))
    scores = np.where(seen, scores, -np.inf)
    if of.sinks:
        beside = np.broadcast_to(own["attn_sinks"][:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, beside], -1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    given = np.einsum("hqk,khd->qhd", weights[..., : len(x)], values).reshape(len(x), -1)
    if of.gated:
        gates = (x @ own["attn_q"].T).reshape(len(x), of.n_heads, 2, -1)[:, :, 1].reshape(given.shape)
        given = given / (1 + np.exp(-gates))
    found: Doubles = given @ own["attn_output"].T + own.get("attn_output.bias", 0.0)
    return found


# --- a rig with groups ---


@dataclass(frozen=True)
class Group:
    layers: tuple[int, ...]
    cells: int
    window: int


def one_group(spec: ModelSpec) -> list[Group]:
    return [Group(tuple(i for i, each in enumerate(spec.layers) if each.attention.kv_from is None), 1, 0)]


def layer_bytes(of: AttentionSpec, types: tuple[str, str], block_size: int = BLOCK) -> int:
    return of.kv_bytes_per_token(*types) * block_size


def groups_by_need(spec: ModelSpec, types: tuple[str, str]) -> tuple[list[Group], int]:
    """Layers that need the same, and a cell size that holds one of the largest layers."""
    alike: dict[tuple[int, int], list[int]] = {}
    for index, each in enumerate(spec.layers):
        of = each.attention
        if of.kv_from is None:
            alike.setdefault((of.window, layer_bytes(of, types)), []).append(index)
    cell = max(size for _, size in alike)
    return [
        Group(tuple(layers), -(-len(layers) // (cell // size)), window) for (window, size), layers in alike.items()
    ], cell


class GroupRig:
    """Sequences whose blocks lie in cells anywhere. What lies behind a window is spoiled as soon as it does: its cells
    are filled with NaN, and its entries are no cells, or missing."""

    def __init__(
        self,
        spec: ModelSpec,
        engine: Engine,
        *,
        kv_type: str = "f16",
        grouped: bool = True,
        seed: int = 0,
        cells: int = 1500,
    ) -> None:
        self.spec, self.engine = spec, engine
        types = (kv_type, kv_type)
        self.groups, cell_bytes = groups_by_need(spec, types) if grouped else (one_group(spec), 0)
        engine.allocate(
            cells=cells,
            block_size=BLOCK,
            type_k=kv_type,
            type_v=kv_type,
            cell_bytes=cell_bytes,
            groups=[(group.layers, group.cells) for group in self.groups] if grouped else [],
        )
        self._free = list(map(int, np.random.default_rng(seed).permutation(cells)))
        self._memory = engine.memory()
        self._memory[:] = 255

    def tables(self, length: int) -> list[NDArray[np.int32]]:
        blocks = -(-length // BLOCK)
        return [np.array([self._free.pop() for _ in range(blocks * group.cells)], np.int32) for group in self.groups]

    def step(self, *parts: tuple[Sequence[int], int, list[NDArray[np.int32]], int]) -> Floats:
        """Tokens, first position, tables, wanted rows."""
        rows, tables = [], []
        for tokens, start, own, wants in parts:
            blocks = len(own[0]) // self.groups[0].cells
            row = [len(tokens), start, wants, blocks, 0, 0]
            for index, (group, table) in enumerate(zip(self.groups, own, strict=True)):
                gone = self._spoil(group, table, start)
                first = gone // 2 if index else 0
                tables.append(table[first * group.cells :])
                row += [first, blocks - first] if index else []
            rows.append(row + [0] * (len(self.groups) > 1))
        logits = np.full((sum(part[3] for part in parts), self.spec.n_vocab), np.nan, np.float32)
        ids = np.array([token for part in parts for token in part[0]], np.int32)
        assert self.engine.step(ids, np.array(rows, np.int32), np.concatenate(tables), logits)
        assert np.isfinite(logits).all()
        return logits

    def _spoil(self, group: Group, table: NDArray[np.int32], start: int) -> int:
        """Returns how many blocks no layer needs any more."""
        gone = max(0, start - group.window + 1) // BLOCK if group.window else 0
        behind = table[: gone * group.cells]
        self._memory[behind[behind >= 0]] = 255
        behind[:] = -1
        return gone

    def run(self, tokens: Sequence[int], cuts: Sequence[int] = (), wants: int = 1) -> Floats:
        """Logits of the last tokens, all of the last chunk."""
        tables = self.tables(len(tokens))
        for begin, end in spans(len(tokens), cuts):
            rows = self.step((tokens[begin:end], begin, tables, wants if end == len(tokens) else 0))
        return rows

    def all_logits(self, tokens: Sequence[int], cuts: Sequence[int] = ()) -> Floats:
        tables = self.tables(len(tokens))
        return np.concatenate([
            self.step((tokens[begin:end], begin, tables, end - begin)) for begin, end in spans(len(tokens), cuts)
        ])  # fmt: skip

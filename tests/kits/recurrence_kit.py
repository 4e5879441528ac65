"""Layers that carry a state: models with them, the sizes of their tensors, what they compute in plain numpy, and a rig
whose states lie in cells anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm._native import Engine
from cllm.models.spec import (
    AttentionSpec,
    DeltaNetSpec,
    FeedForwardSpec,
    LayerSpec,
    Mamba2Spec,
    ModelSpec,
    RecurrenceSpec,
    Rotation,
    ShortConvSpec,
)
from step_kit import Floats

Doubles = NDArray[np.float64]
BLOCK = 16


# --- models ---

_FEED = FeedForwardSpec(96)
_TURN = Rotation(10000.0, 16, neox=True)
_FULL = AttentionSpec(4, 2, 32, 32, rotation=Rotation(10000.0, 32, neox=True), qk_norm="head")
_GATED = replace(_FULL, rotation=_TURN, gated=True)
_UNTURNED = AttentionSpec(4, 2, 32, 32)
_DELTA = DeltaNetSpec(2, 4, 24, 32, 4)
_MAMBA = Mamba2Spec(6, 32, 20, 2, 4)


def _model(*layers: LayerSpec, **changes: Any) -> ModelSpec:
    return ModelSpec("made up", 64, 101, 4096, layers, 1e-3, **changes)


def _mixer(of: RecurrenceSpec | AttentionSpec, feed_forward: FeedForwardSpec | None = _FEED) -> LayerSpec:
    if isinstance(of, AttentionSpec):
        return LayerSpec(of, feed_forward)
    return LayerSpec(None, feed_forward, recurrence=of)


def _with(of: RecurrenceSpec) -> ModelSpec:
    return _model(_mixer(of), _mixer(_FULL), _mixer(of))


_RELU2 = FeedForwardSpec(160, "relu2", gated=False)
RECURRENT: dict[str, ModelSpec] = {
    "delta net, heads in tiles": _with(replace(_DELTA, tiled=True)),
    "delta net, neighbours": _with(replace(_DELTA, n_v_heads=6)),
    "wide delta net": _with(DeltaNetSpec(1, 2, 128, 128, 4)),
    "mamba 2 without norm": _with(replace(_MAMBA, norm=False)),
    "mamba 2, one group": _with(Mamba2Spec(4, 64, 128, 1, 4)),
    "short convolution of odd size": _with(ShortConvSpec(75, 5)),
    "gated attention": _model(_mixer(_GATED), _mixer(_GATED)),
    "gated attention, large heads": _model(
        *[_mixer(replace(_GATED, head_dim_k=256, head_dim_v=256, rotation=Rotation(1e7, 64, neox=True)))] * 2
    ),
    "beside windows": _model(_mixer(_DELTA), _mixer(_FULL), _mixer(replace(_FULL, window=20)), _mixer(_MAMBA)),
    "qwen35": _model(*[_mixer(_DELTA)] * 3, _mixer(_GATED)),
    "lfm2": _model(*[_mixer(ShortConvSpec(64, 3))] * 2, _mixer(_FULL), _mixer(ShortConvSpec(64, 3))),
    "granitehybrid": _model(
        _mixer(_MAMBA), _mixer(_UNTURNED), _mixer(_MAMBA),
        embedding_scale=8.0, residual_scale=0.4, logit_scale=0.3,
    ),
    "nemotron_h": _model(
        _mixer(_MAMBA, None), LayerSpec(None, _RELU2), _mixer(_UNTURNED, None), _mixer(_MAMBA, None),
        LayerSpec(None, _RELU2),
    ),
    "falcon-h1": _model(*[LayerSpec(_FULL, _FEED, recurrence=_MAMBA)] * 2),
    "mamba2": _model(*[_mixer(_MAMBA, None)] * 3),
}  # fmt: skip


# --- tensors ---


def recurrence_sizes(of: RecurrenceSpec, n_embd: int) -> dict[str, tuple[int, ...]]:
    if isinstance(of, ShortConvSpec):
        return {
            "shortconv.in_proj": (3 * of.size, n_embd),
            "shortconv.conv": (of.size, of.kernel),
            "shortconv.out_proj": (n_embd, of.size),
        }
    if isinstance(of, DeltaNetSpec):
        return {
            "attn_qkv": (of.conv_size, n_embd),
            "attn_gate": (of.v_size, n_embd),
            "ssm_alpha": (of.n_v_heads, n_embd),
            "ssm_beta": (of.n_v_heads, n_embd),
            "ssm_conv1d": (of.conv_size, of.kernel),
            "ssm_dt.bias": (of.n_v_heads,),
            "ssm_a": (of.n_v_heads,),
            "ssm_norm": (of.head_dim_v,),
            "ssm_out": (n_embd, of.v_size),
        }
    assert isinstance(of, Mamba2Spec)
    sizes: dict[str, tuple[int, ...]] = {
        "ssm_in": (of.inner_size + of.conv_size + of.n_heads, n_embd),
        "ssm_conv1d": (of.conv_size, of.kernel),
        "ssm_conv1d.bias": (of.conv_size,),
        "ssm_dt.bias": (of.n_heads,),
        "ssm_a": (of.n_heads,),
        "ssm_d": (of.n_heads,),
        "ssm_norm": (of.inner_size,),
        "ssm_out": (n_embd, of.inner_size),
    }
    return sizes if of.norm else {role: size for role, size in sizes.items() if role != "ssm_norm"}


# --- what is computed, plainly ---


def recurred(of: RecurrenceSpec, own: Mapping[str, Doubles], x: Doubles, eps: float) -> Doubles:
    """What the layer gives for the rows of a sequence that begins with them."""
    if isinstance(of, ShortConvSpec):
        b, c, values = np.split(x @ own["shortconv.in_proj"].T, 3, axis=-1)
        made = c * _convolved(b * values, own["shortconv.conv"], None)
        return made @ own["shortconv.out_proj"].T
    assert isinstance(of, (DeltaNetSpec, Mamba2Spec))
    made = _delta_net(of, own, x, eps) if isinstance(of, DeltaNetSpec) else _mamba2(of, own, x, eps)
    return made @ own["ssm_out"].T


def _delta_net(of: DeltaNetSpec, own: Mapping[str, Doubles], x: Doubles, eps: float) -> Doubles:
    count, repeats = len(x), of.n_v_heads // of.n_k_heads
    mixed = _silu(_convolved(x @ own["attn_qkv"].T, own["ssm_conv1d"], None))
    parts = np.split(mixed, [of.k_size, 2 * of.k_size], axis=-1)
    queries, keys = (_unit(part.reshape(count, of.n_k_heads, -1), eps) for part in parts[:2])
    mates = np.tile(np.arange(of.n_k_heads), repeats) if of.tiled else np.repeat(np.arange(of.n_k_heads), repeats)
    queries, keys = queries[:, mates] / np.sqrt(of.head_dim_k), keys[:, mates]
    values = parts[2].reshape(count, of.n_v_heads, -1)
    decays = np.exp(_softplus(x @ own["ssm_alpha"].T + own["ssm_dt.bias"]) * own["ssm_a"])
    factors = 1 / (1 + np.exp(-(x @ own["ssm_beta"].T)))
    state, found = np.zeros((of.n_v_heads, of.head_dim_v, of.head_dim_k)), np.empty_like(values)
    for t in range(count):
        state = state * decays[t][:, None, None]
        error = (values[t] - np.einsum("hvk,hk->hv", state, keys[t])) * factors[t][:, None]
        state = state + error[:, :, None] * keys[t][:, None]
        found[t] = np.einsum("hvk,hk->hv", state, queries[t])
    gates = _silu(x @ own["attn_gate"].T).reshape(found.shape)
    return (_rms(found, eps) * own["ssm_norm"] * gates).reshape(count, -1)


def _mamba2(of: Mamba2Spec, own: Mapping[str, Doubles], x: Doubles, eps: float) -> Doubles:
    count, shared = len(x), of.n_groups * of.state_size
    gates, mixed, steps = np.split(x @ own["ssm_in"].T, [of.inner_size, of.inner_size + of.conv_size], axis=-1)
    mixed = _silu(_convolved(mixed, own["ssm_conv1d"], own["ssm_conv1d.bias"]))
    inner, b, c = np.split(mixed, [of.inner_size, of.inner_size + shared], axis=-1)
    values = inner.reshape(count, of.n_heads, -1)
    b, c = (np.repeat(each.reshape(count, of.n_groups, -1), of.n_heads // of.n_groups, 1) for each in (b, c))
    steps = _softplus(steps + own["ssm_dt.bias"])
    decays = np.exp(steps * own["ssm_a"])
    state, found = np.zeros((of.n_heads, of.head_dim, of.state_size)), np.empty_like(values)
    for t in range(count):
        given = (values[t] * steps[t][:, None])[:, :, None] * b[t][:, None]
        state = state * decays[t][:, None, None] + given
        found[t] = np.einsum("hvs,hs->hv", state, c[t]) + own["ssm_d"][:, None] * values[t]
    made = found.reshape(count, -1) * _silu(gates)
    if not of.norm:
        return made
    return _rms(made.reshape(count, of.n_groups, -1), eps).reshape(count, -1) * own["ssm_norm"]


def _convolved(x: Doubles, kernel: Doubles, bias: Doubles | None) -> Doubles:
    taps = kernel.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    found = sum(padded[tap : tap + len(x)] * kernel[:, tap] for tap in range(taps))
    return found if bias is None else found + bias


def _silu(x: Doubles) -> Doubles:
    found: Doubles = x / (1 + np.exp(-x))
    return found


def _softplus(x: Doubles) -> Doubles:
    return np.logaddexp(0, x)


def _unit(x: Doubles, eps: float) -> Doubles:
    found: Doubles = x / np.sqrt((x**2).sum(-1, keepdims=True) + eps)
    return found


def _rms(x: Doubles, eps: float) -> Doubles:
    found: Doubles = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    return found


# --- a rig ---


class Running:
    """A sequence: its blocks of K and V, those of local layers, and the cells of its state."""

    def __init__(self, blocks: list[int], local: list[int]) -> None:
        self.blocks = blocks
        self.local = local
        self.computed = 0
        self.state: list[int] = []


class StateRig:
    """Every step writes states to cells taken anywhere. What was read is spoiled when nobody holds it any more."""

    def __init__(
        self, spec: ModelSpec, engine: Engine, *, kv_type: str = "f16", seed: int = 0, cells: int = 600
    ) -> None:
        self.spec, self.engine = spec, engine
        self.layout = spec.kv_layout(kv_type, kv_type, BLOCK, apart=True)
        states = self.layout.states
        engine.allocate(
            cells=cells,
            block_size=BLOCK,
            type_k=kv_type,
            type_v=kv_type,
            cell_bytes=self.layout.cell_bytes,
            groups=[(group.layers, group.cells) for group in self.layout.groups],
            state_cells=states.cells if states else 0,
            states=list(zip(states.layers, states.places, strict=True)) if states else (),
        )
        self.free = list(map(int, np.random.default_rng(seed).permutation(cells)))
        self.memory = engine.memory()
        self.memory[:] = 255

    def begin(self, length: int) -> Running:
        blocks = -(-length // BLOCK) if self.layout.groups[0].layers else 0
        local = blocks * (self.layout.local.cells if self.layout.local else 0)
        return Running([self.free.pop() for _ in range(blocks)], [self.free.pop() for _ in range(local)])

    def state(self) -> list[int]:
        return [self.free.pop() for _ in range(self.layout.states.cells)] if self.layout.states else []

    def drop(self, cells: list[int]) -> None:
        self.memory[cells] = 255
        self.free = cells + self.free

    def step(self, *parts: tuple[Running, Sequence[int], int], keeps: bool = False) -> Floats:
        """Sequences, their next tokens, rows of logits; `keeps`: the states that were read stay."""
        new = [self.state() for _ in parts]
        logits = np.full((sum(part[2] for part in parts), self.spec.n_vocab), np.nan, np.float32)
        assert self.engine.step(*self.arrays(parts, new), logits)
        assert np.isfinite(logits).all()
        for (sequence, tokens, _), cells in zip(parts, new, strict=True):
            if not keeps:
                self.drop(sequence.state)
            sequence.state = cells
            sequence.computed += len(tokens)
        return logits

    def arrays(self, parts: Sequence[tuple[Running, Sequence[int], int]], new: Sequence[list[int]]) -> list[Any]:
        rows, tables = [], []
        for (sequence, tokens, wants), cells in zip(parts, new, strict=True):
            tables += [*sequence.blocks, *sequence.local, *sequence.state, *cells]
            local = [0, len(sequence.blocks), 0] if self.layout.local else []
            state = [len(sequence.state), len(cells)] if self.layout.states else []
            rows.append([len(tokens), sequence.computed, wants, len(sequence.blocks), 0, 0, *local, *state])
        ids = [token for part in parts for token in part[1]]
        return [np.array(each, np.int32) for each in (ids, rows, tables)]

    def run(self, tokens: Sequence[int], cuts: Sequence[int] = ()) -> Floats:
        """Logits of every token, in chunks that end at `cuts`."""
        sequence, rows = self.begin(len(tokens)), []
        borders = [*sorted({cut for cut in cuts if 0 < cut < len(tokens)}), len(tokens)]
        for end in borders:
            chunk = tokens[sequence.computed : end]
            rows.append(self.step((sequence, chunk, len(chunk))))
        self.drop(sequence.state + sequence.blocks + sequence.local)
        return np.concatenate(rows)

"""What a model is, in numbers: one description for files of either format and for every backend.

    ModelSpec ── layers: (LayerSpec, …)      equal layers are one object
                          ├── attention      heads, their sizes, how positions turn them, how far they look back
                          ├── recurrence     what carries a state of constant size from token to token
                          └── feed_forward

Layers may differ in all of this. What a model does not have is a default that changes nothing.

A GGUF file that only llama.cpp can run states less than that: its layers have no rotation, and sizes of zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cllm.kv.groups import KVLayout, LayerKV, LayerState, plan_groups
from cllm.kv.sizing import KV_TYPES

Activation = Literal["silu", "gelu", "relu2"]
MOST_LAYERS = 1 << 16
"""What a file claims beyond that is never there, and would take much memory."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """How RoPE turns the first `dims` dimensions of a head."""

    base: float
    dims: int
    neox: bool
    """Whether dimension i turns with i + dims / 2; otherwise 2i with 2i + 1."""
    scale: float = 1.0
    """Positions are divided by this."""
    divisors: tuple[float, ...] | None = None
    """By how much the turning of each pair of dimensions is slowed down beside that."""
    magnitude: float = 1.0
    """Turned dimensions are multiplied by this, in queries and in keys (YaRN, LongRoPE)."""


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries are multiplied by 1 + beta * log(1 + floor(position / context)): sharper far into a text."""

    beta: float
    context: int


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    n_heads: int
    n_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    rotation: Rotation | None = None
    """None: positions do not matter to this layer (NoPE)."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["", "head", "row"] = ""
    """What of queries and keys is normalised before they are turned: nothing, every head, or all heads together."""
    qk_norm_last: bool = False
    """Whether they are normalised after they are turned instead."""
    v_norm: bool = False
    """Whether the values of every head are normalised, without weights."""
    scale: float | None = None
    """Scores are multiplied by this; None: by 1 / sqrt(head_dim_k)."""
    window: int = 0
    """How many tokens a token attends to, itself included; 0: all before it."""
    softcap: float = 0.0
    """Scores s become softcap * tanh(s / softcap); 0: they stay."""
    sinks: bool = False
    """Whether every head has a learned score beside those of the tokens, which takes weight and gives no value."""
    temperature: Temperature | None = None
    kv_from: int | None = None
    """The earlier layer whose keys and values it attends to, instead of its own."""
    v_is_k: bool = False
    """Whether values are made from what keys are made from, before their norm and turn."""
    gated: bool = False
    """Whether what a head gives is multiplied by the sigmoid of a gate, which stands behind the head's query in the
    query's matrix."""

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.n_heads // self.n_kv_heads

    @property
    def q_size(self) -> int:
        return self.n_heads * self.head_dim_k

    @property
    def q_rows(self) -> int:
        """Rows of the queries' matrix."""
        return self.q_size * (2 if self.gated else 1)

    @property
    def k_size(self) -> int:
        return self.n_kv_heads * self.head_dim_k

    @property
    def v_size(self) -> int:
        return self.n_kv_heads * self.head_dim_v

    @property
    def qkv_size(self) -> int:
        """Rows of the matrices of queries, keys and values."""
        return self.q_rows + self.k_size + self.v_size

    @property
    def output_size(self) -> int:
        """Values that all heads give together."""
        return self.n_heads * self.head_dim_v

    def kv_bytes_per_token(self, type_k: str, type_v: str) -> int:
        """KV heads count, not query heads. 0: they are another layer's."""
        if self.kv_from is not None:
            return 0
        key, value = KV_TYPES[type_k].row_bytes(self.head_dim_k), KV_TYPES[type_v].row_bytes(self.head_dim_v)
        return self.n_kv_heads * (key + value)


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    """Gated delta rule: every value head keeps a matrix, [value][key], and a convolution the last inputs."""

    n_k_heads: int
    n_v_heads: int
    head_dim_k: int
    head_dim_v: int
    kernel: int
    """Tokens that the convolution sees, the current one included."""
    tiled: bool = False
    """Whether value head h goes with key head h modulo their number; otherwise neighbours share one."""

    @property
    def k_size(self) -> int:
        return self.n_k_heads * self.head_dim_k

    @property
    def v_size(self) -> int:
        return self.n_v_heads * self.head_dim_v

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.k_size + self.v_size

    @property
    def state_parts(self) -> tuple[int, ...]:
        """Bytes of the matrix of every value head, and then of the convolution's inputs, [token][channel]."""
        head = _FLOAT * self.head_dim_v * self.head_dim_k
        return (*(head,) * self.n_v_heads, *_conv_parts(self.kernel, self.conv_size))


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """Every head keeps a matrix, [value][state], and a convolution the last inputs."""

    n_heads: int
    head_dim: int
    state_size: int
    n_groups: int
    """Heads of a group share B and C."""
    kernel: int
    norm: bool = True
    """Whether the gated output is normalised, group by group."""

    @property
    def inner_size(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: values, B, C."""
        return self.inner_size + 2 * self.n_groups * self.state_size

    @property
    def state_parts(self) -> tuple[int, ...]:
        """Bytes of the matrix of every head, and then of the convolution's inputs, [token][channel]."""
        head = _FLOAT * self.head_dim * self.state_size
        return (*(head,) * self.n_heads, *_conv_parts(self.kernel, self.conv_size))


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A convolution over B * x, multiplied by C: all it keeps is its last inputs."""

    size: int
    kernel: int

    @property
    def state_parts(self) -> tuple[int, ...]:
        return _conv_parts(self.kernel, self.size)


@dataclass(frozen=True, slots=True)
class OpaqueStateSpec:
    """A state of which only the size is known, because only llama.cpp computes it."""

    size: int

    @property
    def state_parts(self) -> tuple[int, ...]:
        return (self.size,)


MOST_STATE_HEADS, MOST_KERNEL = 4096, 64
"""A file that claims more is damaged: every head is a part of the state, and every token that a convolution sees."""
RecurrenceSpec = DeltaNetSpec | Mamba2Spec | ShortConvSpec | OpaqueStateSpec
_FLOAT = 4


def _conv_parts(kernel: int, channels: int) -> tuple[int, ...]:
    """One part for every earlier token that the convolution sees, the oldest first."""
    return (_FLOAT * channels,) * (kernel - 1)


@dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    size: int = 0
    """Values between its matrices."""
    activation: Activation = "silu"
    """What the gate goes through before it multiplies the other half. gelu: its approximation by tanh; relu2: the
    square of what is above 0."""
    gated: bool = True
    """Otherwise there is no gate, and the activation is that of the only half."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    attention: AttentionSpec | None
    """None: the layer does not look back, or only by its recurrence."""
    feed_forward: FeedForwardSpec | None = FeedForwardSpec()
    norms: Literal["before", "after", "both"] = "before"
    """Where attention and feed-forward have a norm: of their input, of their output before it is added, or of both."""
    output_scale: bool = False
    """Whether a number of the file multiplies what leaves the layer."""
    recurrence: RecurrenceSpec | None = None
    """Beside attention: both take the same input, and what they give is added."""

    @property
    def attends(self) -> AttentionSpec:
        """The attention of a layer that is known to have it."""
        assert self.attention is not None
        return self.attention

    @property
    def feeds(self) -> FeedForwardSpec:
        """The feed-forward of a layer that is known to have it."""
        assert self.feed_forward is not None
        return self.feed_forward


@dataclass(frozen=True, slots=True)
class ModelSpec:
    architecture: str
    n_embd: int
    n_vocab: int
    context_length: int
    """The context the model was trained for."""
    layers: tuple[LayerSpec, ...]
    rms_eps: float = 0.0
    tied: bool = False
    """Whether the output head is the embedding."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """What attention and feed-forward give is multiplied by this before it is added."""
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    """Logits l become softcap * tanh(l / softcap); 0: they stay."""
    layer_input_size: int = 0
    """Values that an embedding of its own gives every layer of each token; 0: there is none."""

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    def kv_bytes_per_token(self, type_k: str, type_v: str) -> int:
        """What a token's K and V take in all layers."""
        return sum(layer.block_bytes for layer in self._kv_layers(type_k, type_v, 1))

    @property
    def attentions(self) -> list[AttentionSpec]:
        """The attention of every layer that has it."""
        return [layer.attention for layer in self.layers if layer.attention is not None]

    @property
    def recurrent(self) -> bool:
        """Whether some layer carries a state."""
        return any(layer.recurrence is not None for layer in set(self.layers))

    @property
    def state_bytes(self) -> int:
        """What the state of a sequence takes, however long it is."""
        return sum(sum(layer.parts) for layer in self._states())

    def kv_layout(
        self, type_k: str, type_v: str, block_size: int, *, apart: bool, with_states: bool = True
    ) -> KVLayout:
        """`apart`: layers with a window have their own memory, which is free behind it. Without states: they lie
        elsewhere."""
        layers = self._kv_layers(type_k, type_v, block_size)
        states = self._states() if with_states else []
        last = max((layer.number for layer in layers if layer.window), default=0)
        reach = sum(each.window - 1 for each in self._attending_before(last) if each.window)
        return plan_groups(layers, block_size, apart=apart, states=states, reach=reach)

    def _attending_before(self, layer: int) -> list[AttentionSpec]:
        return [each.attention for each in self.layers[:layer] if each.attention is not None]

    def _kv_layers(self, type_k: str, type_v: str, block_size: int) -> list[LayerKV]:
        return [
            LayerKV(number, attention.window, block_size * attention.kv_bytes_per_token(type_k, type_v))
            for number, attention in enumerate(layer.attention for layer in self.layers)
            if attention is not None and attention.kv_from is None
        ]

    def _states(self) -> list[LayerState]:
        return [
            LayerState(number, layer.recurrence.state_parts)
            for number, layer in enumerate(self.layers)
            if layer.recurrence is not None
        ]

"""Tiny random models for the native engine: every architecture and weight type it runs, loadable by llama.cpp too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from cllm.text.template_source import CHATML
from gguf_kit import add_value

Type = GGMLQuantizationType
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

WEIGHT_TYPES: dict[str, GGMLQuantizationType] = {
    "f32": Type.F32, "f16": Type.F16, "bf16": Type.BF16, "q4_0": Type.Q4_0, "q4_1": Type.Q4_1, "q5_0": Type.Q5_0,
    "q5_1": Type.Q5_1, "q8_0": Type.Q8_0, "q4_k": Type.Q4_K, "q5_k": Type.Q5_K, "q6_k": Type.Q6_K, "mxfp4": Type.MXFP4,
    "iq4_nl": Type.IQ4_NL, "iq4_xs": Type.IQ4_XS, "q3_k": Type.Q3_K, "q2_k": Type.Q2_K, "iq3_s": Type.IQ3_S,
    "iq3_xxs": Type.IQ3_XXS, "iq2_s": Type.IQ2_S, "iq2_xs": Type.IQ2_XS, "iq2_xxs": Type.IQ2_XXS,
}  # fmt: skip
ARCHITECTURES = ("llama", "qwen2", "qwen3")

# What a matrix gets whose rows are no whole number of blocks, as llama.cpp's own quantiser does it.
_FALLBACKS = {
    Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0,
    **dict.fromkeys((Type.IQ4_XS, Type.Q3_K, Type.Q2_K, Type.IQ3_S, Type.IQ3_XXS), Type.IQ4_NL),
    **dict.fromkeys((Type.IQ2_S, Type.IQ2_XS, Type.IQ2_XXS), Type.IQ4_NL),
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    type: GGMLQuantizationType
    raw: Bytes
    """[rows, bytes of a row] or, of a vector, [bytes]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As numpy counts: the row length last."""
        per_block, block_bytes = GGML_QUANT_SIZES[self.type]
        return (*self.raw.shape[:-1], self.raw.shape[-1] // block_bytes * per_block)

    def values(self) -> Floats:
        return dequantized(self.raw, self.type)


@dataclass(frozen=True)
class TinyModel:
    """What a file will hold; change it with `with_metadata` and `with_tensors` before writing."""

    architecture: str
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    def with_metadata(self, **changes: Any) -> TinyModel:
        """Keys may leave out the architecture and write __ for a dot; None removes one."""
        merged = dict(self.metadata)
        for name, value in changes.items():
            key = name.replace("__", ".")
            merged[key if key.startswith(("general.", "tokenizer.")) else f"{self.architecture}.{key}"] = value
        return replace(self, metadata={key: value for key, value in merged.items() if value is not None})

    def with_tensors(self, changes: Mapping[str, Tensor | None]) -> TinyModel:
        """None removes one."""
        merged = {**self.tensors, **changes}
        return replace(self, tensors={name: tensor for name, tensor in merged.items() if tensor is not None})

    def write(self, path: Path) -> Path:
        writer = GGUFWriter(path, self.architecture)
        for key, value in self.metadata.items():
            add_value(writer, key, value)
        for name, tensor in self.tensors.items():
            writer.add_tensor(name, tensor.raw, raw_dtype=tensor.type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def write_model(path: Path, **options: Any) -> Path:
    """Write a model made by `build_model`, whose options these are."""
    return build_model(**options).write(path)


def build_model(
    *,
    arch: str = "llama",
    weight_type: str = "f32",
    types: Mapping[str, str] | None = None,
    n_layers: int = 2,
    n_embd: int = 64,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int | None = None,
    n_ff: int = 128,
    n_vocab: int = 320,
    tied: bool = False,
    biases: bool | None = None,
    rope_scaling: str | None = None,
    rope_base: float = 10000.0,
    rms_eps: float = 1e-5,
    context_length: int = 4096,
    seed: int = 0,
) -> TinyModel:
    """A random model. `types` gives single matrices another type, by role ("attn_v", "output").

    `rope_scaling` is None, "linear" (factor 2), "llama3" (a tensor of frequency factors) or "yarn" (factor 4). `biases`
    of queries, keys and values are there for qwen2, unless said otherwise. Activations keep a size of about 1.
    llama.cpp wants heads of n_embd / n_heads for qwen2, and takes frequency factors for llama only.
    """
    rng = np.random.default_rng(seed)
    width = head_dim or n_embd // n_heads
    tensors: dict[str, Tensor] = {}

    def matrix(name: str, rows: int, cols: int, spread: float) -> None:
        wanted = WEIGHT_TYPES[(types or {}).get(name.split(".")[-2], weight_type)]
        tensors[name] = random_matrix(rng, rows, cols, wanted, spread)

    def vector(name: str, size: int, middle: float, spread: float) -> None:
        tensors[name] = float_tensor(rng.normal(middle, spread, size))

    matrix("token_embd.weight", n_vocab, n_embd, n_embd**-0.5 if tied else 1.0)
    if rope_scaling == "llama3":
        tensors["rope_freqs.weight"] = float_tensor(np.geomspace(1.0, 8.0, width // 2))
    for layer in range(n_layers):
        _add_layer(
            f"blk.{layer}.",
            matrix,
            vector,
            (n_embd, n_heads * width, n_kv_heads * width, n_ff, width),
            biases=arch == "qwen2" if biases is None else biases,
            norms=arch == "qwen3",
        )
    vector("output_norm.weight", n_embd, 1.0, 0.1)
    if not tied:
        matrix("output.weight", n_vocab, n_embd, n_embd**-0.5)
    metadata = _metadata(
        arch, rope_scaling,
        block_count=n_layers, context_length=context_length, embedding_length=n_embd, feed_forward_length=n_ff,
        attention__head_count=n_heads, attention__head_count_kv=n_kv_heads, attention__key_length=width,
        attention__value_length=width, attention__layer_norm_rms_epsilon=rms_eps, rope__freq_base=rope_base,
        rope__dimension_count=width,
    )  # fmt: skip
    return TinyModel(arch, metadata | vocabulary_keys(n_vocab), tensors)


def _add_layer(
    prefix: str,
    matrix: Callable[[str, int, int, float], None],
    vector: Callable[[str, int, float, float], None],
    sizes: tuple[int, int, int, int, int],
    *,
    biases: bool,
    norms: bool,
) -> None:
    n_embd, q_rows, kv_rows, n_ff, head_dim = sizes
    vector(f"{prefix}attn_norm.weight", n_embd, 1.0, 0.1)
    for letter, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
        matrix(f"{prefix}attn_{letter}.weight", rows, n_embd, n_embd**-0.5)
        if biases:
            vector(f"{prefix}attn_{letter}.bias", rows, 0.0, 0.3)
        if norms and letter != "v":
            vector(f"{prefix}attn_{letter}_norm.weight", head_dim, 1.0, 0.1)
    matrix(f"{prefix}attn_output.weight", n_embd, q_rows, q_rows**-0.5)
    vector(f"{prefix}ffn_norm.weight", n_embd, 1.0, 0.1)
    matrix(f"{prefix}ffn_gate.weight", n_ff, n_embd, n_embd**-0.5)
    matrix(f"{prefix}ffn_up.weight", n_ff, n_embd, n_embd**-0.5)
    matrix(f"{prefix}ffn_down.weight", n_embd, n_ff, n_ff**-0.5)


def _metadata(arch: str, rope_scaling: str | None, **keys: Any) -> dict[str, Any]:
    metadata = {f"{arch}.{name.replace('__', '.')}": value for name, value in keys.items()}
    metadata["general.name"] = f"tiny {arch}"
    if rope_scaling == "linear":
        metadata |= {f"{arch}.rope.scaling.type": "linear", f"{arch}.rope.scaling.factor": 2.0}
    elif rope_scaling == "yarn":
        metadata |= {f"{arch}.rope.scaling.type": "yarn", f"{arch}.rope.scaling.factor": 4.0}
        metadata |= {f"{arch}.rope.scaling.original_context_length": 1024}
    return metadata


def vocabulary_keys(n_vocab: int) -> dict[str, Any]:
    """A byte-level vocabulary: two control tokens, the single bytes that there is room for, then words of no merge."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spelled = [chr(256 + i) for i in range(256 - len(printable))]
    pairs = ["Ġt", "he", "in", "Ġa"]
    tokens = ["<|endoftext|>", "<|im_end|>", *spelled, *map(chr, printable), *pairs][:n_vocab]
    tokens += [f"word{i}" for i in range(n_vocab - len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (n_vocab - 2),
        "tokenizer.ggml.merges": [f"{pair[0]} {pair[1]}" for pair in pairs],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": CHATML,
        "tokenizer.ggml.add_bos_token": False,
    }


def float_tensor(values: NDArray[Any]) -> Tensor:
    return Tensor(Type.F32, np.ascontiguousarray(values, np.float32).view(np.uint8))


def random_matrix(
    rng: np.random.Generator, rows: int, cols: int, wanted: GGMLQuantizationType, spread: float
) -> Tensor:
    """Values of mean about 0 and standard deviation about `spread`."""
    kind = wanted
    if cols % GGML_QUANT_SIZES[kind][0]:
        kind = _FALLBACKS.get(kind, Type.F16)
    if cols % GGML_QUANT_SIZES[kind][0]:
        kind = Type.F16
    if kind in _BLOCKS:
        blocks = _BLOCKS[kind](rng, rows * cols // GGML_QUANT_SIZES[kind][0], spread)
        return Tensor(kind, blocks.reshape(rows, -1))
    values = rng.normal(0, spread, (rows, cols)).astype(np.float32)
    return Tensor(kind, np.ascontiguousarray(quantize(values, kind)).view(np.uint8))


def dequantized(raw: Bytes, kind: GGMLQuantizationType) -> Floats:
    if kind in (Type.F32, Type.F16):
        return raw.view(np.float32 if kind is Type.F32 else np.float16).astype(np.float32)
    return np.asarray(dequantize(raw, kind), np.float32)


# The package gguf reads these types but does not write them, so their blocks are of random quants and sane scales.


def _halves(values: NDArray[Any]) -> Bytes:
    return values.astype(np.float16).reshape(-1, 1).view(np.uint8)


def _random_bytes(rng: np.random.Generator, count: int, each: int) -> Bytes:
    return rng.integers(0, 256, (count, each), np.uint8)


def _scale_min_blocks(rng: np.random.Generator, count: int, spread: float, levels: int) -> Bytes:
    """d, dmin and 8 pairs of 6-bit scale and minimum, such that quants of 0 to levels-1 have their middle near 0."""
    scales = rng.integers(20, 64, (count, 8), np.uint8)
    minima = np.clip(scales.astype(int) + rng.integers(-3, 4, (count, 8)), 0, 63).astype(np.uint8)
    d = spread / (42 * levels / 12**0.5) * rng.uniform(0.8, 1.2, count)
    packed = np.concatenate(
        [
            scales[:, :4] | (scales[:, 4:] >> 4 << 6),
            minima[:, :4] | (minima[:, 4:] >> 4 << 6),
            (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4),
        ],
        axis=1,
    )
    return np.concatenate([_halves(d), _halves(d * (levels - 1) / 2), packed], axis=1)


def _q4_k(rng: np.random.Generator, count: int, spread: float) -> Bytes:
    return np.concatenate([_scale_min_blocks(rng, count, spread, 16), _random_bytes(rng, count, 128)], axis=1)


def _q5_k(rng: np.random.Generator, count: int, spread: float) -> Bytes:
    return np.concatenate([_scale_min_blocks(rng, count, spread, 32), _random_bytes(rng, count, 32 + 128)], axis=1)


def _q6_k(rng: np.random.Generator, count: int, spread: float) -> Bytes:
    scales = (rng.integers(30, 128, (count, 16)) * rng.choice([-1, 1], (count, 16))).astype(np.int8)
    d = spread / (79 * 64 / 12**0.5) * rng.uniform(0.8, 1.2, count)
    return np.concatenate([_random_bytes(rng, count, 128 + 64), scales.view(np.uint8), _halves(d)], axis=1)


def _q3_k(rng: np.random.Generator, count: int, spread: float) -> Bytes:
    d = spread / (18 * 8 / 12**0.5) * rng.uniform(0.8, 1.2, count)
    return np.concatenate([_random_bytes(rng, count, 32 + 64 + 12), _halves(d)], axis=1)


def _q2_k(rng: np.random.Generator, count: int, spread: float) -> Bytes:
    scales = rng.integers(5, 16, (count, 16))
    minima = np.clip(scales + rng.integers(-1, 2, (count, 16)), 0, 15)
    d = spread / (10 * 4 / 12**0.5) * rng.uniform(0.8, 1.2, count)
    heads = (scales | minima << 4).astype(np.uint8)
    return np.concatenate([heads, _random_bytes(rng, count, 64), _halves(d), _halves(d * 1.5)], axis=1)


def _headed_by_scale(quants: int, size: float) -> Callable[[np.random.Generator, int, float], Bytes]:
    """A scale, then bytes of any value: numbers times `size` is what they make of a scale of 1, by its deviation."""

    def draw(rng: np.random.Generator, count: int, spread: float) -> Bytes:
        d = spread / size * rng.uniform(0.8, 1.2, count)
        return np.concatenate([_halves(d), _random_bytes(rng, count, quants)], axis=1)

    return draw


_BLOCKS: dict[GGMLQuantizationType, Callable[[np.random.Generator, int, float], Bytes]] = {
    Type.Q4_K: _q4_k,
    Type.Q5_K: _q5_k,
    Type.Q6_K: _q6_k,
    Type.Q3_K: _q3_k,
    Type.Q2_K: _q2_k,
    Type.IQ4_NL: _headed_by_scale(16, 70.0),
    Type.IQ4_XS: _headed_by_scale(134, 70.0 * 18.5),
    Type.IQ3_S: _headed_by_scale(108, 8.0 * 18.5),
    Type.IQ3_XXS: _headed_by_scale(96, 30.0 * 4.6),
    Type.IQ2_S: _headed_by_scale(80, 23.0 * 2.3),
    Type.IQ2_XS: _headed_by_scale(72, 23.0 * 2.3),
    Type.IQ2_XXS: _headed_by_scale(64, 23.0 * 2.3),
}


def sliding_window() -> TinyModel:
    """Gemma 3: five layers of six see the last 32 positions only; norms around everything."""
    made = build_model(arch="gemma3", n_layers=6, tied=True)
    ones, head = float_tensor(np.ones(64)), float_tensor(np.ones(16))
    changes = {
        f"blk.{layer}.{name}.weight": ones for layer in range(6) for name in ("post_attention_norm", "post_ffw_norm")
    }
    changes |= {f"blk.{layer}.{name}.weight": head for layer in range(6) for name in ("attn_q_norm", "attn_k_norm")}
    return made.with_tensors(changes).with_metadata(attention__sliding_window=32)

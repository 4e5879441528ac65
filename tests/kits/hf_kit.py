"""Hugging Face directories made by hand, so that they can be made wrong: no torch, no safetensors needed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I32": 4}
Tensors = Mapping[str, tuple[int, ...]]


def layer_tensors(layer: int) -> dict[str, tuple[int, ...]]:
    prefix = f"model.layers.{layer}."
    return {
        f"{prefix}input_layernorm.weight": (32,),
        f"{prefix}post_attention_layernorm.weight": (32,),
        f"{prefix}self_attn.q_proj.weight": (32, 32),
        f"{prefix}self_attn.k_proj.weight": (16, 32),
        f"{prefix}self_attn.v_proj.weight": (16, 32),
        f"{prefix}self_attn.o_proj.weight": (32, 32),
        f"{prefix}mlp.gate_proj.weight": (48, 32),
        f"{prefix}mlp.up_proj.weight": (48, 32),
        f"{prefix}mlp.down_proj.weight": (32, 48),
    }


def tensors() -> dict[str, tuple[int, ...]]:
    """Those of a model with `CONFIG`."""
    outer = {"model.embed_tokens.weight": (300, 32), "model.norm.weight": (32,), "lm_head.weight": (300, 32)}
    return outer | layer_tensors(0) | layer_tensors(1)


def header_of(shapes: Tensors, dtype: str = "F32") -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return header


def data_bytes(header: Mapping[str, Any]) -> int:
    return max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)


def write_safetensors(path: Path, header: Mapping[str, Any] | bytes, data: int | bytes | None = None) -> Path:
    """`data` is what follows the header, or how many zeros do; usually as many as it says."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    if data is None:
        assert not isinstance(header, bytes)
        data = data_bytes(header)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + (bytes(data) if isinstance(data, int) else data))
    return path


def byte_tokenizer(**changes: Any) -> dict[str, Any]:
    """A byte-level `tokenizer.json` of 256 bytes, a few merges, two special tokens and one that is not."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = [*map(chr, printable), *(chr(0x100 + n) for n in range(len(others)))]
    merges = [["h", "e"], ["l", "l"], ["he", "ll"], ["hell", "o"], ["Ġ", "w"]]
    names = ["<s>", "</s>", "<tool>", *alphabet, *("".join(pair) for pair in merges)]
    vocabulary = {name: number for number, name in enumerate(names)}
    added = [
        {"id": number, "content": names[number], "special": number < 2, "lstrip": False, "rstrip": False,
         "single_word": False, "normalized": False}
        for number in range(3)
    ]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocabulary, "merges": merges},
    } | changes  # fmt: skip


def spm_tokenizer(scheme: str) -> dict[str, Any]:
    """A `tokenizer.json` with byte fallback, as Llama 2 and Mistral have it, and BOS before every prompt."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "▁a", "ab", "▁ab"]
    merges = [["▁", "a"], ["a", "b"], ["▁a", "b"], ["▁", "ab"]]
    tokenizer = byte_tokenizer()
    tokenizer["model"] |= {"vocab": {w: n for n, w in enumerate(words)}, "merges": merges, "byte_fallback": True}
    tokenizer["model"] |= {"unk_token": "<unk>", "fuse_unk": True}
    for token, name in zip(tokenizer["added_tokens"], words, strict=False):
        token |= {"content": name, "special": True}
    tokenizer["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    tokenizer["decoder"] = {"type": "Sequence", "decoders": steps}
    special = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    bos, text = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    pair = [bos, text, {"Sequence": {"id": "B", "type_id": 1}}]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": [bos, text], "pair": pair, "special_tokens": special,
    }  # fmt: skip
    return tokenizer


def write_directory(
    path: Path,
    *,
    config: Mapping[str, Any] | None = None,
    shapes: Tensors | None = None,
    dtype: str = "F32",
    tokenizer: Mapping[str, Any] | None = None,
    **others: Any,
) -> Path:
    """A whole directory. `config` changes keys of `CONFIG` (None removes one); `others` are more JSON files by stem."""
    path.mkdir(parents=True, exist_ok=True)
    merged = {key: value for key, value in (CONFIG | dict(config or {})).items() if value is not None}
    (path / "config.json").write_text(json.dumps(merged))
    write_safetensors(path / "model.safetensors", header_of(tensors() if shapes is None else shapes, dtype))
    (path / "tokenizer.json").write_text(json.dumps(byte_tokenizer() if tokenizer is None else tokenizer))
    for stem, value in others.items():
        (path / f"{stem}.json").write_text(json.dumps(value))
    return path

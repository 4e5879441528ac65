"""Models of real shapes without their weights: a Hugging Face directory whose tensors are made up while it is loaded.

The directory has everything that a real one has, but its safetensors file is a hole: it takes no room on disk. With
`use_random_weights` a loader gets random numbers instead of what would be read from it, made on the device. They depend
on nothing but the tensor's name, so that all processes have the same model.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cllm.backends.torch.sources import DirectorySource
from cllm.models.tensors import TensorSpec

LOGIT_SPREAD = 3.0
LAYER_GAIN = 1.5

_COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
_LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_SHAPES: dict[str, dict[str, Any]] = {
    "8B": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
        "tie_word_embeddings": False, "eos_token_id": 128001,
    },
    "1B": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "head_dim": 64,
        "tie_word_embeddings": True, "eos_token_id": 128001,
        "rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 8192},
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 1024, "head_dim": 16,
        "tie_word_embeddings": False, "eos_token_id": 2001,
    },
}  # fmt: skip


def config_of(shape: str) -> dict[str, Any]:
    """What its `config.json` says."""
    return _COMMON | _SHAPES[shape]


def kv_bytes(shape: str) -> int:
    """K and V of a token, in f16."""
    config = config_of(shape)
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head)


def write_directory(path: Path, shape: str) -> Path:
    """Everything that a server needs for a model of this shape, but no weights."""
    config = config_of(shape)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(json.dumps(_tokenizer(config["vocab_size"])))
    header, size = _header(_tensors(config))
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    return path


def _tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, ff, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim", width // config["num_attention_heads"])
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, width),
        "model.norm.weight": (width,),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = (vocab, width)
    for layer in range(config["num_hidden_layers"]):
        tensors |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (width,),
                "post_attention_layernorm": (width,),
                "self_attn.q_proj": (queries, width),
                "self_attn.k_proj": (keys, width),
                "self_attn.v_proj": (keys, width),
                "self_attn.o_proj": (width, queries),
                "mlp.gate_proj": (ff, width),
                "mlp.up_proj": (ff, width),
                "mlp.down_proj": (width, ff),
            }.items()
        }
    return tensors


def _header(tensors: dict[str, tuple[int, ...]]) -> tuple[bytes, int]:
    entries: dict[str, Any] = {}
    at = 0
    for name, shape in tensors.items():
        end = at + 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    return json.dumps(entries).encode(), at


def _tokenizer(vocab: int) -> dict[str, Any]:
    """Byte-level: ids 0 to 255 are the bytes, and all that text becomes; the others are words, which answers hold."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}
    vocabulary = {names[byte]: byte for byte in range(256)}
    vocabulary |= {f"Ġ{_word(number)}": number for number in range(256, vocab)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary, "merges": [],
    }  # fmt: skip
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    return {"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model, **nothing}


def _word(number: int) -> str:
    letters = ""
    while number:
        number, letter = divmod(number, 26)
        letters += chr(ord("a") + letter)
    return letters


@dataclass(frozen=True)
class RandomTensors:
    """The values of tensors, by name."""

    device: torch.device
    layers: int

    def make(self, name: str, shape: tuple[int, ...], *, tied: bool) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device=self.device, dtype=torch.bfloat16)
        if name == "model.embed_tokens.weight":
            return self._normal(name, shape, LOGIT_SPREAD * shape[1] ** -0.5 if tied else 1.0)
        if name == "lm_head.weight":
            return self._normal(name, shape, LOGIT_SPREAD * shape[1] ** -0.5)
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        return self._normal(name, shape, shape[1] ** -0.5 * (LAYER_GAIN * self.layers**-0.5 if into_residual else 1.0))

    def _normal(self, name: str, shape: tuple[int, ...], spread: float) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        values = torch.empty(shape, device=self.device, dtype=torch.bfloat16)
        return values.normal_(0.0, spread, generator=generator)


@contextmanager
def use_random_weights(device: str) -> Iterator[None]:
    """Within the block this process reads no weights from directories: it makes them up."""
    on, read = torch.device(device), DirectorySource.pieces

    def pieces(source: DirectorySource, item: TensorSpec) -> Iterator[torch.Tensor]:
        yield RandomTensors(on, source.model.spec.n_layers).make(item.name, item.shape, tied=source.model.spec.tied)

    DirectorySource.pieces = pieces  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        DirectorySource.pieces = read  # type: ignore[method-assign]

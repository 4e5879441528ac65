"""GGUF files with realistic shapes and random weights, for speed tests without a model file.

Piece by piece, so that an 8B file takes little memory; always the same bytes, so that one that is there is used again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from cllm.machine import mib
from cllm.models.registry import cache_dir
from cllm_bench.errors import BenchError
from cllm_bench.kernels.shapes import RMS_EPS, ROPE_BASE, Mix, Shape, matrices, norms, pick, weight_bytes

CONTEXT = 8192
_MADE = 1
"""Counts up when files come out differently, so that old ones are not taken for new ones."""
_ROOM_FOR_HEADER = 32 << 20

Say = Callable[[str], None]


def random_file(shape_name: str, type_name: str, say: Say = lambda line: None) -> Path:
    """The file of a shape and a type, in the cache; written if it is not there."""
    shape, mix = pick(shape_name, type_name)
    target = cache_dir() / "bench" / f"random-{shape_name}-{type_name}-{_MADE}.gguf"
    if target.is_file():
        return target
    part = target.with_suffix(".part")  # written over if a writer was killed
    needed = weight_bytes(shape, mix) + _ROOM_FOR_HEADER
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if needed > free:
            raise BenchError(
                f"{shape_name} as {type_name} takes {mib(needed)}, and {target.parent} has {mib(free)} left: "
                "make room, take a smaller shape, or name another place with CLLM_CACHE_DIR"
            )
        write(part, shape, mix, f"random {shape_name} {type_name}", say)
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise BenchError(f"cannot write {target}: {error.strerror or error}") from error
    return target


def write(target: Path, shape: Shape, mix: Mix, name: str, say: Say = lambda line: None) -> Path:
    writer = GGUFWriter(target, "llama")
    _add_metadata(writer, shape, name)
    ones = np.ones(shape.n_embd, np.float32)
    names = norms(shape)
    whole = list(matrices(shape, mix))
    for norm in names:
        writer.add_tensor_info(norm, ones.shape, ones.dtype, ones.nbytes)
    for matrix in whole:
        byte_shape, kind = (matrix.rows, matrix.bytes // matrix.rows), GGMLQuantizationType(matrix.type.number)
        writer.add_tensor_info(matrix.name, byte_shape, np.dtype(np.uint8), matrix.bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _ in names:
        writer.write_tensor_data(ones)
    assert writer.fout is not None
    out = writer.fout[0]
    written, total = 0, sum(matrix.bytes for matrix in whole)
    for matrix in whole:
        for piece in matrix.pieces():
            out.write(piece.data)
        writer.write_padding(out, matrix.bytes)
        before, written = written, written + matrix.bytes
        if 10 * before // total != 10 * written // total:
            say(f"writing {name}: {written / total:.0%} of {mib(total)}")
    writer.close()
    return target


def _add_metadata(writer: GGUFWriter, shape: Shape, name: str) -> None:
    writer.add_name(name)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(RMS_EPS)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.n_vocab)
    _add_vocabulary(writer, shape.n_vocab)


def _add_vocabulary(writer: GGUFWriter, n_vocab: int) -> None:
    """Two control tokens, the single bytes there is room for, a pair of them, then words that no text gives."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spelled = [chr(256 + number) for number in range(256 - len(printable))]
    tokens = ["<|endoftext|>", "<|im_end|>", *spelled, *map(chr, printable), "he"][:n_vocab]
    tokens += [f"word{number}" for number in range(n_vocab - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (n_vocab - 2))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)

"""Steps of the native engine by hand: parts of sequences in, logits out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray

from cllm._native import Engine
from cllm.backends.native.loader import load_engine
from cllm.models.gguf import GGUFModel
from thorough import sampled

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Part:
    """Some consecutive tokens of a sequence, the first of them at position `start`."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    wants: int = 1
    """Rows of logits, of its last tokens."""
    dropped: int = 0
    kept: int = 0


def pack(parts: Sequence[Part]) -> tuple[Ints, Ints, Ints]:
    """The arrays that `Engine.step` takes."""
    rows = [(len(part.tokens), part.start, part.wants, len(part.blocks), part.dropped, part.kept) for part in parts]
    return (
        np.array([token for part in parts for token in part.tokens], np.int32),
        np.array(rows, np.int32).reshape(-1, 6),
        np.array([block for part in parts for block in part.blocks], np.int32),
    )


class Rig:
    """A model in an engine with an arena."""

    def __init__(
        self,
        path: Path,
        *,
        instruction_set: str = "auto",
        threads: int = 2,
        blocks: int = 64,
        block_size: int = 16,
        kv_type: str = "f16",
    ) -> None:
        model = GGUFModel.open(path)
        self.n_vocab, self.n_embd = model.spec.n_vocab, model.spec.n_embd
        self.engine: Engine = load_engine(model, threads=threads, instruction_set=instruction_set)
        self.allocate(blocks=blocks, block_size=block_size, type_k=kv_type, type_v=kv_type)

    def allocate(self, *, blocks: int, block_size: int = 16, type_k: str = "f16", type_v: str = "f16") -> None:
        self.engine.allocate(cells=blocks, block_size=block_size, type_k=type_k, type_v=type_v)
        self.blocks, self.block_size = blocks, block_size
        self.kv_types = {"type_k": type_k, "type_v": type_v}

    def table(self, positions: int, first: int = 0) -> list[int]:
        """Enough blocks for so many positions, one after another."""
        return list(range(first, first - (-positions // self.block_size)))

    def step(self, *parts: Part) -> Floats:
        """The rows that the parts want. Rows are NaN before, so that none is left unwritten unseen."""
        logits = np.full((sum(part.wants for part in parts), self.n_vocab), np.nan, np.float32)
        assert self.engine.step(*pack(parts), logits)
        assert np.isfinite(logits).all()
        return logits

    def run(self, tokens: Sequence[int], blocks: Sequence[int], cuts: Sequence[int] = ()) -> Floats:
        """The last token's logits after computing all of them, in chunks that end at `cuts`."""
        rows = np.empty((0, self.n_vocab), np.float32)
        for begin, end in spans(len(tokens), cuts):
            rows = self.step(Part(tokens[begin:end], begin, blocks, wants=end == len(tokens)))
        row: Floats = rows[0]
        return row

    def all_logits(self, tokens: Sequence[int], blocks: Sequence[int], together: int = 64) -> Floats:
        """The logits of every position, of so many at a time."""
        rows = [
            self.step(Part(tokens[begin:end], begin, blocks, wants=end - begin))
            for begin, end in spans(len(tokens), range(together, len(tokens), together))
        ]
        return np.concatenate(rows)


def spans(length: int, cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The pieces of [0, length) between cuts."""
    borders = sorted({0, length, *(cut for cut in cuts if 0 < cut < length)})
    return pairwise(borders)


def random_tokens(n_vocab: int, count: int, seed: int = 0) -> list[int]:
    values: Any = np.random.default_rng(seed).integers(0, n_vocab, count)
    return list(map(int, values))


KV_TYPES = ("f16", "q8_0", "q4_0")
TINY: dict[str, Any] = {
    "n_layers": 2, "n_embd": 256, "n_heads": 6, "n_kv_heads": 2, "head_dim": 64, "n_ff": 288, "n_vocab": 301,
    # Every packing and every path of the matrix product: nibbles, bytes in groups of 32 and 16, with minima or without.
    "weight_type": "q4_0",
    "types": {
        "token_embd": "q8_0", "attn_q": "q4_k", "attn_k": "q6_k", "attn_v": "q5_1", "attn_output": "q5_k",
        "ffn_gate": "f16", "ffn_up": "bf16", "ffn_down": "q4_1", "output": "f32",
    },
}  # fmt: skip
FLOATS: dict[str, Any] = {
    "n_layers": 2, "n_embd": 75, "n_heads": 4, "n_kv_heads": 1, "head_dim": 80, "n_ff": 133, "n_vocab": 71,
    "types": {"attn_q": "f16", "ffn_up": "bf16"},
}  # fmt: skip
"""Odd sizes, and heads that no quantised K/V fits."""
quick = settings(
    max_examples=sampled(12),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def assert_same(found: Floats, expected: Floats, what: str = "") -> None:
    """Bit for bit; the message says how far apart they are."""
    same = found.view(np.uint32) == expected.view(np.uint32)
    assert same.all(), f"{what} {(~same).sum()} of {same.size} logits differ, by up to {np.abs(found - expected).max()}"


PROMPT, ANSWER = 70, 25


def generate_while_moving(rig: Rig, seed: int = 0) -> Floats:
    """A prompt in two chunks and some tokens after it; each step's logits, and blocks that move in between."""
    tokens = random_tokens(rig.n_vocab, PROMPT + ANSWER, seed)
    table = rig.table(len(tokens))
    rows = [rig.step(Part(tokens[:40], 0, table)), rig.step(Part(tokens[40:PROMPT], 40, table))]
    for at in range(PROMPT, len(tokens)):
        rows.append(rig.step(Part(tokens[at : at + 1], at, table)))
        moved = [block + 20 for block in table] if table[0] < 20 else [block - 20 for block in table]
        rig.engine.move_blocks(np.array([(table[0], moved[0], len(table))], np.int32))
        rig.engine.prepare_pages(45, 2)
        table = moved
    return np.concatenate(rows)

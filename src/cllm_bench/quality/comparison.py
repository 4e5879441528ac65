"""How far the predictions of one engine are from those of another, over every position of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cllm._native import Engine
from cllm_bench.figures import Figure

Floats = NDArray[np.float32]

BLOCK = 16
TOGETHER = 64
"""Positions computed in one step; so few rows of logits stay in the cache while they are looked at."""
CLEAR_LEAD = 0.1
"""Logits between the reference's best token and its second, from which on the choice is not a matter of rounding."""


FIGURES = (
    Figure("perplexity", "perplexity", "", format=".3f", compared=False),
    Figure("perplexity_change", "change", "", format="+.2%", compared=False),
    Figure("same_top", "same top token", "", "higher", format=".1%", compared=False),
    Figure("mean_kl", "mean KL", "", format=".5f", compared=False),
)


@dataclass(slots=True)
class Comparison:
    """Sums over positions, of what is looked at (`ours`) and of the reference (`theirs`)."""

    positions: int = 0
    ours: float = 0.0
    theirs: float = 0.0
    same_top: int = 0
    clear: int = 0
    same_where_clear: int = 0
    divergence: float = 0.0

    def add(self, ours: Floats, theirs: Floats, following: Sequence[int]) -> None:
        """Rows of log probabilities, and the token that follows each."""
        tokens = np.asarray(following)[:, None]
        same = ours.argmax(1) == theirs.argmax(1)
        second, best = np.partition(theirs, -2, axis=1)[:, -2:].T
        clear = best - second >= CLEAR_LEAD
        self.positions += len(following)
        self.ours -= float(np.take_along_axis(ours, tokens, 1).sum(dtype=np.float64))
        self.theirs -= float(np.take_along_axis(theirs, tokens, 1).sum(dtype=np.float64))
        self.same_top += int(same.sum())
        self.clear += int(clear.sum())
        self.same_where_clear += int((same & clear).sum())
        self.divergence += float((np.exp(theirs) * (theirs - ours)).sum())

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.ours / self.positions))

    @property
    def perplexity_change(self) -> float:
        """A share: 0.01 is a perplexity that is 1 % higher than the reference's."""
        return float(np.exp((self.ours - self.theirs) / self.positions)) - 1

    @property
    def agreement(self) -> float:
        """The share of positions at which both find the same token most likely."""
        return self.same_top / self.positions

    @property
    def mean_divergence(self) -> float:
        """Kullback-Leibler, from the reference."""
        return self.divergence / self.positions

    @property
    def metrics(self) -> dict[str, float]:
        if not self.positions:
            return {"positions": 0}
        return {
            "positions": self.positions,
            "perplexity": self.perplexity,
            "perplexity_change": self.perplexity_change,
            "same_top": self.agreement,
            "mean_kl": self.mean_divergence,
        }

    def __str__(self) -> str:
        theirs = float(np.exp(self.theirs / self.positions))
        return (
            f"{self.positions} positions: perplexity {self.perplexity:.4f}, of the reference {theirs:.4f} "
            f"({100 * self.perplexity_change:+.3f} %), top-1 agreement {100 * self.agreement:.2f} % "
            f"({100 * self.same_where_clear / max(1, self.clear):.2f} % of the {self.clear} with a clear lead), "
            f"mean KL {self.mean_divergence:.6f}"
        )


def log_softmax(logits: Floats) -> Floats:
    shifted: Floats = logits - logits.max(1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return shifted


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK)


def logits_in_turn(engine: Engine, n_vocab: int, tokens: Sequence[int]) -> Iterator[tuple[int, Floats]]:
    """Logits of every position, some rows at a time, with the first one's position. The next rows overwrite them.

    The engine's arena has blocks of 16 tokens, enough for all of them. A step gives logits of a chunk's last token
    only. So K/V of all tokens are computed first, and then every position once more as a chunk of its own, which writes
    the K/V that are there already.
    """
    ids = np.asarray(tokens, np.int32)
    table = np.arange(blocks_for(len(ids)), dtype=np.int32)
    rows = np.empty((TOGETHER, n_vocab), np.float32)
    engine.step(ids, np.array([[len(ids), 0, 0, len(table), 0, 0]], np.int32), table, rows[:0])
    for begin in range(0, len(ids), TOGETHER):
        positions = np.arange(begin, min(begin + TOGETHER, len(ids)), dtype=np.int32)
        chunks = np.empty((len(positions), 6), np.int32)
        chunks[:] = (1, 0, 1, len(table), 0, 0)
        chunks[:, 1] = positions
        engine.step(ids[positions], chunks, np.tile(table, len(positions)), rows[: len(positions)])
        yield begin, rows[: len(positions)]

"""A machine whose steps take what a law says, and the steps of a server on it, without a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

from cllm.engine.budget import StepBudget, pairs


@dataclass(frozen=True)
class Law:
    """Seconds of a step are the sum of its parts."""

    row_s: float = 0.010
    token_s: float = 0.004
    step_s: float = 0.0
    pair_s: float = 0.0
    pass_s: float = 0.0
    """What prompts cost once more, however short."""

    def seconds(self, rows: int, tokens: int, pair_count: float) -> float:
        prompts_s = self.pass_s + tokens * self.token_s + pair_count * self.pair_s if tokens else 0.0
        return self.step_s + rows * self.row_s + prompts_s


class Step(NamedTuple):
    tokens: int
    rows: int
    seconds: float


@dataclass
class Server:
    """Steps on a machine, with the prompts that are left: tokens computed, and to compute, of each."""

    budget: StepBudget
    law: Law = field(default_factory=Law)
    noise: Iterator[float] = field(default_factory=lambda: repeat(1.0))
    prompts: list[tuple[int, int]] = field(default_factory=list)

    def step(self, rows: int, waiting: int = 0) -> Step:
        costs = self.budget.costs
        tokens, looked_back = 0, 0.0
        if self.prompts:
            wanted_s = sum(costs.tokens_s(left, position) for position, left in self.prompts)
            allowance = self.budget.allowance(rows, len(self.prompts) + waiting, wanted_s, rows > 0)
            for index, (position, left) in enumerate(self.prompts if allowance else ()):
                assert allowance is not None
                count = allowance.take(left, position)
                if count == 0:
                    break
                tokens += count
                looked_back += pairs(count, position)
                self.prompts[index] = (position + count, left - count)
        seconds = self.law.seconds(rows, tokens, looked_back) * next(self.noise)
        self.budget.observe(tokens, rows, seconds, looked_back)
        self.prompts = [(position, left) for position, left in self.prompts if left]
        return Step(tokens, rows, seconds)

    def run(self, *, rows: int, prompts: int, steps: int) -> list[Step]:
        """Steps with so many prompts that have no end."""
        taken = []
        for _ in range(steps):
            self.prompts = [(0, 10_000)] * min(prompts, 1)
            taken.append(self.step(rows, max(prompts - 1, 0)))
        self.prompts = []
        return taken

    def compute(self, rows: int, prompts: Sequence[int]) -> list[Step]:
        """Until these prompts are computed."""
        self.prompts = [(0, tokens) for tokens in prompts]
        taken = []
        while self.prompts:
            taken.append(self.step(rows))
        return taken

"""A backend that computes nothing but says how long it would have taken, and answers that are known beforehand."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from cllm.backends.base import Backend, BackendTraits, Chunk, Logits, StepResult
from cllm.errors import BackendError
from cllm.kv.ops import Geometry, Move
from cllm.models.spec import AttentionSpec, LayerSpec, ModelSpec
from cllm_bench.simulate.cost import CostModel, StepWork
from cllm_bench.simulate.traces import Text


class SimulatedBackend(Backend):
    """A step takes no time; `seconds` is what the last one would have taken, `total_s` what all of them would have."""

    traits = BackendTraits("simulated", pooling=None, no_reading="what is only simulated has no probabilities")

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.spec = ModelSpec("simulated", 1, 1, 1 << 30, (LayerSpec(AttentionSpec(1, 1, 1, 1)),))
        self.seconds = 0.0
        self.total_s = 0.0
        self._geometry: Geometry | None = None
        self._ops = SimulatedBlocks()
        self._logits: Logits = np.zeros((1, 1), dtype=np.float32)

    def allocate(self, geometry: Geometry) -> None:
        self._geometry = geometry

    @property
    def kv_bytes(self) -> int:
        return 0 if self._geometry is None else self._geometry.tokens * self.cost.kv_bytes_per_token

    @property
    def ops(self) -> SimulatedBlocks:
        return self._ops

    def collect(self, chunks: Sequence[Chunk]) -> StepResult:
        self.seconds = self.cost.compute(work_of(chunks))
        self.total_s += self.seconds
        return StepResult(self._rows(len(chunks)))

    def _rows(self, rows: int) -> Logits:
        """Enough rows; what is in them does not matter."""
        if rows > len(self._logits):
            self._logits = np.zeros((2 * rows, 1), dtype=np.float32)
        return self._logits[:rows]

    def abort(self) -> None:
        """Nothing takes time."""

    def rebuild(self) -> None:
        raise BackendError("a simulated backend does not break")

    def close(self) -> None:
        """Nothing is held."""


def work_of(chunks: Iterable[Chunk]) -> StepWork:
    """One token is a row, more are a prompt."""
    rows = context = prompts = prompt_tokens = attended = 0
    for chunk in chunks:
        count = len(chunk.tokens)
        if count == 1:
            rows += 1
            context += chunk.start
        else:
            prompts += 1
            prompt_tokens += count
            attended += count * chunk.start + count * (count - 1) // 2
    return StepWork(rows, context, prompts, prompt_tokens, attended)


class TracedAnswer:
    """Stands where the sampler would: `choose` gives the tokens of the trace, one after another.

    It is its own choice, so that no object is made per token.
    """

    __slots__ = ("_tokens", "generated", "logprob", "token_id")
    constraint = None

    def __init__(self, answer: Text) -> None:
        self._tokens: array[int] | range
        if isinstance(answer, array):
            self._tokens = answer
        else:
            ((first, count),) = answer
            self._tokens = range(first, first + count)
        self.generated = 0
        self.token_id = -1
        self.logprob = None

    def choose(self, logits: NDArray[np.float32], mask: None) -> TracedAnswer:
        self.token_id = self._tokens[self.generated]
        self.generated += 1
        return self


class SimulatedBlocks:
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """There is no memory behind the blocks."""

    def move_blocks(self, moves: Sequence[Move]) -> None:
        """As for copies."""

    def release_pages(self, first: int, count: int) -> None:
        """There are none."""

    def prepare_pages(self, first: int, count: int) -> None:
        """There are none."""

    def resident_bytes(self) -> int:
        return 0

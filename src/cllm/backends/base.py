"""The one interface every backend implements.

A backend runs a model over chunks of tokens and keeps their K/V where the KV manager says. It knows nothing of
requests. Only the engine thread calls it, except `abort`, which any thread may call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from cllm.kv.ops import BlockOps, Geometry, SlotOps
from cllm.models.shape import ModelShape

Logits = NDArray[np.float32]


@dataclass(slots=True)
class Chunk:
    """The tokens of one sequence that this step computes: positions [start, start + len(tokens)) of its memory.

    Everything before `start` is already in the sequence's slot or blocks. `blocks` covers at least
    `start + len(tokens)` positions. Of a sequence with a rolling window, `dropped` tokens were taken out of memory
    behind the first `kept` ones; the distance to what was kept is the one in memory.
    """

    tokens: array[int]
    start: int
    wants_logits: bool
    slot: int = 0
    blocks: list[int] = field(default_factory=list)
    dropped: int = 0
    kept: int = 0


class Backend(ABC):
    """A loaded model. Life: construct (weights) -> `allocate` (K/V memory) -> `step`... -> `close`."""

    name: str
    shape: ModelShape
    batch_splits: int = 0
    """How often a step had to be computed in more parts than one."""

    @property
    def resizes_slots(self) -> bool:
        """Whether it keeps its K/V in slots whose number can change, and what is saved can be loaded afterwards."""
        return False

    @abstractmethod
    def allocate(self, geometry: Geometry) -> None:
        """Take the K/V memory, of slots the first ones. Called once before the first step."""

    @property
    @abstractmethod
    def kv_bytes(self) -> int:
        """Bytes of K/V memory that there is room for now."""

    @property
    @abstractmethod
    def ops(self) -> SlotOps | BlockOps:
        """Memory operations for the KV manager of this backend's layout."""

    @abstractmethod
    def step(self, chunks: Sequence[Chunk]) -> Logits:
        """Compute all chunks; one row of logits for each chunk that wants them, in order.

        The rows are valid until the next step. Raises `BackendError`, or `StepAbortedError` after `abort`; in both
        cases part of the chunks may have been written, and the caller trims what it does not want.
        """

    @abstractmethod
    def abort(self) -> None:
        """Interrupt the step in progress, if any, from any thread."""

    @abstractmethod
    def rebuild(self) -> None:
        """Throw the context away and make a new, empty one, as `allocate` did."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; calling it again does nothing."""

    def describe(self) -> str:
        """One line for the log: what runs the model, and how."""
        return self.name

    def __enter__(self) -> Backend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""The one interface every backend implements.

A backend runs a model over chunks of tokens and keeps their K/V where the KV manager says. It knows nothing about
requests. Only the engine's thread calls it, except `abort`, which any thread may call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from cllm.kv.groups import LocalTable, StateTable
from cllm.kv.ops import BlockOps, Geometry, HostRows, SlotOps
from cllm.models.spec import ModelSpec

Logits = NDArray[np.float32]


@dataclass(slots=True)
class Chunk:
    """The tokens of one sequence to compute in this step: positions [start, start + len(tokens)) of its memory.

    Everything before `start` is already in the sequence's slot or blocks. `blocks` covers at least
    `start + len(tokens)` positions. With a rolling window, `dropped` tokens were removed after the first `kept` ones;
    distances to the kept ones are those in memory.
    """

    tokens: array[int]
    start: int
    wanted_logits: int
    """For how many of its last tokens logits are wanted."""
    slot: int = 0
    blocks: list[int] = field(default_factory=list)
    dropped: int = 0
    kept: int = 0
    row: int = -1
    """Identifies its sequence among all that run, for backends that sample."""
    follows: bool = False
    """Its one token is the one that the previous step sampled for its row, not known yet; the one in `tokens` is a
    placeholder."""
    local: LocalTable | None = None
    """The blocks of layers with a window, where they have their own. Where they begin, sequences begin for these
    layers: they attend to nothing before."""
    state: StateTable | None = None
    """Where layers that carry a state read and write it."""
    draws: tuple[Draw, ...] = ()
    """How to sample from its logits, if the backend does that: one token for each."""
    asks: Scoring | Pooling | None = None
    """What is wanted besides logits."""
    known: int = 0
    """With blocks of layers with a window: the other layers have K and V of all positions before this one already, and
    keep them, while those with a window are computed again."""


class Scoring(NamedTuple):
    """Asks how likely the model finds the tokens of a prompt."""

    targets: array[int]
    """What follows each of the chunk's first tokens."""
    top: int
    """How many of the most likely tokens to report as well."""


class Pooling(NamedTuple):
    """Asks for the hidden state after the last norm: of the chunk's `last` token, of the text's first one (`cls`), or
    the sum over all (`mean`), added to that of the chunks `before`."""

    kind: PoolingKind
    before: Hidden | None = None


class PromptScores(NamedTuple):
    """For each scored token its log probability and its rank (from 1), and the most likely tokens with their log
    probabilities, best first; an id of -1: there are no more."""

    logprobs: NDArray[np.float64]
    ranks: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float64]


PoolingKind = Literal["last", "mean", "cls"]
Hidden = NDArray[np.float64]


class Bias(NamedTuple):
    """Values added to the logits of distinct tokens; -inf forbids one."""

    ids: NDArray[np.int32]
    values: NDArray[np.float64]


class Seen(NamedTuple):
    """Distinct tokens to penalise, and how.

    Positive logits are divided by `repetition`, others multiplied by it. Then, for a token that occurs `counts` times
    in the answer (not the prompt), `frequency` times that and `presence` are subtracted.
    """

    ids: NDArray[np.int32]
    counts: NDArray[np.int32]
    repetition: float
    frequency: float
    presence: float


class Draw(NamedTuple):
    """How to sample one token: the best if `temperature` is 0, else the one that `uniform`, in [0, 1), selects.

    Arrays belong to the caller and may change once the step is submitted. If the chunk `follows`, the token it follows
    is not in `penalties` yet: it counts once more.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float
    logprobs: int | None
    """How many of the most likely tokens to report besides the sampled one; None: no log probabilities."""
    bias: Bias | None
    penalties: Seen | None
    mask: NDArray[np.int32] | None
    """One bit per token, the lowest of a word first: whether it may be sampled. None: any may."""


class Drawn(NamedTuple):
    """A token that a backend sampled; -1: the logits have no finite maximum."""

    token_id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens and their log probabilities, best first."""


NOTHING_READ: Mapping[int, PromptScores | Hidden] = {}


class StepResult(NamedTuple):
    """The result of a step."""

    logits: Logits | None
    """The wanted rows of all chunks, in order, to sample from on the host; valid until the next step."""
    drawn: Sequence[Sequence[Drawn]] | None = None
    """Instead of logits: the tokens sampled for each chunk that wants any."""
    read: Mapping[int, PromptScores | Hidden] = NOTHING_READ
    """What each chunk `asks` for, by its index."""


Layout = Literal["blocks", "slots"]


NO_WINDOW_OF_STATES = "layers of this model carry a state, from which no token can be taken back"


@dataclass(frozen=True)
class BackendTraits:
    """What a backend is. Callers go by this, never by its name."""

    name: str
    layout: Layout = "blocks"
    """How it keeps K/V, and so which manager it needs."""
    depth: int = 1
    """Steps that may be submitted before the first is collected. If more than one, the backend samples."""
    most_drafts: int = 0
    """Most draft tokens in a step; 0: it takes no drafts, and chunks want at most one row of logits."""
    preferred_step_tokens: int = 512
    """Default for the most prompt tokens in a step."""
    context_cap: int | None = None
    """Default limit of the context length; None: the model's own."""
    chunk_gap_ms: float = 0.0
    """How long a step must be to compute prompts at nearly full speed; 0: short ones are as fast."""
    default_gap_ms: float = 250.0
    """Default of `scheduler.max_gap_ms`."""
    frees_windows: bool = True
    """Whether layers with a window can have memory of their own, which is free behind it."""
    rebuilds_windows: bool = False
    """Whether it heeds `Chunk.known`."""
    gives_memory_back: bool = True
    """Whether free memory can go back to the system; if not, nothing is freed for that."""
    score_weight: float = 1.5
    """The cost of scoring a prompt token, relative to just computing it."""
    pooling: PoolingKind | None = "last"
    """Which hidden states make an embedding; None: there are no embeddings."""
    ranks: bool = False
    """Whether its embeddings are a single number: how well a document answers a query."""
    no_answers: str | None = None
    """Why it cannot generate; None: it can. One that cannot computes each prompt in one step."""
    no_reading: str | None = None
    """Why it can neither score prompts nor make embeddings; None: it can."""
    no_window: str | None = None
    """Why sequences cannot have a rolling window; None: they can. Some backends know this only after `allocate`."""


class Backend(ABC):
    """A loaded model: construct (weights) -> `allocate` (K/V memory) -> steps... -> `close`."""

    traits: BackendTraits
    """Final once memory is allocated: `allocate` may replace it."""
    spec: ModelSpec
    batch_splits: int = 0
    """How often a step had to be split."""

    @property
    def resizes_slots(self) -> bool:
        """Whether the number of its slots can change, and saved sequences can be loaded afterwards. May try it."""
        return False

    @property
    def kv_identity(self) -> Mapping[str, str | int] | None:
        """Everything that the bits of its K/V depend on besides the model's files, the types of K and V, the block size
        and the version of cLLM; None: its K/V cannot be kept elsewhere."""
        return None

    @abstractmethod
    def allocate(self, geometry: Geometry) -> None:
        """Allocate the K/V memory; of slots, the first ones. Called once before the first step."""

    @property
    @abstractmethod
    def kv_bytes(self) -> int:
        """Bytes of K/V memory allocated now."""

    @property
    @abstractmethod
    def ops(self) -> SlotOps | BlockOps:
        """Memory operations for the KV manager of this backend's layout."""

    def submit(self, chunks: Sequence[Chunk]) -> Any:
        """Start a step and return its ticket. A backend of depth 1 computes in `collect`: its ticket is the chunks.

        One of more depth does not wait, and has read everything from the chunks when this returns, because block tables
        and arrays belong to the sequences and change with them.

        Steps and memory operations take effect in the order submitted, so memory freed while a step is under way can be
        reused or moved at once. A step started after one that turns out to have failed may compute anything; its result
        is collected and dropped.

        Raises as `collect` does; the step is then not under way, and not collected.
        """
        return chunks

    @abstractmethod
    def collect(self, ticket: Any) -> StepResult:
        """The result of the oldest uncollected step: the rows of logits that its chunks want, in order, or the tokens
        drawn from them. A row depends only on its token and those before it, not on what follows in the chunk.

        Raises `BackendError`, or `StepAbortedError` after `abort`. The step has ended either way; K/V of some chunks
        may have been written, and the caller trims what it does not want.
        """

    @abstractmethod
    def abort(self) -> None:
        """Interrupt the steps in progress, if any, from any thread; backends that cannot have short steps."""

    @abstractmethod
    def rebuild(self) -> None:
        """Discard the context with everything under way, and make a new, empty one as `allocate` did."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. May be called again."""

    def describe(self) -> str:
        """One line for the log."""
        return self.traits.name

    def __enter__(self) -> Backend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def asks_more(chunks: Sequence[Chunk]) -> bool:
    """Whether any chunk asks for more than logits."""
    return any(chunk.asks is not None for chunk in chunks)


@runtime_checkable
class OpensHostRows(Protocol):
    """A backend whose K/V need not be in host memory, and that can copy blocks to it and back."""

    @property
    def on_gpu(self) -> bool: ...

    @property
    def kv_bytes(self) -> int:
        """Bytes of all blocks, once allocated."""

    def open_host_rows(self, limit: int) -> HostRows:
        """Rows of at most `limit` bytes of host memory, which exist until the backend is closed."""

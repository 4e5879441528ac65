"""The one interface every backend implements.

A backend runs a model over chunks of tokens and keeps their K/V where the KV manager says. It knows nothing of
requests. Only the engine thread calls it, except `abort`, which any thread may call.
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

from cllm.errors import BackendError
from cllm.kv.ops import BlockOps, Geometry, HostRows, SlotOps
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
    wanted_logits: int
    """Of so many of its last tokens; 0: of none."""
    slot: int = 0
    blocks: list[int] = field(default_factory=list)
    dropped: int = 0
    kept: int = 0
    row: int = -1
    """A number of its sequence's own among all that run; backends that choose tokens know it by that."""
    follows: bool = False
    """Its one token is what the step before chose for its row, and not known yet; the number in `tokens` is none."""
    draws: tuple[Draw, ...] = ()
    """How to choose from its logits, where the backend does that: one token for each."""
    asks: Scoring | Pooling | None = None
    """What is wanted of it beside logits. Steps with such chunks are `read_prompts`."""


class Scoring(NamedTuple):
    """How likely the model finds tokens that are there already."""

    targets: array[int]
    """What follows each of the chunk's first tokens."""
    top: int
    """Of how many of the most likely tokens to tell the log probabilities, too."""


class Pooling(NamedTuple):
    """The hidden state after the last norm: of the chunk's `last` token, of the text's first one (`cls`), or the sum of
    all (`mean`), added to that of the chunks `before`."""

    kind: PoolingKind
    before: Hidden | None = None


class PromptScores(NamedTuple):
    """Of each token that was scored its log probability and its rank among all (from 1 on), and the most likely tokens
    with theirs, best first; an id of -1: there are no more."""

    logprobs: NDArray[np.float64]
    ranks: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float64]


PoolingKind = Literal["last", "mean", "cls"]
Hidden = NDArray[np.float64]


class Bias(NamedTuple):
    """What is added to the logits of tokens, each of which is there once; -inf forbids one."""

    ids: NDArray[np.int32]
    values: NDArray[np.float64]


class Seen(NamedTuple):
    """Tokens that are penalised, each of which is there once, and how.

    What is positive is divided by `repetition`, the rest multiplied with it. Of a token that the answer has `counts`
    times (of the prompt's tokens, none), `frequency` times that and `presence` are taken off then.
    """

    ids: NDArray[np.int32]
    counts: NDArray[np.int32]
    repetition: float
    frequency: float
    presence: float


class Draw(NamedTuple):
    """How one token is chosen: the best if `temperature` is 0, else the one that `uniform`, in [0, 1), selects.

    Arrays are those of who chooses, and may change once the step is submitted. Where the chunk `follows`, the token it
    follows on is not in `penalties`: it counts once more.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float
    logprobs: int | None
    """How many of the most likely tokens to tell, with the chosen one; None: nothing."""
    bias: Bias | None
    penalties: Seen | None
    mask: NDArray[np.int32] | None
    """A bit for every token, the lowest of a word first: may it be chosen? None: any may."""


class Drawn(NamedTuple):
    """A token that a backend chose; -1: the logits have no finite best."""

    token_id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens and their log probabilities, best first."""


NOTHING_READ: Mapping[int, PromptScores | Hidden] = {}


class StepResult(NamedTuple):
    """What a step gave."""

    logits: Logits | None
    """The rows that the chunks want, in order, for the host to choose from; valid until the next step."""
    drawn: Sequence[Sequence[Drawn]] | None = None
    """Instead: for each chunk that wants any what its draws chose."""
    read: Mapping[int, PromptScores | Hidden] = NOTHING_READ
    """By the number of the chunk: what it `asks`."""


Layout = Literal["blocks", "slots"]


class Backend(ABC):
    """A loaded model. Life: construct (weights) -> `allocate` (K/V memory) -> steps... -> `close`.

    What it says of itself is all that others go by; nobody asks for its name.
    """

    name: str
    shape: ModelShape
    layout: Layout = "blocks"
    """How it keeps K/V, and so which manager it needs."""
    depth: int = 1
    """Steps that may be submitted before the first is collected. With more than one, the backend chooses tokens."""
    most_drafts: int = 0
    """Drafted tokens that a step may have in all; 0: it takes no drafts, and chunks want one row of logits at most."""
    preferred_step_tokens: int = 512
    """Most prompt tokens in a step, unless the configuration says."""
    context_cap: int | None = 8192
    """Longest context that a model gets unasked; None: its own."""
    chunk_gap_ms: float = 0.0
    """How long a step with prompts has to be for them to be computed at nearly full speed; 0: short ones do."""
    default_gap_ms: float = 250.0
    """`scheduler.max_gap_ms`, unless the configuration says."""
    gives_memory_back: bool = True
    """Whether free memory can go back to the system; otherwise there is no use in making any free for that."""
    batch_splits: int = 0
    """How often a step had to be computed in more parts than one."""
    score_weight: float = 1.5
    """What a token of a prompt costs that is scored, if others cost 1."""
    pooling: PoolingKind | None = "last"
    """Which hidden states make an embedding; None: there are no embeddings."""
    no_answers: str | None = None
    """Why it generates nothing; None: it does. One that does not computes prompts whole, each in one step."""
    ranks: bool = False
    """Whether its embeddings are a single number: how well a document answers a query."""
    no_reading: str | None = None
    """Why it neither scores prompts nor makes embeddings; None: it can."""

    @property
    def no_window(self) -> str | None:
        """Why sequences cannot have a rolling window; None: they can. Asked after `allocate`."""
        return None

    @property
    def resizes_slots(self) -> bool:
        """Whether it keeps its K/V in slots whose number can change, and what is saved can be loaded afterwards."""
        return False

    @property
    def kv_identity(self) -> Mapping[str, str | int] | None:
        """All that the bits of its K/V depend on beside the model's files, the types of K and V, the tokens in a block
        and the version of cLLM; None: its K/V cannot be kept outside its memory."""
        return None

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
        """Compute all chunks; the rows of logits that they want, in order.

        A row is that of the token alone: what the chunk has behind it makes no difference to it.

        The rows are valid until the next step. Raises `BackendError`, or `StepAbortedError` after `abort`; in both
        cases part of the chunks may have been written, and the caller trims what it does not want.
        """

    def submit(self, chunks: Sequence[Chunk]) -> Any:
        """Begin a step and return its ticket, at once where the backend is pipelined.

        All that is needed of the chunks is read before this returns: block tables, and what draws refer to, are those
        of the sequences, and change with them.

        Steps and memory operations take effect in the order in which they are asked for. So memory that is freed while
        a step is under way may be handed out, or moved, at once. A step that is begun though an earlier one will turn
        out to have failed computes something, or nothing; its result is collected and dropped.

        Raises as `step` does; then nothing of it is under way, and it is not collected.
        """
        return chunks

    def collect(self, ticket: Any) -> StepResult:
        """The result of the oldest step that was not collected yet. Raises as `step` does; either way it is over."""
        if asks_more(ticket):
            return self.read_prompts(ticket)
        return StepResult(self.step(ticket))

    def read_prompts(self, chunks: Sequence[Chunk]) -> StepResult:
        """A `step` whose chunks ask for more than logits."""
        raise BackendError(self.no_reading or f"{self.name} neither scores prompts nor makes embeddings")

    @abstractmethod
    def abort(self) -> None:
        """Interrupt the steps in progress, if any, from any thread; where that cannot be done, they are short."""

    @abstractmethod
    def rebuild(self) -> None:
        """Throw the context away, with what is under way, and make a new, empty one, as `allocate` did."""

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


def asks_more(chunks: Sequence[Chunk]) -> bool:
    """Whether any of them asks for more than logits."""
    return any(chunk.asks is not None for chunk in chunks)


@runtime_checkable
class OpensHostRows(Protocol):
    """A backend whose K/V are not in the host's memory, or need not be, and that copies blocks to it and back."""

    @property
    def on_gpu(self) -> bool: ...

    @property
    def kv_bytes(self) -> int:
        """Of all blocks, once there is memory for them."""

    def open_host_rows(self, limit: int) -> HostRows:
        """At most so many bytes of the host's memory. They are there until the backend is closed."""

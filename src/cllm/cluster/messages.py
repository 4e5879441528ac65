"""What ingress and replicas tell each other: `ReplicaJob`s through Ray Serve, everything else over links."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cllm.engine.request import CacheHit, FinishReason
from cllm.engine.stats import EngineSnapshot
from cllm.engine.submission import Submission
from cllm.errors import BackendError, CLLMError, describe
from cllm.kv.events import KVEvent
from cllm.kv.pins import PinMark
from cllm.loading.facts import ModelFacts
from cllm.observe.metrics import MetricsObserver
from cllm.routing.policy import ReplicaStats


def portable(error: Exception) -> Exception:
    """The error, or what it says if another process could not read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return BackendError(str(error) if isinstance(error, CLLMError) else describe(error))
    return error


ENDS_ALL = (FinishReason.ERROR, FinishReason.CANCELLED, FinishReason.TIMEOUT)
"""Reasons that end all answers of a request."""


@dataclass(slots=True)
class Route:
    """What a router goes by. It stays in the ingress."""

    names: Sequence[bytes]
    """The names of the prompt's whole blocks."""
    tokens: int
    session: str | None = None
    weights: str = ""
    """Only replicas with these weights can take the job."""
    max_context: int = 0
    """And with memory for a sequence of so many tokens."""
    tried: set[str] = field(default_factory=set)
    """Replicas that refused the request, or were lost with it."""
    only: str | None = None
    """The replica that is asked for, if it must be a certain one."""
    chosen: str | None = None
    """The replica that the router has chosen."""
    last: bool = False
    """Whether all others that could take it were tried before."""
    expected: int = 0
    """Tokens that it is expected to have cached."""
    seconds: float = 0.0
    """How long choosing it took."""


@dataclass(slots=True)
class ReplicaJob:
    """A request on its way to a replica. When it is sent again, that is another job, with another name."""

    ingress: str
    submission: Submission
    """Its `request_id` is the job's name. It has a seed, what is left of its time, and no compiled grammar."""
    route: Route | None

    @property
    def name(self) -> str:
        return self.submission.request_id

    def __getstate__(self) -> tuple[str, Submission]:
        return self.ingress, self.submission

    def __setstate__(self, state: tuple[str, Submission]) -> None:
        self.ingress, self.submission = state
        self.route = None


class Refusal(NamedTuple):
    """Why a replica did not take a job, as the result of the call."""

    replica: str
    error: Exception
    elsewhere: bool
    """Whether another replica may take it."""


# -- replica to ingress, with the `Output`s of its jobs ----------------------------------------------------------------


class Hello(NamedTuple):
    replica: str
    facts: ModelFacts
    block_tokens: int
    """The size of the blocks in cache events; 0: there are none."""
    pid: int


class Accepted(NamedTuple):
    job: str


class ReplicaProgress(NamedTuple):
    """How far a job's prompt is, while it is being computed."""

    job: str
    computed: int
    hit: CacheHit


class Ended(NamedTuple):
    """The last message about a job."""

    job: str
    pins: Sequence[PinMark]


class CacheEvents(NamedTuple):
    events: Sequence[KVEvent]


class CacheContent(NamedTuple):
    """All blocks held up to event `number`, after a gap or at the beginning."""

    number: int
    names: Sequence[bytes]


class ReplicaLoad(NamedTuple):
    """Several times a second: also a sign of life."""

    stats: ReplicaStats


class Report(NamedTuple):
    """Numbers for /metrics and /kv: every now and then, and when they are asked for."""

    snapshot: EngineSnapshot
    kv: dict[str, Any]
    observer: MetricsObserver


class Reply(NamedTuple):
    """The result of a `Call`."""

    number: int
    value: Any
    error: Exception | None


# -- ingress to replica ------------------------------------------------------------------------------------------------


class Greeting(NamedTuple):
    ingress: str


class Cancel(NamedTuple):
    job: str
    answer: int | None
    """None: all."""
    reason: FinishReason


class Call(NamedTuple):
    """One of the replica's `CALLS`."""

    number: int
    name: str
    arguments: tuple[Any, ...]

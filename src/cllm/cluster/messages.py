"""What ingress and replicas tell each other: `Job`s through Ray Serve, everything else over links."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cllm.backends.base import PromptScores
from cllm.engine.params import SamplingParams
from cllm.engine.reading import Embedding
from cllm.engine.request import FinishReason
from cllm.engine.resuming import Generated
from cllm.engine.sampling import TokenLogprob
from cllm.engine.stats import EngineSnapshot
from cllm.engine.tenant import Tenant
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
class Job:
    """A request on its way to a replica. When it is sent again, that is another job, with another number."""

    ingress: str
    number: int
    request_id: str
    prompt: array[int]
    params: SamplingParams
    """With a seed."""
    priority: int
    timeout_s: float
    tenant: Tenant
    pins: Sequence[PinMark]
    embeds: bool
    generated: Generated | None
    """None: from the beginning."""
    route: Route | None

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "route"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.route = None
        for name, value in state.items():
            setattr(self, name, value)


class Refusal(NamedTuple):
    """Why a replica did not take a job, as the result of the call."""

    replica: str
    error: Exception
    elsewhere: bool
    """Whether another replica may take it."""


# -- replica to ingress ------------------------------------------------------------------------------------------------


class Hello(NamedTuple):
    replica: str
    facts: ModelFacts
    block_tokens: int
    """The size of the blocks in cache events; 0: there are none."""
    pid: int


class Accepted(NamedTuple):
    number: int


class News(NamedTuple):
    """An `Output` of the engine, for the job with this number."""

    number: int
    answer: int
    token_id: int | None
    logprob: TokenLogprob | None
    reason: FinishReason | None
    stop_token: int | None
    error: Exception | None
    cached_tokens: int
    read: PromptScores | Embedding | None


class Progress(NamedTuple):
    """How far a job's prompt is, while it is being computed."""

    number: int
    computed: int
    cached: int


class Ended(NamedTuple):
    """The last message about a job."""

    number: int
    pins: Sequence[PinMark]


class CacheEvents(NamedTuple):
    events: Sequence[KVEvent]


class CacheContent(NamedTuple):
    """All blocks held up to event `number`, after a gap or at the beginning."""

    number: int
    names: Sequence[bytes]


class Load(NamedTuple):
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
    number: int
    answer: int | None
    """None: all."""
    reason: FinishReason


class Call(NamedTuple):
    """One of the replica's `CALLS`."""

    number: int
    name: str
    arguments: tuple[Any, ...]

"""A request and its sequences, and the states they pass through.

PENDING ──admitted──► PROCESSING ──► COMPLETED | FAILED | TIMEOUT | CANCELLED
   ▲                      │
   └──────preempted───────┘
"""

from __future__ import annotations

import math
import secrets
from array import array
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from cllm.backends.base import PromptScores
from cllm.engine.reading import Embedding, Reading
from cllm.engine.resuming import observe_generated, validate_generated
from cllm.engine.row_sampler import RowSampler
from cllm.engine.sampling import TokenChooser, TokenLogprob
from cllm.engine.submission import Submission
from cllm.kv.radix import COMMON_SPACE, TOKEN_BYTES
from cllm.kv.sequence import KVSequence
from cllm.kv.window import Window


class RequestState(Enum):
    PENDING = "pending"
    PROCESSING = "processing"
    COMPLETED = "completed"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"

    @property
    def state(self) -> RequestState:
        return _END_STATES[self]


_END_STATES = {
    FinishReason.STOP: RequestState.COMPLETED,
    FinishReason.LENGTH: RequestState.COMPLETED,
    FinishReason.ERROR: RequestState.FAILED,
    FinishReason.TIMEOUT: RequestState.TIMEOUT,
    FinishReason.CANCELLED: RequestState.CANCELLED,
}


class CacheHit(NamedTuple):
    """What was cached of a prompt when its request was first admitted."""

    tokens: int = 0
    """How many were not computed again."""
    known: int = 0
    """How many were there: behind some, layers with a window or a state may have had nothing to go on from."""


NO_HIT = CacheHit()


class Output(NamedTuple):
    """What a step gave a sequence: a token, an end, or both."""

    request_id: str
    answer: int
    token_id: int | None
    logprob: TokenLogprob | None
    reason: FinishReason | None
    stop_token: int | None
    error: Exception | None
    hit: CacheHit
    read: PromptScores | Embedding | None = None
    """The result of scoring or pooling the prompt; then all else is empty."""


def token_output(request: Request, index: int, token: int, logprob: TokenLogprob | None) -> Output:
    """A token, and nothing else. Bypasses the constructor, which takes several times as long: this runs for every
    token of every answer."""
    return tuple.__new__(Output, (request.id, index, token, logprob, None, None, None, request.hit, None))


class DraftState:
    """What a drafter remembers of a sequence: a base class for its own."""

    __slots__ = ()


class Sequence(KVSequence):
    """One answer being generated. `tokens` is the prompt and what was generated so far, here or elsewhere."""

    __slots__ = (
        "_key",
        "chooser",
        "drafts",
        "ended",
        "epoch",
        "forced",
        "forked",
        "generates",
        "index",
        "max_length",
        "n_given",
        "n_prompt",
        "order",
        "promised",
        "reading",
        "recoveries",
        "refused",
        "request",
        "row",
        "running",
        "submitted",
        "turn",
        "twins",
    )

    def __init__(
        self, request: Request, index: int, chooser: TokenChooser, max_length: int, window: Window | None = None
    ) -> None:
        super().__init__((), window, request.submission.tenant.space)
        self.tokens = request.prompt  # shared until it has a token of its own: a hundred answers need no copies
        self.request = request
        self.index = index
        self.chooser = chooser
        self.n_prompt = len(request.prompt)
        self.n_given = 0
        """How many tokens after the prompt were generated elsewhere."""
        self.max_length = max_length
        self.generates = max_length > self.n_prompt
        """Whether tokens are generated; if not, it ends with its prompt."""
        self.reading: Reading | None = None
        """Scoring or pooling of the prompt, while it is not done."""
        self.order: tuple[float, int] | None = None
        self.running = False
        self.ended = False
        self.row = -1
        """Its number among the running ones."""
        self.epoch = 0
        """How often it has left the running ones."""
        self.submitted = 0
        """Tokens in steps that are in flight."""
        self.promised = 0
        """Tokens that these steps will choose."""
        self.recoveries = 0
        self.refused = False
        """Whether it waits because there was no room for it."""
        self.turn = 0
        """When it last had a row, while not all answers have one in every step."""
        self.forced = 0
        """How many of its last tokens a grammar forced: they are computed with its row, as one chunk."""
        self.drafts: DraftState | None = None
        self._key: bytes | None = None
        self.forked = False
        """Whether it is one of another answer's `twins`."""
        self.twins: list[Sequence] = []
        """Other answers to the same prompt, forked from this one when the prompt is computed."""

    @property
    def counts_as_query(self) -> bool:  # type: ignore[override]
        """Only the first admission of a request counts in the hit rate."""
        return self.request.admitted_at is None

    @property
    def request_id(self) -> str:  # type: ignore[override]
        return self.request.id

    @property
    def prefix(self) -> array[int]:
        if self.reading is None or self.reading.reusable is None:
            return super().prefix
        return self.tokens[: self.reading.reusable + 1]

    @property
    def asks_along(self) -> bool:  # type: ignore[override]
        return self.reading is not None and self.reading.reusable is not None

    @property
    def places(self) -> list[int]:  # type: ignore[override]
        """Where others will go on: behind what is to be pinned, and behind messages, which end with such a token."""
        ends = np.isin(np.frombuffer(self.tokens, np.int32), list(self.request.message_ends))
        return [*self.to_pin, *(np.flatnonzero(ends) + 1).tolist()]

    @property
    def to_pin(self) -> list[int]:  # type: ignore[override]
        return [mark.tokens for mark in self.request.submission.pins]

    @property
    def weight(self) -> float:
        """What a token of its prompt costs, relative to one that is only computed."""
        return 1.0 if self.reading is None else self.reading.weight

    @property
    def remaining(self) -> int:
        """Known tokens that are in no step yet."""
        return len(self.tokens) - self.num_computed - self.submitted

    @property
    def position(self) -> int:
        """How many tokens its next one attends to."""
        return self.num_computed + self.submitted - self.dropped

    @property
    def uncomputed(self) -> int:
        """Known tokens that are not computed yet."""
        return len(self.tokens) - self.num_computed

    @property
    def next_chunk(self) -> int:
        """How many of the remaining tokens one step can compute."""
        known = len(self.tokens) - self.num_computed - self.submitted
        if self.in_parts:
            return min(known, self.room - self.num_computed - self.submitted)
        return known if self.window is None else min(known, self.window.until_drop(self.num_computed))

    @property
    def most_drafts(self) -> int:
        """How many tokens may be drafted after its last one, the only one not computed: they and the one chosen after
        them must fit into the answer, and the window must not move. None before an answer's first token."""
        if self.twins or self.submitted or len(self.tokens) == self.n_prompt or self.uncomputed > 1:
            return 0
        most = self.max_length - len(self.tokens) - 1
        return most if self.window is None else min(most, self.window.until_drop(self.num_computed) - 1)

    @property
    def given(self) -> array[int]:
        """The tokens of the answer that were generated elsewhere."""
        return self.tokens[self.n_prompt : self.n_prompt + self.n_given]

    def resume(self, tokens: array[int]) -> None:
        """Continue after tokens that were generated elsewhere."""
        observe_generated(self.chooser, tokens, self.index)
        self.tokens = self.request.prompt + tokens
        self.n_given = len(tokens)

    def append(self, token: int) -> None:
        """Take a token as generated."""
        if self.tokens is self.request.prompt:
            self.tokens = self.tokens[:]
        self.tokens.append(token)

    @property
    def key(self) -> bytes:
        """The tokens known at admission, as the prefix index wants them."""
        if self._key is None:
            self._key = self.tokens.tobytes()
        return self._key

    def forget_key(self) -> None:
        """The sequence goes back to the queue with more tokens than it came with."""
        self._key = None

    def shares(self, other: Sequence, count: int) -> bool:
        """Whether both begin with the same `count` tokens and this one may use what the other computes. The last token
        does not count: it is always computed."""
        if other.space not in (self.space, COMMON_SPACE):
            return False
        if self.reading is not None and self.reading.reusable is not None and count > self.reading.reusable:
            return False
        ours, size = self.key, count * TOKEN_BYTES
        for window in (self.window, other.window):
            if window is not None and count > window.capacity:
                return False
        return size <= len(ours) - TOKEN_BYTES and other.key.startswith(ours[:size])


class Request:
    """One prompt, `params.n` answers. Created by the caller's thread, then owned by the engine's. Other threads may
    read its numbers, but two of them may be of different steps."""

    __slots__ = (
        "_final",
        "admitted_at",
        "arrival",
        "deadline",
        "end_ids",
        "first_answer",
        "first_token_at",
        "gaps",
        "hit",
        "id",
        "last_token_at",
        "message_ends",
        "params",
        "preemptions",
        "prompt",
        "reason",
        "resumed",
        "seed",
        "sequences",
        "state",
        "submission",
        "unfinished",
    )

    def __init__(
        self,
        submission: Submission,
        *,
        arrival: float,
        deadline: float,
        end_ids: frozenset[int] = frozenset(),
        message_ends: frozenset[int] = frozenset(),
    ) -> None:
        self.submission = submission
        self.id = submission.request_id
        prompt = submission.prompt
        self.prompt: array[int] = prompt if isinstance(prompt, array) else array("i", prompt)
        self.params = submission.params
        self.arrival = arrival
        self.deadline = deadline
        self.end_ids = end_ids
        self.message_ends = message_ends
        """With which messages of a chat end, whether they would end an answer or not."""
        self.seed = 0
        """The first answer's seed; answer i draws with seed + i."""
        self.state = RequestState.PENDING
        self.reason: FinishReason | None = None
        self.sequences: list[Sequence] = []
        self.first_answer = 0
        """The first of them that is generated here."""
        self.resumed = False
        """Whether some of its tokens were generated elsewhere."""
        self.unfinished = self.params.n
        self.preemptions = 0
        self.hit = NO_HIT
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.gaps: array[float] = array("f")
        self._final = (0, 0)
        """What was computed and generated, once it is closed."""

    @property
    def computed(self) -> int:
        """Prompt tokens that are in memory, those from the cache included."""
        return self._counts()[0]

    @property
    def generated(self) -> int:
        """Tokens of all answers that were generated here."""
        return self._counts()[1]

    def _counts(self) -> tuple[int, int]:
        sequences, whole = self.sequences, len(self.prompt)
        if not sequences:
            return self._final
        generated = sum(len(sequence.tokens) - sequence.n_prompt - sequence.n_given for sequence in sequences)
        computed = max(sequence.num_computed for sequence in sequences)
        return whole if generated else min(computed, whole), generated

    def close(self) -> None:
        """It has ended and lets its sequences go. They refer back to it, and the garbage collector, which counts
        objects and not bytes, would keep thousands of long prompts before it breaks such cycles."""
        self._final = self._counts()
        self.sequences = []


@dataclass(frozen=True, slots=True)
class Terms:
    """What a model sets for all of its requests."""

    max_context: int
    vocab_size: int
    eos_ids: frozenset[int] = frozenset()
    longest_s: float = math.inf
    """How long a request may take."""
    rows: RowSampler | None = None
    """What samples in this process, if anything does."""


def build_request(
    submission: Submission,
    terms: Terms,
    *,
    arrival: float,
    window: Window | None = None,
    reading: Reading | None = None,
    seed: int | None = None,
) -> Request:
    """A request with its sequences, ready for the engine. Answer i draws with `seed` + i, by default that of the
    parameters. A grammar decides where answers end, so they may always choose an end token. `reading` scores or pools
    the prompt, once for all answers.

    With a `window` an answer may outgrow the context; without max_tokens it is at most as long as the context.

    Answers with `generated` tokens go on as those of the request that was cut off would have, and only what is new is
    output. Raises `InvalidRequestError` if they cannot.
    """
    params, vocab_size = submission.params, terms.vocab_size
    constraint = None if submission.grammar is None else submission.grammar.start()
    stops = frozenset(params.stop_token_ids)
    past_the_end = params.ignore_eos and constraint is None
    end_ids = stops if past_the_end else stops | terms.eos_ids
    timeout_s = terms.longest_s if submission.timeout_s is None else min(submission.timeout_s, terms.longest_s)
    request = Request(
        submission,
        arrival=arrival,
        deadline=arrival + timeout_s,
        end_ids=end_ids,
        message_ends=stops | terms.eos_ids,
    )
    if seed is None:
        seed = secrets.randbits(63) if params.seed is None else params.seed
    request.seed = seed
    limit = len(request.prompt) + (terms.max_context if params.max_tokens is None else params.max_tokens)
    if window is None:
        limit = min(limit, terms.max_context)
    given = None
    if submission.generated is not None:
        most = limit - len(request.prompt)
        given = validate_generated(submission.generated, params, most=most, end_ids=end_ids, vocab_size=vocab_size)
    chooser = TokenChooser(
        params,
        request.prompt,
        end_ids=end_ids,
        forbidden=terms.eos_ids - stops if past_the_end else frozenset(),
        seed=seed,
        vocab_size=vocab_size,
        rows=terms.rows,
        constraint=constraint,
    )
    choosers = [chooser, *(chooser.twin(seed + index) for index in range(1, params.n))]
    request.sequences = [Sequence(request, index, each, limit, window) for index, each in enumerate(choosers)]
    if given is not None:
        _resume(request, given)
    if not request.resumed:
        request.sequences[0].reading = reading
    _pair_up([sequence for sequence in request.sequences if not (sequence.ended or sequence.n_given)])
    return request


def _pair_up(fresh: list[Sequence]) -> None:
    """The prompt of answers that have no tokens yet is computed once. Others compute it together with their own tokens,
    after what the cache has of it by then."""
    for twin in fresh[1:]:
        twin.forked = True
        fresh[0].twins.append(twin)


def _resume(request: Request, given: list[array[int] | None]) -> None:
    for sequence, tokens in zip(request.sequences, given, strict=True):
        if tokens is None:
            sequence.ended = True
            request.unfinished -= 1
        elif tokens:
            sequence.resume(tokens)
    request.resumed = any(sequence.ended or sequence.n_given for sequence in request.sequences)
    request.first_answer = next(sequence.index for sequence in request.sequences if not sequence.ended)

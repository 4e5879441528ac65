"""Every request, the state of its sequences, and its outputs.

A decision about a request (a token, an end, a place in the queue) stands as soon as it is made. If freeing memory fails
afterwards, that makes the cache suspect (`MemoryDoubt`), never the decision. So nothing here raises half-way, and
outputs wait in `take_outputs` however the step goes on.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count

from cllm.engine.observer import Observers, record_of
from cllm.engine.plan import Drafting
from cllm.engine.request import CacheHit, FinishReason, Output, Request, RequestState, Sequence
from cllm.engine.sampling import TokenLogprob
from cllm.errors import RequestTimeoutError
from cllm.kv.manager import KVManager

Order = tuple[float, int]


class WaitingQueue:
    """Lower priority numbers go first, and every `ageing_s` seconds of waiting are worth one step of priority.

    All sequences age at the same pace, so their order never changes and the key is fixed at arrival: arrival time +
    priority x ageing. A preempted sequence keeps its key, and so comes back in front.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        # A sequence that left stays in the heap until it comes up, and is not in the dictionary.
        self._heap: list[Order] = []
        self._waiting: dict[Order, Sequence] = {}
        self._ticket = count()

    def rank(self, sequence: Sequence) -> Order:
        """The sequence's place in the order, assigned once."""
        if sequence.order is None:
            request = sequence.request
            sequence.order = (request.arrival + request.submission.priority * self._ageing_s, next(self._ticket))
        return sequence.order

    def push(self, sequence: Sequence) -> None:
        order = self.rank(sequence)
        if order not in self._waiting:
            self._waiting[order] = sequence
            heapq.heappush(self._heap, order)

    def pop(self) -> Sequence | None:
        while self._heap:
            sequence = self._waiting.pop(heapq.heappop(self._heap), None)
            if sequence is not None:
                return sequence
        return None

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is waiting."""
        if sequence.order is not None:
            self._waiting.pop(sequence.order, None)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting.values())


class MemoryDoubt:
    """The first error that made the cache or backend memory suspect. All of it is rebuilt before the next step."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def note(self, error: Exception) -> None:
        self.error = self.error or error

    def clear(self) -> None:
        self.error = None

    def raise_if_any(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


class Requests:
    def __init__(
        self,
        kv: KVManager,
        doubt: MemoryDoubt,
        *,
        ageing_s: float,
        drafting: Drafting | None,
        clock: Callable[[], float],
    ) -> None:
        self._kv = kv
        self._doubt = doubt
        self.drafting = drafting
        self.observers = Observers()
        self.by_id: dict[str, Request] = {}
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue(ageing_s)
        self.dequeued = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.drafted_tokens = 0
        """Drafted tokens that were computed."""
        self.accepted_drafts = 0
        """Drafted tokens that became tokens of answers."""
        self.finished: Counter[str] = Counter()
        self.clock = clock
        self._deadlines: list[tuple[float, str]] = []
        self.outputs: list[Output] = []
        """Tokens and ends since `take_outputs`, in order."""
        self._free_rows: list[int] = []

    # -- requests ----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self.by_id[request.id] = request
        heapq.heappush(self._deadlines, (request.deadline, request.id))
        for sequence in request.sequences:
            if not (sequence.forked or sequence.ended):
                self.waiting.push(sequence)

    def finish(self, request: Request, index: int | None, reason: FinishReason, error: Exception | None = None) -> None:
        """End a request, or one of its answers, in any state."""
        for sequence in request.sequences if index is None else [request.sequences[index]]:
            if not sequence.ended:
                self.end(sequence, reason, error=error)

    def expire(self) -> None:
        """End every request whose deadline has passed."""
        now = self.clock()
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][1] not in self.by_id):
            _, request_id = heapq.heappop(self._deadlines)
            if request := self.by_id.get(request_id):
                limit = round(request.deadline - request.arrival, 3)
                error = RequestTimeoutError(f"request {request_id} did not finish within {limit:g} s")
                self.finish(request, None, FinishReason.TIMEOUT, error)

    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def take_outputs(self) -> list[Output]:
        """Tokens and ends since the last call, in order."""
        outputs, self.outputs = self.outputs, []
        return outputs

    # -- sequences ---------------------------------------------------------------------------------------------

    def start(self, sequence: Sequence, cached: int) -> None:
        request = sequence.request
        sequence.running = True
        sequence.refused = False
        sequence.row = self._free_rows.pop() if self._free_rows else len(self.running)
        self.running.append(sequence)
        if request.admitted_at is None:
            self.dequeued += 1
            request.admitted_at = self.clock()
            # A later admission finds what the request itself computed: that does not count.
            cached = min(cached, sequence.n_prompt)
            request.hit = CacheHit(cached, min(max(cached, sequence.known), sequence.n_prompt))
            self.prompt_tokens += sequence.n_prompt
            self.cached_tokens += cached
        request.state = RequestState.PROCESSING

    def preempt(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Free a running sequence's memory for others; it goes to the front of the queue and is recomputed."""
        self.stop_running(sequence)
        self.queue_again(sequence)
        self._free(sequence, rewind=False, keep=keep)

    def queue_again(self, sequence: Sequence) -> None:
        self.preemptions += 1
        sequence.request.preemptions += 1
        sequence.request.state = RequestState.PENDING
        sequence.forget_key()
        self.waiting.push(sequence)

    def stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.running = False
        self._free_rows.append(sequence.row)
        sequence.epoch += 1
        sequence.submitted = sequence.promised = 0

    def _free(self, sequence: Sequence, *, rewind: bool, keep: bool) -> None:
        """Free the sequence's memory; `rewind` if the backend may be ahead by a step that was not applied."""
        try:
            if rewind:
                self._kv.rewind(sequence)
            if keep and sequence.ended and sequence.index == sequence.request.first_answer:
                for mark in sequence.request.submission.pins:
                    self._kv.pin(sequence, mark)
            self._kv.release(sequence, keep=keep)
        except Exception as error:
            self._doubt.note(error)

    # -- ends --------------------------------------------------------------------------------------------------

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        token: int | None = None,
        logprob: TokenLogprob | None = None,
        *,
        error: Exception | None = None,
        keep: bool = True,
    ) -> None:
        """End a sequence and free its memory; the last one ends the request."""
        request = sequence.request
        sequence.ended = True
        stop_token = token if reason is FinishReason.STOP else None
        self.outputs.append(Output(request.id, sequence.index, token, logprob, reason, stop_token, error, request.hit))
        if sequence.running:
            self.stop_running(sequence)
            # With a token, the step was applied.
            self._free(sequence, rewind=token is None, keep=keep)
        else:
            self.waiting.discard(sequence)
        if self.drafting is not None:
            self.drafting.end(sequence)
        for twin in sequence.twins:
            if not twin.ended:
                self.waiting.push(twin)
        sequence.twins = []
        request.unfinished -= 1
        if request.reason is None or reason.state is not RequestState.COMPLETED:
            request.reason = reason
        if request.unfinished == 0:
            self._close(request, error)

    def _close(self, request: Request, error: Exception | None) -> None:
        assert request.reason is not None
        request.state = request.reason.state
        del self.by_id[request.id]
        if request.admitted_at is None:
            self.dequeued += 1
        self.finished[request.reason.value] += 1
        self.observers.finished(record_of(request, self.clock(), error))
        request.close()

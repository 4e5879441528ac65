"""What the next step computes, and what its result means.

There are no phases. A sequence has tokens and `num_computed`; each step closes part of the gap. One missing token is a
decode row, more are a prompt chunk (or a resumed sequence: the same thing).

    schedule()   decode rows first, then prompt chunks within the step's budget, admitting from the queue
    apply()      positions checked, blocks committed, tokens chosen, ends noticed
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from cllm.backends.base import Chunk, Logits
from cllm.engine.budget import StepBudget
from cllm.engine.observer import EngineObserver, record_of
from cllm.engine.queue import WaitingQueue
from cllm.engine.request import FinishReason, Output, Request, RequestState, Sequence
from cllm.engine.sampling import TokenLogprob, choose
from cllm.errors import BackendError, RequestTimeoutError
from cllm.kv.manager import KVManager, PositionMismatchError

log = logging.getLogger("cllm.engine")

ADMIT_SCAN = 64
"""Most waiting sequences looked at in one step."""

WAIT_FOR_PREFIX_TOKENS = 8
"""A sequence waits for another one's prompt to be computed if it can share at least this much more of it."""

OLDEST_EVERY = 4
"""Every so many steps with prompts the oldest one goes first, however long it is."""

MAX_RECOVERIES = 2
"""Times a sequence is recomputed after a fault before it fails."""

_BY_SLOT = attrgetter("slot")


@dataclass(slots=True)
class Plan:
    """One step: `chunks[i]` belongs to `sequences[i]`."""

    sequences: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    prompt_tokens: int = 0
    decode_rows: int = 0

    def add_prompt(self, sequence: Sequence, count: int) -> None:
        start = sequence.num_computed
        end = start + count
        done = end == len(sequence.tokens)
        self.sequences.append(sequence)
        self.chunks.append(Chunk(sequence.tokens[start:end], start, done, sequence.slot, sequence.blocks))
        self.prompt_tokens += count


class Scheduler:
    def __init__(
        self,
        kv: KVManager,
        budget: StepBudget,
        *,
        max_running: int,
        ageing_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kv = kv
        self.budget = budget
        self.observers: list[EngineObserver] = []
        self.requests: dict[str, Request] = {}
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue(ageing_s)
        self.dequeued = 0
        self.preemptions = 0
        self.position_mismatches = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.finished: Counter[str] = Counter()
        self._max_running = max_running
        self._clock = clock
        self._deadlines: list[tuple[float, str]] = []
        self._suspect = False
        self._prompt_steps = 0

    # -- requests come and go ----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self.requests[request.id] = request
        heapq.heappush(self._deadlines, (request.deadline, request.id))
        self.waiting.push(request.sequences[0])

    def finish(
        self, request: Request, index: int | None, reason: FinishReason, error: Exception | None = None
    ) -> list[Output]:
        """End a request, or one of its answers, wherever it stands."""
        asked = request.sequences if index is None else [request.sequences[index]]
        return [self._end(sequence, reason, error=error) for sequence in asked if not sequence.ended]

    def expire(self) -> list[Output]:
        """End every request whose deadline has passed."""
        now = self._clock()
        outputs: list[Output] = []
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][1] not in self.requests):
            _, request_id = heapq.heappop(self._deadlines)
            if request := self.requests.get(request_id):
                limit = request.deadline - request.arrival
                error = RequestTimeoutError(f"request {request_id} did not finish within {limit:g} s")
                outputs += self.finish(request, None, FinishReason.TIMEOUT, error)
        return outputs

    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    # -- before a step -----------------------------------------------------------------------------------------

    def schedule(self) -> Plan:
        while not self._room_to_decode():
            self._preempt(max(self.running, key=self.waiting.rank))
        if len(self.waiting):
            self._admit()
        self.kv.arrange()
        # In slot order, rows come back without a copy; where there are no slots this changes nothing.
        self.running.sort(key=_BY_SLOT)
        plan = Plan()
        prompts: list[Sequence] = []
        for sequence in self.running:
            tokens, start = sequence.tokens, sequence.num_computed
            if len(tokens) - start == 1:
                plan.sequences.append(sequence)
                plan.chunks.append(Chunk(tokens[start:], start, True, sequence.slot, sequence.blocks))
            else:
                prompts.append(sequence)
        plan.decode_rows = len(plan.chunks)
        if prompts:
            self.plan_prompts(plan, prompts)
        return plan

    def _room_to_decode(self) -> bool:
        """Make room for the next token of every answer. False: the memory does not suffice for all of them."""
        grow = self.kv.grow
        for sequence in self.running:  # a plain loop: this runs for every sequence in every step
            if len(sequence.tokens) - sequence.num_computed == 1 and not grow(sequence, 1):
                return False
        return True

    def plan_prompts(self, plan: Plan, prompts: list[Sequence]) -> None:
        """Prompt chunks within the budget, for whoever is done soonest; every few steps for the oldest instead.

        So a short prompt passes a long one, and the long one still advances. Few chunks are better than many: the
        backend computes chunks of different lengths one after the other. Their memory was taken at admission.
        """
        wanted = sum(sequence.remaining for sequence in prompts)
        budget = self.budget.prompt_tokens(plan.decode_rows, len(prompts) + len(self.waiting), wanted)
        if budget == 0:
            return
        rank = self.waiting.rank
        prompts.sort(key=lambda sequence: (sequence.remaining, rank(sequence)))
        self._prompt_steps += 1
        if self._prompt_steps % OLDEST_EVERY == 0:
            oldest = min(prompts, key=rank)
            prompts.remove(oldest)
            prompts.insert(0, oldest)
        for sequence in prompts:
            count = min(sequence.remaining, budget)
            if count == 0:
                break
            plan.add_prompt(sequence, count)
            budget -= count

    def _admit(self) -> None:
        """Take sequences from the queue while there is room, in order; those that better wait are passed over."""
        passed: list[Sequence] = []
        in_progress = [sequence for sequence in self.running if sequence.remaining > 1]
        for _ in range(min(ADMIT_SCAN, len(self.waiting))):
            if len(self.running) >= self._max_running:
                break
            sequence = self.waiting.pop()
            if sequence is None:
                break
            if self._better_waits(sequence, in_progress):
                passed.append(sequence)
                continue
            cached = self.kv.admit(sequence)
            if cached is None:
                passed.append(sequence)
                break
            self._start(sequence, cached)
            if sequence.remaining > 1:
                in_progress.append(sequence)
        for sequence in passed:
            self.waiting.push(sequence)

    def _better_waits(self, sequence: Sequence, in_progress: list[Sequence]) -> bool:
        """Is someone computing a prompt right now that this sequence could share instead of computing it again?"""
        # Waiting costs no time: the other one computes exactly what this one would have to.
        held: int | None = None
        for other in in_progress:
            if not sequence.shares(other, self._worth_sharing(other.num_computed)):
                continue
            if held is None:
                held = self.kv.peek(sequence.key)
            if held <= other.num_computed or sequence.shares(other, self._worth_sharing(held)):
                return True
        return False

    def _worth_sharing(self, computed: int) -> int:
        """How much two prompts must have in common, of which so much is computed, for one to wait for the other."""
        unit = self.kv.unit_tokens
        return -(-(computed + WAIT_FOR_PREFIX_TOKENS) // unit) * unit

    def _start(self, sequence: Sequence, cached: int) -> None:
        request = sequence.request
        sequence.running = True
        self.running.append(sequence)
        if request.admitted_at is None:
            self.dequeued += 1
            request.admitted_at = self._clock()
            request.state = RequestState.PROCESSING
        if len(sequence.tokens) == sequence.n_prompt and sequence.index == 0:
            sequence.cached_tokens = cached
            self.prompt_tokens += sequence.n_prompt
            self.cached_tokens += cached

    def _preempt(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Give a running sequence's memory to others; it comes back to the front of the queue and is recomputed."""
        self.preemptions += 1
        sequence.request.preemptions += 1
        self._stop_running(sequence, keep=keep)
        sequence.forget_key()
        sequence.request.state = RequestState.PENDING
        self.waiting.push(sequence)

    def _stop_running(self, sequence: Sequence, *, keep: bool = True) -> None:
        self.running.remove(sequence)
        sequence.running = False
        self.kv.release(sequence, keep=keep)

    # -- after a step ------------------------------------------------------------------------------------------

    def apply(self, plan: Plan, logits: Logits) -> list[Output]:
        """Take the step's result in. Sequences that ended while it ran are passed over."""
        kv = self.kv
        wanted: list[tuple[int, Sequence]] = []
        row = 0
        for sequence, chunk in zip(plan.sequences, plan.chunks, strict=True):
            if sequence.running:
                sequence.num_computed += len(chunk.tokens)
                try:
                    kv.verify(sequence)
                except PositionMismatchError as mismatch:
                    self._heal(sequence, mismatch)
                else:
                    kv.commit(sequence)
                    if chunk.wants_logits:
                        wanted.append((row, sequence))
                        if sequence.twins:
                            wanted += [(row, twin) for twin in self._fork_twins(sequence)]
            row += chunk.wants_logits
        choices = choose(logits, [(row, sequence.chooser) for row, sequence in wanted])
        now = self._clock()
        outputs: list[Output] = []
        for (_, sequence), choice in zip(wanted, choices, strict=True):
            if choice is None:
                error = BackendError("the model gave no usable probabilities for the next token")
                outputs.append(self._end(sequence, FinishReason.ERROR, error=error))
            else:
                outputs.append(self._take_token(sequence, choice.token_id, choice.logprob, now))
        return outputs

    def _take_token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float) -> Output:
        request = sequence.request
        sequence.tokens.append(token)
        self.generated_tokens += 1
        if request.first_token_at is None:
            request.first_token_at = now
        elif request.last_token_at is not None and len(request.sequences) == 1:
            request.gaps.append(now - request.last_token_at)
        request.last_token_at = now
        if token in request.end_ids:
            return self._end(sequence, FinishReason.STOP, token, logprob)
        if len(sequence.tokens) >= sequence.max_length:
            return self._end(sequence, FinishReason.LENGTH, token, logprob)
        return Output(request.id, sequence.index, token, logprob, None, None, None, sequence.cached_tokens)

    def _fork_twins(self, sequence: Sequence) -> list[Sequence]:
        """The prompt is computed: its other answers begin here, as far as there is room; the rest queue up."""
        started: list[Sequence] = []
        for twin in sequence.twins:
            if twin.ended:
                continue
            self.waiting.rank(twin)
            if len(self.running) < self._max_running and self.kv.fork(sequence, twin):
                self._start(twin, twin.num_computed)
                started.append(twin)
            else:
                self.waiting.push(twin)
        sequence.twins = []
        return started

    # -- faults ------------------------------------------------------------------------------------------------

    def rewind(self, plan: Plan) -> None:
        """The step did not happen: forget what it may have written."""
        for sequence in plan.sequences:
            if sequence.running:
                self.kv.rewind(sequence)

    def blame(self, sequence: Sequence, error: BackendError) -> list[Output]:
        """A sequence could not be computed, not even alone: it fails, unless its memory was wrong and can be redone."""
        try:
            self.kv.verify(sequence)
        except PositionMismatchError as mismatch:
            if sequence.recoveries < MAX_RECOVERIES:
                self._heal(sequence, mismatch)
                return []
        return self.finish(sequence.request, sequence.index, FinishReason.ERROR, error)

    def preempt_all(self, error: Exception) -> list[Output]:
        """The backend's memory is lost: everything that ran is recomputed, or fails if that happened too often."""
        outputs: list[Output] = []
        for sequence in list(self.running):
            sequence.recoveries += 1
            if sequence.recoveries > MAX_RECOVERIES:
                outputs.append(self._end(sequence, FinishReason.ERROR, error=error, keep=False))
            else:
                self._preempt(sequence, keep=False)
        return outputs

    def take_suspicion(self) -> bool:
        """Has a sequence's content been wrong twice, so that the whole context is in doubt? Asking resets it."""
        suspect, self._suspect = self._suspect, False
        return suspect

    def _heal(self, sequence: Sequence, error: PositionMismatchError) -> None:
        self.position_mismatches += 1
        log.error("request %s: %s; its KV is dropped and recomputed", sequence.request.id, error)
        sequence.recoveries += 1
        self._suspect |= sequence.recoveries > 1
        self._preempt(sequence, keep=False)

    # -- ends --------------------------------------------------------------------------------------------------

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        token: int | None = None,
        logprob: TokenLogprob | None = None,
        *,
        error: Exception | None = None,
        keep: bool = True,
    ) -> Output:
        """Release everything the sequence holds, and with the last one its request."""
        request = sequence.request
        if sequence.running:
            # The backend may be ahead by a step that will not be applied.
            if reason not in (FinishReason.STOP, FinishReason.LENGTH) or token is None:
                self.kv.rewind(sequence)
            self._stop_running(sequence, keep=keep)
        elif sequence.order is not None:
            self.waiting.discard(sequence)
        sequence.ended = True
        for twin in sequence.twins:
            if not twin.ended:
                self.waiting.push(twin)
        sequence.twins = []
        request.unfinished -= 1
        if request.reason is None or reason.state is not RequestState.COMPLETED:
            request.reason = reason
        if request.unfinished == 0:
            self._close(request, error)
        stop_token = token if reason is FinishReason.STOP else None
        cached = sequence.cached_tokens
        return Output(request.id, sequence.index, token, logprob, reason, stop_token, error, cached)

    def _close(self, request: Request, error: Exception | None) -> None:
        assert request.reason is not None
        request.state = request.reason.state
        del self.requests[request.id]
        if request.admitted_at is None:
            self.dequeued += 1
        self.finished[request.reason.value] += 1
        record = record_of(request, self._clock(), error)
        for observer in self.observers:
            observer.on_finished(record)

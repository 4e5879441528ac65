"""What the next step computes, and what its result means.

There are no phases. A sequence has tokens and `num_computed`; each step closes part of the gap. One missing token is a
decode row, more are a prompt chunk (or a resumed sequence: the same thing).

    schedule()   decode rows first, then prompt chunks within the step's budget, admitting from the queue
    apply()      positions checked, blocks committed, tokens chosen, ends noticed

A `BackendError` of the cache that is not fatal concerns the sequence it was called for. Everything else that the cache
raises goes to the caller, who renews the memory; until then the roster is right, whatever call it was.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter

from cllm.backends.base import Chunk, Logits
from cllm.engine.budget import StepBudget
from cllm.engine.request import FinishReason, Output, Sequence
from cllm.engine.roster import MAX_RECOVERIES, Roster
from cllm.engine.sampling import TokenLogprob, choose
from cllm.errors import BackendError, describe
from cllm.kv.manager import KVManager, PositionMismatchError

log = logging.getLogger("cllm.engine")

ADMIT_SCAN = 64
"""Most waiting sequences looked at in one step."""

WAIT_FOR_PREFIX_TOKENS = 8
"""A sequence waits for another one's prompt to be computed if it can share at least this much more of it."""

OLDEST_EVERY = 4
"""Every so many steps with prompts the oldest one goes first, however long it is."""

_BY_SLOT = attrgetter("slot")
_BY_TURN = attrgetter("turn")


@dataclass(slots=True)
class Plan:
    """One step: `chunks[i]` belongs to `sequences[i]`."""

    sequences: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    prompt_tokens: int = 0
    decode_rows: int = 0

    def add_prompt(self, sequence: Sequence, count: int) -> None:
        end = sequence.num_computed + count
        self.sequences.append(sequence)
        self.chunks.append(_chunk(sequence, end, end == len(sequence.tokens)))
        self.prompt_tokens += count


def _chunk(sequence: Sequence, end: int | None, wants_logits: bool) -> Chunk:
    start, dropped = sequence.num_computed, sequence.dropped
    tokens = sequence.tokens[start:end]
    return Chunk(tokens, start - dropped, wants_logits, sequence.slot, sequence.blocks, dropped, sequence.kept)


class Scheduler(Roster):
    def __init__(
        self,
        kv: KVManager,
        budget: StepBudget,
        *,
        max_running: int,
        ageing_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(kv, ageing_s=ageing_s, clock=clock)
        self.budget = budget
        self.position_mismatches = 0
        self._max_running = max_running
        self._prompt_steps = 0
        self._turns = 0

    # -- before a step -----------------------------------------------------------------------------------------

    def schedule(self) -> Plan:
        while not self._room_to_decode():
            self.raise_doubt()  # memory that did not come back is no reason for anyone else to go
        if len(self.waiting):
            self._admit()
        self.kv.arrange()
        # In slot order, rows come back without a copy; where there are no slots this changes nothing.
        self.running.sort(key=_BY_SLOT)
        plan = Plan()
        prompts: list[Sequence] = []
        rows = plan.sequences
        for sequence in self.running:
            (rows if len(sequence.tokens) - sequence.num_computed == 1 else prompts).append(sequence)
        most = self.budget.rows_at_once(len(rows))
        if most < len(rows):
            rows[:] = self._whose_turn(rows, most)
        plan.chunks = [_chunk(sequence, None, True) for sequence in rows]
        plan.decode_rows = len(rows)
        if prompts:
            self.plan_prompts(plan, prompts)
        return plan

    def _whose_turn(self, rows: list[Sequence], most: int) -> list[Sequence]:
        """Some of the answers, in the order of `rows`. Of each request the one that has waited longest, then a second
        one of each, and so on: who asks for many answers does not make those wait who ask for one."""
        asked: Counter[int] = Counter()
        places: list[tuple[int, int, Sequence]] = []
        for sequence in sorted(rows, key=_BY_TURN):
            request = id(sequence.request)
            places.append((asked[request], sequence.turn, sequence))
            asked[request] += 1
        places.sort(key=itemgetter(0, 1))
        self._turns += 1
        for _, _, sequence in places[:most]:
            sequence.turn = self._turns
        return [sequence for sequence in rows if sequence.turn == self._turns]

    def _room_to_decode(self) -> bool:
        """Make room for the next token of every answer, and move windows on. False: one sequence had to go, and the
        others try again."""
        grow = self.kv.grow
        for sequence in self.running:  # a plain loop: this runs for every sequence in every step
            if len(sequence.tokens) - sequence.num_computed == 1 or sequence.window is not None:
                try:
                    if sequence.window is None:
                        if grow(sequence, 1):
                            continue
                    elif self.kv.roll(sequence) and grow(sequence, sequence.next_chunk):
                        continue
                except BackendError as error:
                    if error.fatal:
                        raise
                    log.error("request %s cannot grow: %s; it is recomputed", sequence.request.id, error)
                    self._set_back(sequence, error)
                else:
                    self.kv.allocation_failures += 1
                    self._preempt(max(self.running, key=self.waiting.rank))
                return False
        return True

    def plan_prompts(self, plan: Plan, prompts: list[Sequence]) -> None:
        """Prompt chunks within the budget, for whoever is done soonest; every few steps for the oldest instead. A
        chunk ends where a window has to move on.

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
            count = min(sequence.next_chunk, budget)
            if count == 0:
                break
            plan.add_prompt(sequence, count)
            budget -= count

    def _admit(self) -> None:
        """Take sequences from the queue while there is room, in order; those that better wait are passed over."""
        passed: list[Sequence] = []
        self.kv.demand = len(self.running) + len(self.waiting)
        in_progress = [sequence for sequence in self.running if sequence.remaining > 1]
        try:
            for _ in range(min(ADMIT_SCAN, len(self.waiting))):
                if len(self.running) >= self._max_running:
                    break
                sequence = self.waiting.pop()
                if sequence is None:
                    break
                passed.append(sequence)  # it stands in the queue until it has started, whatever is raised
                if self._better_waits(sequence, in_progress):
                    continue
                cached = self._place(sequence)
                if cached is None:
                    break
                passed.pop()
                self._start(sequence, cached)
                if sequence.remaining > 1:
                    in_progress.append(sequence)
        finally:
            for sequence in passed:
                if not sequence.ended:
                    self.waiting.push(sequence)

    def _place(self, sequence: Sequence) -> int | None:
        """Find memory for a sequence that waits; None: not now, or never, and then it has ended."""
        try:
            cached = self.kv.admit(sequence)
        except Exception as error:
            sequence.recoveries += 1
            if sequence.recoveries > MAX_RECOVERIES:
                failure = error if isinstance(error, BackendError) else BackendError(describe(error))
                self._end(sequence, FinishReason.ERROR, error=failure)
            # What failed and took memory all the same is not to be relied on.
            if not isinstance(error, BackendError) or error.fatal or sequence.admitted:
                raise
            log.error("request %s could not be admitted: %s", sequence.request.id, error)
            return None
        if cached is not None:
            return cached
        if not self.running:
            # It has all the memory there is to itself, so waiting would not help.
            no_room = BackendError(f"there is no room in the KV cache for {len(sequence.tokens)} tokens")
            self.finish(sequence.request, None, FinishReason.ERROR, no_room)
        elif not sequence.refused:
            sequence.refused = True
            self.kv.allocation_failures += 1
        return None

    def _better_waits(self, sequence: Sequence, in_progress: list[Sequence]) -> bool:
        """Is someone computing a prompt right now that this sequence could share instead of computing it again?"""
        # Waiting costs no time: the other one computes exactly what this one would have to.
        held: int | None = None
        for other in in_progress:
            if not sequence.shares(other, self._worth_sharing(other.num_computed)):
                continue
            if held is None:
                held = self.kv.peek(sequence.key, sequence.space)
            if held <= other.num_computed or sequence.shares(other, self._worth_sharing(held)):
                return True
        return False

    def _worth_sharing(self, computed: int) -> int:
        """How much two prompts must have in common, of which so much is computed, for one to wait for the other."""
        unit = self.kv.unit_tokens
        return -(-(computed + WAIT_FOR_PREFIX_TOKENS) // unit) * unit

    # -- after a step ------------------------------------------------------------------------------------------

    def apply(self, plan: Plan, logits: Logits) -> None:
        """Take the step's result in. Sequences that ended while it ran are passed over.

        What is raised is raised before any token is chosen, so that the same ones can be computed again.
        """
        kv = self.kv
        wanted: list[tuple[int, Sequence]] = []
        row = 0
        for sequence, chunk in zip(plan.sequences, plan.chunks, strict=True):
            if sequence.running:
                sequence.num_computed += len(chunk.tokens)
                if self._verified(sequence):
                    kv.commit(sequence)
                    if chunk.wants_logits:
                        wanted.append((row, sequence))
                        if sequence.twins:
                            wanted += [(row, twin) for twin in self._fork_twins(sequence)]
            row += chunk.wants_logits
        choices = choose(logits, [(row, sequence.chooser) for row, sequence in wanted])
        now = self._clock()
        for (_, sequence), choice in zip(wanted, choices, strict=True):
            if choice is None:
                error = BackendError("the model gave no usable probabilities for the next token")
                self._end(sequence, FinishReason.ERROR, error=error)
            elif isinstance(choice, Exception):
                log.error("request %s: no token can be chosen", sequence.request.id, exc_info=choice)
                self._end(sequence, FinishReason.ERROR, error=BackendError(describe(choice)))
            else:
                self._take_token(sequence, choice.token_id, choice.logprob, now)

    def _verified(self, sequence: Sequence) -> bool:
        """Does the backend hold what it should for this sequence? If not, the sequence is recomputed."""
        try:
            self.kv.verify(sequence)
        except PositionMismatchError as mismatch:
            self.position_mismatches += 1
            error = BackendError(str(mismatch))
        except BackendError as failure:
            if failure.fatal:
                raise
            error = failure
        else:
            return True
        log.error("request %s: %s; its KV is dropped and recomputed", sequence.request.id, error)
        self._set_back(sequence, error)
        if sequence.recoveries > 1:
            self.distrust(BackendError(f"positions were wrong twice for one request: {error}"))
        return False

    def _take_token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float) -> None:
        request = sequence.request
        sequence.append(token)
        self.generated_tokens += 1
        if request.first_token_at is None:
            request.first_token_at = now
        elif request.last_token_at is not None and len(request.sequences) == 1:
            request.gaps.append(now - request.last_token_at)
        request.last_token_at = now
        if token in request.end_ids:
            self._end(sequence, FinishReason.STOP, token, logprob)
        elif len(sequence.tokens) >= sequence.max_length:
            self._end(sequence, FinishReason.LENGTH, token, logprob)
        else:
            self._outputs.append(
                Output(request.id, sequence.index, token, logprob, None, None, None, request.cached_tokens)
            )

    def _fork_twins(self, sequence: Sequence) -> list[Sequence]:
        """The prompt is computed: its other answers begin here, as far as there is room; the rest queue up."""
        started: list[Sequence] = []
        while sequence.twins:
            twin = sequence.twins[0]
            if not twin.ended:
                self.waiting.rank(twin)
                if len(self.running) < self._max_running and self._forked(sequence, twin):
                    self._start(twin, twin.num_computed)
                    started.append(twin)
                else:
                    self.waiting.push(twin)
            del sequence.twins[0]  # only now: a twin that could not be dealt with is dealt with next time
        return started

    def _forked(self, sequence: Sequence, twin: Sequence) -> bool:
        try:
            return self.kv.fork(sequence, twin)
        except BackendError as error:
            if error.fatal or twin.admitted:
                raise
            log.error("request %s: an answer cannot begin where another one is: %s", sequence.request.id, error)
            return False

    # -- faults ------------------------------------------------------------------------------------------------

    def rewind(self, plan: Plan) -> None:
        """The step did not happen: forget what it may have written."""
        for sequence in plan.sequences:
            if sequence.running:
                self.kv.rewind(sequence)

    def blame(self, sequence: Sequence, error: BackendError) -> None:
        """A sequence could not be computed, not even alone: it fails, unless its memory was wrong and can be redone."""
        if self._verified(sequence):
            self._end(sequence, FinishReason.ERROR, error=error)

"""What the next step computes.

There are no phases. A sequence has tokens and `num_computed`; each step closes part of the gap. One missing token is a
decode row, more are a prompt chunk (or a resumed sequence: the same thing).

Where the backend computes several steps ahead, the gap counts from what is submitted, and to a token that is promised:

    tokens     p p p p p p a a ?          ?  a token that the step under way will choose
    computed   ──────────────┤            7  `num_computed`
    submitted                ├─┤          1  so the next row begins at 8, with what the step under way gives

A `BackendError` of the cache that is not fatal concerns the sequence it was called for. Anything else that the cache
raises goes to the caller, which rebuilds the memory; the state of requests is right all the same.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from enum import Enum
from operator import attrgetter, itemgetter

from cllm.engine.budget import FEW_ROWS, StepBudget, StepCosts
from cllm.engine.draw import Mask, masks_for
from cllm.engine.faults import MAX_RECOVERIES, Faults
from cllm.engine.plan import Drafting, StepPlan, row_of
from cllm.engine.request import FinishReason, Sequence
from cllm.engine.requests import MemoryDoubt, Requests
from cllm.errors import BackendError, describe
from cllm.kv.manager import KVManager

log = logging.getLogger("cllm.engine")

LONG_TOKENS = 2048
"""To be computed, while the cost of a token is not known."""
LONG_S = 2.0


def log_long_prompt(sequence: Sequence, cached: int, costs: StepCosts) -> None:
    """To be called when the sequence has been admitted, with the tokens that were cached."""
    missing, request = sequence.uncomputed, sequence.request
    seconds = costs.tokens_s(missing, cached) if costs.token_s else None
    if request.preemptions or (missing < LONG_TOKENS if seconds is None else seconds < LONG_S):
        return
    expected = "" if seconds is None else f"; about {seconds:,.0f} s if it is computed alone"
    known = f" of {sequence.known} known" if sequence.known > cached else ""
    fields = {
        "request_id": request.id,
        "prompt_tokens": sequence.n_prompt,
        "cached_tokens": cached,
        "known_tokens": max(sequence.known, cached),
        "uncomputed_tokens": missing,
        "expected_s": None if seconds is None else round(seconds, 1),
    }
    log.info(
        "%s begins a long prompt: %d tokens, %d cached%s, %d to compute%s",
        *(request.id, sequence.n_prompt, cached, known, missing, expected),
        extra={"fields": fields},
    )


ADMIT_SCAN = 64
"""The most waiting sequences to consider in one step."""

WAIT_FOR_PREFIX_TOKENS = 8
"""A sequence waits for another one to compute a shared prompt if that saves at least this many tokens."""

MOST_FORCED = 128
"""The most tokens in a step, of all answers, that a grammar forced."""

OLDEST_EVERY = 4
"""In one in this many steps with prompts the oldest prompt goes first, however long it is."""


class Loading(Enum):
    LOADING = "loading"


LOADING = Loading.LOADING
"""Part of the sequence is being loaded from another tier, which is faster than computing it."""

_BY_SLOT = attrgetter("slot")
_BY_TURN = attrgetter("turn")


class Planner:
    def __init__(
        self,
        kv: KVManager,
        requests: Requests,
        faults: Faults,
        doubt: MemoryDoubt,
        budget: StepBudget,
        *,
        max_running: int,
        drafting: Drafting | None,
        whole_prompts: bool,
    ) -> None:
        """`whole_prompts`: a prompt is computed in one step, however long it is."""
        self.budget = budget
        self._max_running = max_running
        self._kv = kv
        self._requests = requests
        self._faults = faults
        self._doubt = doubt
        self.drafting = drafting
        self._whole_prompts = whole_prompts
        self._prompt_steps = 0
        self._turns = 0
        self._draft_turns = 0
        self._forced_turns = 0
        self._held_up = 0
        """Answers with a constraint that wait for the step under way: what it gives decides what may follow."""

    def schedule(self) -> StepPlan:
        plan = StepPlan()
        rows, prompts = plan.sequences, list[Sequence]()
        self._partition_running(rows, prompts)
        if self._held_up and self._held_up >= sum(sequence.chooser.constraint is None for sequence in rows):
            # A step now and another one for them would take twice as long as one for all.
            return StepPlan()
        if len(self._requests.waiting) and len(self._requests.running) < self._max_running:
            self._admit()
            self._partition_running(rows, prompts)  # again: making room may have cost some sequences their memory
        self._kv.arrange()
        # In slot order, rows come back without a copy; where there are no slots this changes nothing.
        rows.sort(key=_BY_SLOT)
        all_rows = len(rows)
        if all_rows > FEW_ROWS:
            most = self.budget.rows_at_once(all_rows, len({id(sequence.request) for sequence in rows}))
            if most < all_rows:
                rows[:] = self._whose_turn(rows, most)
        plan.chunks = [row_of(sequence) for sequence in rows]
        plan.decode_rows = len(rows)
        if any(sequence.forced for sequence in rows):
            self._cut_forced(plan)
        if self.drafting is not None and 0 < len(rows) == all_rows:  # a draft never makes a row wait
            self._draft(self.drafting, plan, prompts_wait=bool(prompts) or len(self._requests.waiting) > 0)
        if prompts:
            self.plan_prompts(plan, prompts)
        return plan

    def _partition_running(self, rows: list[Sequence], prompts: list[Sequence]) -> None:
        """Sort running sequences into decode rows, with room for their token, and prompts to continue. To make room,
        some may be preempted."""
        while not self._try_partition(rows, prompts):
            self._doubt.raise_if_any()  # memory that could not be freed is no reason to preempt another sequence

    def _try_partition(self, rows: list[Sequence], prompts: list[Sequence]) -> bool:
        """False if a sequence was preempted: try again with the others."""
        rows.clear()
        prompts.clear()
        self._held_up = 0
        for sequence in self._requests.running:  # a plain loop: this runs for every sequence in every step
            submitted, promised = sequence.submitted, sequence.promised
            start = sequence.num_computed + submitted
            missing = len(sequence.tokens) + promised - start
            if sequence.window is None:
                if missing == 1 and sequence.generates:
                    # A row can follow a token that is not known yet, unless that may end the answer or decide more.
                    if promised and (
                        start >= sequence.max_length - 1
                        or sequence.twins
                        or not sequence.chooser.can_draw_ahead(promised)
                    ):
                        self._held_up += sequence.chooser.constraint is not None
                        continue
                    if start >= sequence.room:
                        if promised and not self._has_room_ahead(sequence):
                            continue
                        if not promised and not self._make_room(sequence):
                            return False
                    rows.append(sequence)
                elif missing > sequence.forced + 1 or (missing and not sequence.generates):
                    out_of_room = sequence.in_parts and not submitted and start >= sequence.room
                    if out_of_room and not self._make_room(sequence):
                        return False
                    if submitted and sequence.reading is not None and sequence.reading.in_order:
                        continue
                    prompts.append(sequence)
                elif missing:
                    if sequence.in_parts and start + missing > sequence.room:
                        # They may never have room for so many at once: what is free must do, and the rest waits.
                        self._room_to_draft(sequence, submitted + min(missing - 1, MOST_FORCED))
                        missing = 1
                        if submitted and start >= sequence.room:
                            continue
                    if start + missing > sequence.room and not self._make_room(sequence, missing):
                        return False
                    rows.append(sequence)
            elif not submitted:  # a window moves only when nothing is under way
                if not self._make_room(sequence):
                    return False
                (rows if missing <= sequence.forced + 1 and sequence.generates else prompts).append(sequence)
        return True

    def _cut_forced(self, plan: StepPlan) -> None:
        """Compute tokens that a grammar forced together with their rows, as far as `max_gap_ms` leaves time. Their
        answers take turns and wait for the rest; other answers do not."""
        most = self.budget.most_drafts(plan.decode_rows)
        left = MOST_FORCED if most is None else min(most, MOST_FORCED)
        self._forced_turns += 1
        unit = self._kv.unit_tokens
        for place in range(plan.decode_rows):
            index = (self._forced_turns + place) % plan.decode_rows
            missing = len(plan.chunks[index].tokens)
            if missing > 1:
                sequence = plan.sequences[index]
                count = sequence.until_stop(min(missing, 1 + left, sequence.next_chunk), unit)
                plan.cut_forced(index, count)
                left -= count - 1

    def _draft(self, drafting: Drafting, plan: StepPlan, *, prompts_wait: bool) -> None:
        """Add drafted tokens to rows, as far as memory is free and the step stays within `max_gap_ms`."""
        left = drafting.begin_step(plan.decode_rows, prompts_wait)
        if left and (most := self.budget.most_drafts(plan.decode_rows)) is not None:
            left = min(left, most - plan.forced)
        if left <= 0:
            return
        self._draft_turns += 1  # so that the same rows do not always come first
        for place in range(plan.decode_rows):
            index = (self._draft_turns + place) % plan.decode_rows
            sequence = plan.sequences[index]
            most = min(left, sequence.most_drafts)
            if most < 1:
                continue
            tokens = drafting.propose(sequence, most)
            if sequence.chooser.constraint is not None:
                tokens = tokens[: sequence.chooser.agreed(tokens)]
            count = self._room_to_draft(sequence, len(tokens)) if tokens else 0
            if count > 0:
                plan.add_draft(index, tokens[:count])
                left -= count
                if left == 0:
                    break

    def _room_to_draft(self, sequence: Sequence, count: int) -> int:
        """How many of `count` tokens there is room for after the sequence's next one."""
        try:
            return self._kv.grow_within_free(sequence, 1 + count) - 1
        except BackendError as error:
            if error.fatal:
                raise
            return 0  # there is room for its own token

    def launch(self, plan: StepPlan) -> None:
        """The step is about to be submitted, and others will follow before its result is known."""
        plan.epochs = [sequence.epoch for sequence in plan.sequences]
        masks = _masks_of(plan)
        for sequence, chunk in zip(plan.sequences, plan.chunks, strict=True):
            if chunk.wanted_logits:
                chunk.draws = (sequence.chooser.draw_ahead(sequence.promised, masks.get(id(sequence))),)
                if sequence.twins:
                    chunk.draws += tuple(twin.chooser.draw_ahead(0, masks.get(id(twin))) for twin in sequence.twins)
                sequence.promised += chunk.wanted_logits
            sequence.submitted += len(chunk.tokens)

    def _whose_turn(self, rows: list[Sequence], most: int) -> list[Sequence]:
        """Some of the rows, in their order: of each request the answer that has waited longest, then a second one of
        each, and so on. So a request for many answers does not hold up requests for one."""
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

    def _has_room_ahead(self, sequence: Sequence) -> bool:
        """Without preempting another sequence: the row can as well wait for the step in flight."""
        try:
            return self._kv.grow(sequence, sequence.submitted + 1)
        except BackendError as error:
            if error.fatal:
                raise
            return False  # tried again once nothing is in flight for it

    def _make_room(self, sequence: Sequence, count: int = 1) -> bool:
        """Get memory for a sequence's next tokens, or move its window on. False if a sequence was preempted for it."""
        kv = self._kv
        try:
            if sequence.window is None:
                if kv.grow(sequence, sequence.submitted + count):
                    return True
            elif kv.roll(sequence) and kv.grow(sequence, sequence.next_chunk):
                return True
        except BackendError as error:
            if error.fatal:
                raise
            log.error("request %s: its KV memory cannot grow: %s; recomputing it", sequence.request.id, error)
            self._faults.recompute_or_fail(sequence, error)
        else:
            kv.allocation_failures += 1
            self._requests.preempt(max(self._requests.running, key=self._requests.waiting.rank))
        return False

    def plan_prompts(self, plan: StepPlan, prompts: list[Sequence]) -> None:
        """Fill the budget with prompt chunks, shortest remaining prompt first; every few steps the oldest first. A
        chunk ends where a window has to move on.

        So a short prompt passes a long one, and the long one still advances. Few chunks are better than many: the
        backend computes chunks of different lengths one after the other. Their memory was allocated at admission.
        """
        tokens_s = self.budget.costs.tokens_s
        wanted_s = sum(sequence.weight * tokens_s(sequence.remaining, sequence.position) for sequence in prompts)
        answering = len(self._requests.running) > len(prompts)  # some may be in flight, and so have no row in this step
        # Texts to embed wait for no token, so they are no reason to make others wait for theirs.
        waiting = sum(sequence.generates for sequence in prompts) + len(self._requests.waiting)
        allowance = self.budget.allowance(plan.decode_rows, waiting, wanted_s, answering, plan.beside_rows)
        if allowance is None:
            return
        rank = self._requests.waiting.rank
        prompts.sort(key=lambda sequence: (sequence.remaining, rank(sequence)))
        self._prompt_steps += 1
        unit = self._kv.unit_tokens
        if self._prompt_steps % OLDEST_EVERY == 0:
            oldest = min(prompts, key=rank)
            prompts.remove(oldest)
            prompts.insert(0, oldest)
        for sequence in prompts:
            most = sequence.until_stop(sequence.next_chunk, unit)
            count = sequence.until_stop(allowance.take(most, sequence.position, sequence.weight), unit)
            if count < sequence.next_chunk and self._whole_prompts:
                if plan.chunks:
                    break
                count = sequence.next_chunk
            if count == 0:
                if sequence.in_parts:
                    continue  # its next blocks come with the step under way
                break
            plan.add_prompt(sequence, count)

    def _admit(self) -> None:
        """Admit sequences in order of the queue while there is room, except those that had better wait."""
        passed: list[Sequence] = []
        self._kv.demand = len(self._requests.running) + len(self._requests.waiting)
        self._kv.token_s = self.budget.costs.token_s
        in_progress = [sequence for sequence in self._requests.running if sequence.uncomputed > 1]
        looked_at = 0
        try:
            while looked_at < ADMIT_SCAN and len(self._requests.running) < self._max_running:
                sequence = self._requests.waiting.pop()
                if sequence is None:
                    break
                passed.append(sequence)  # back into the queue unless it has started, whatever is raised
                looked_at += 1
                if self._should_wait(sequence, in_progress):
                    continue
                cached = self._allocate(sequence)
                if cached is None:
                    break
                if cached is LOADING:
                    looked_at -= 1
                    continue
                passed.pop()
                self._requests.start(sequence, cached)
                if sequence.uncomputed > 1:
                    log_long_prompt(sequence, cached, self.budget.costs)
                    in_progress.append(sequence)
        finally:
            for sequence in passed:
                if not sequence.ended:
                    self._requests.waiting.push(sequence)

    def _allocate(self, sequence: Sequence) -> int | Loading | None:
        """Allocate memory for a waiting sequence: how many of its tokens are cached. None: no room now; or never, and
        then it has ended."""
        try:
            if self._kv.fetch(sequence):
                return LOADING
            cached = self._kv.admit(sequence)
        except Exception as error:
            sequence.recoveries += 1
            if sequence.recoveries > MAX_RECOVERIES:
                failure = error if isinstance(error, BackendError) else BackendError(describe(error))
                self._requests.end(sequence, FinishReason.ERROR, error=failure)
            # If it failed and allocated memory all the same, the cache is not to be trusted.
            if not isinstance(error, BackendError) or error.fatal or sequence.admitted:
                raise
            log.error("request %s could not be admitted: %s", sequence.request.id, error)
            return None
        if cached is not None:
            return cached
        if not (self._requests.running or self._kv.loading or self._kv.awaits_memory):
            # Nothing else holds memory, so waiting would not help.
            no_room = BackendError(f"there is no room in the KV cache for {len(sequence.tokens)} tokens")
            self._requests.finish(sequence.request, None, FinishReason.ERROR, no_room)
        elif not sequence.refused:
            sequence.refused = True
            self._kv.allocation_failures += 1
        return None

    def _should_wait(self, sequence: Sequence, in_progress: list[Sequence]) -> bool:
        """Whether another sequence is computing a prefix that this one can share instead of computing it again."""
        # Waiting costs no time: the other one computes exactly what this one would have to.
        held: int | None = None
        for other in in_progress:
            place = _shared_place(sequence, other) if other.marks else 0
            more = sequence.shares(other, self._worth_sharing(other.num_computed))
            if not (place or more):
                continue
            if held is None:
                held = self._kv.peek(sequence.key, sequence.space)
            unknown = more and (held <= other.num_computed or sequence.shares(other, self._worth_sharing(held)))
            if unknown or place >= held + WAIT_FOR_PREFIX_TOKENS:
                self._kv.meet(other, sequence)
                return True
        return False

    def _worth_sharing(self, computed: int) -> int:
        """How many tokens two prompts must have in common, of which `computed` are done, for one to wait."""
        unit = self._kv.unit_tokens
        return -(-(computed + WAIT_FOR_PREFIX_TOKENS) // unit) * unit


def _shared_place(sequence: Sequence, other: Sequence) -> int:
    """Where both can go on from once the other one is there, which may have computed almost all of it; 0: nowhere."""
    marks = other.marks  # the next one last: all from the first that they share on are shared
    first = bisect_left(marks, True, key=lambda mark: sequence.shares(other, mark))
    return marks[first] if first < len(marks) else 0


def _masks_of(plan: StepPlan) -> dict[int, Mask | Exception | None]:
    """Token masks of the sequences that choose a token in this step and have a constraint, by id."""
    choosing = [
        each
        for sequence, chunk in zip(plan.sequences, plan.chunks, strict=True)
        if chunk.wanted_logits
        for each in (sequence, *sequence.twins)
        if each.chooser.constraint is not None
    ]
    masks = masks_for([each.chooser.constraint for each in choosing])
    return {} if masks is None else dict(zip(map(id, choosing), masks, strict=True))

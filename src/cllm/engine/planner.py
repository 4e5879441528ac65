"""What the next step computes.

There are no phases. A sequence has tokens and `num_computed`; each step closes part of the gap. One missing token is a
decode row, more are a prompt chunk (or a resumed sequence: the same thing).

Where the backend computes several steps ahead, the gap counts from what is submitted, and to a token that is promised:

    tokens     p p p p p p a a ?          ?  a token that the step under way will choose
    computed   ──────────────┤            7  `num_computed`
    submitted                ├─┤          1  so the next row begins at 8, with what the step under way gives

A `BackendError` of the cache that is not fatal concerns the sequence it was called for. Everything else that the cache
raises goes to the caller, who renews the memory; until then the roster is right, whatever call it was.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from enum import Enum
from operator import attrgetter, itemgetter

from cllm.engine.budget import MANY_ROWS, StepBudget
from cllm.engine.constraint import Mask, masks_for
from cllm.engine.drafting import Drafting
from cllm.engine.faults import MAX_RECOVERIES, Faults
from cllm.engine.plan import Plan, row_of
from cllm.engine.request import FinishReason, Sequence
from cllm.errors import BackendError, describe
from cllm.kv.manager import KVManager

log = logging.getLogger("cllm.engine")

ADMIT_SCAN = 64
"""Most waiting sequences looked at in one step."""

WAIT_FOR_PREFIX_TOKENS = 8
"""A sequence waits for another one's prompt to be computed if it can share at least this much more of it."""

MOST_FORCED = 128
"""Tokens that no draw chose, of all answers in a step."""

OLDEST_EVERY = 4
"""Every so many steps with prompts the oldest one goes first, however long it is."""


class Loading(Enum):
    LOADING = "loading"


LOADING = Loading.LOADING
"""Something of the sequence is on its way from elsewhere, and will be there sooner than computed."""

_BY_SLOT = attrgetter("slot")
_BY_TURN = attrgetter("turn")


class Planner(Faults):
    def __init__(
        self,
        kv: KVManager,
        budget: StepBudget,
        *,
        max_running: int,
        ageing_s: float = 10.0,
        drafting: Drafting | None = None,
        whole_prompts: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`whole_prompts`: a prompt is computed in one step, however long it is."""
        super().__init__(kv, ageing_s=ageing_s, drafting=drafting, clock=clock)
        self.budget = budget
        self._max_running = max_running
        self._whole_prompts = whole_prompts
        self._prompt_steps = 0
        self._turns = 0
        self._draft_turns = 0
        self._forced_turns = 0

    def schedule(self) -> Plan:
        plan = Plan()
        rows, prompts = plan.sequences, list[Sequence]()
        self._sort_out(rows, prompts)
        if len(self.waiting) and len(self.running) < self._max_running:
            self._admit()
            self._sort_out(rows, prompts)  # anew: to make more room, memory may have been lost that is computed again
        self.kv.arrange()
        # In slot order, rows come back without a copy; where there are no slots this changes nothing.
        rows.sort(key=_BY_SLOT)
        all_rows = len(rows)
        if all_rows > MANY_ROWS:
            most = self.budget.rows_at_once(all_rows, len({id(sequence.request) for sequence in rows}))
            if most < all_rows:
                rows[:] = self._whose_turn(rows, most)
        plan.chunks = [row_of(sequence) for sequence in rows]
        plan.decode_rows = len(rows)
        if any(sequence.forced for sequence in rows):
            self._cut_forced(plan)
        if self.drafting is not None and 0 < len(rows) == all_rows:  # a draft never makes a row wait
            self._draft(self.drafting, plan, prompts_wait=bool(prompts) or len(self.waiting) > 0)
        if prompts:
            self.plan_prompts(plan, prompts)
        return plan

    def _sort_out(self, rows: list[Sequence], prompts: list[Sequence]) -> None:
        """Who can have a row, with room for its token, and who a chunk of its prompt; for which some may have to go."""
        while not self._sorted_out(rows, prompts):
            self.raise_doubt()  # memory that did not come back is no reason for anyone else to go

    def _sorted_out(self, rows: list[Sequence], prompts: list[Sequence]) -> bool:
        """False: one sequence had to go, and the others try again."""
        rows.clear()
        prompts.clear()
        for sequence in self.running:  # a plain loop: this runs for every sequence in every step
            submitted, promised = sequence.submitted, sequence.promised
            start = sequence.num_computed + submitted
            missing = len(sequence.tokens) + promised - start
            if sequence.window is None:
                if missing == 1 and sequence.answers:
                    # A row can follow on a token that is not known yet, unless that is the last one or says more.
                    if promised and (
                        start >= sequence.max_length - 1 or sequence.twins or not sequence.chooser.foresees(promised)
                    ):
                        continue
                    if start >= sequence.room:
                        if promised and not self._has_room_ahead(sequence):
                            continue
                        if not promised and not self._make_room(sequence):
                            return False
                    rows.append(sequence)
                elif missing > sequence.forced + 1 or (missing and not sequence.answers):
                    if submitted and sequence.reading is not None and sequence.reading.in_order:
                        continue
                    prompts.append(sequence)
                elif missing:
                    if start + missing > sequence.room and not self._make_room(sequence, missing):
                        return False
                    rows.append(sequence)
            elif not submitted:  # a window moves only when nothing is under way
                if not self._make_room(sequence):
                    return False
                (rows if missing <= sequence.forced + 1 and sequence.answers else prompts).append(sequence)
        return True

    def _cut_forced(self, plan: Plan) -> None:
        """Tokens that no draw chose are computed with their rows, as far as the promise leaves time for them. Their
        answers wait for the rest, each in its turn; nobody else does."""
        most = self.budget.most_drafts(plan.decode_rows)
        left = MOST_FORCED if most is None else min(most, MOST_FORCED)
        self._forced_turns += 1
        for place in range(plan.decode_rows):
            index = (self._forced_turns + place) % plan.decode_rows
            missing = len(plan.chunks[index].tokens)
            if missing > 1:
                count = min(missing, 1 + left, plan.sequences[index].next_chunk)
                plan.cut_forced(index, count)
                left -= count - 1

    def _draft(self, drafting: Drafting, plan: Plan, *, prompts_wait: bool) -> None:
        """Have rows compute what may follow, where that takes memory from nobody and no step beyond the promise."""
        left = drafting.begin_step(plan.decode_rows, prompts_wait)
        if left and (most := self.budget.most_drafts(plan.decode_rows)) is not None:
            left = min(left, most - plan.forced)
        if left <= 0:
            return
        self._draft_turns += 1  # so that not always the same ones come first
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
        """How many of so many tokens there is room for behind the sequence's next one."""
        try:
            return self.kv.stretch(sequence, 1 + count) - 1
        except BackendError as error:
            if error.fatal:
                raise
            return 0  # its own token has its room

    def launch(self, plan: Plan) -> None:
        """The step is about to be submitted, and others will be before its result is here."""
        plan.stays = [sequence.stay for sequence in plan.sequences]
        masks = _masks_of(plan)
        for sequence, chunk in zip(plan.sequences, plan.chunks, strict=True):
            if chunk.wanted_logits:
                chunk.draws = (sequence.chooser.foresee(sequence.promised, masks.get(id(sequence))),)
                if sequence.twins:
                    chunk.draws += tuple(twin.chooser.foresee(0, masks.get(id(twin))) for twin in sequence.twins)
                sequence.promised += chunk.wanted_logits
            sequence.submitted += len(chunk.tokens)

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

    def _has_room_ahead(self, sequence: Sequence) -> bool:
        """Nobody has to go for a row that could as well wait for the step that it is in."""
        try:
            return self.kv.grow(sequence, sequence.submitted + 1)
        except BackendError as error:
            if error.fatal:
                raise
            return False  # it is tried again once the row is behind nothing

    def _make_room(self, sequence: Sequence, count: int = 1) -> bool:
        """Have memory for a sequence's next tokens, or move its window on. False: somebody had to go for it."""
        kv = self.kv
        try:
            if sequence.window is None:
                if kv.grow(sequence, sequence.submitted + count):
                    return True
            elif kv.roll(sequence) and kv.grow(sequence, sequence.next_chunk):
                return True
        except BackendError as error:
            if error.fatal:
                raise
            log.error("request %s cannot grow: %s; it is recomputed", sequence.request.id, error)
            self.set_back(sequence, error)
        else:
            kv.allocation_failures += 1
            self._preempt(max(self.running, key=self.waiting.rank))
        return False

    def plan_prompts(self, plan: Plan, prompts: list[Sequence]) -> None:
        """Prompt chunks within the budget, for whoever is done soonest; every few steps for the oldest instead. A
        chunk ends where a window has to move on.

        So a short prompt passes a long one, and the long one still advances. Few chunks are better than many: the
        backend computes chunks of different lengths one after the other. Their memory was taken at admission.
        """
        tokens_s = self.budget.costs.tokens_s
        wanted_s = sum(sequence.weight * tokens_s(sequence.remaining, sequence.position) for sequence in prompts)
        answering = len(self.running) > len(prompts)  # some may be in a step under way, and so have no row in this one
        # Who is to be embedded waits for no token, and so is no reason to make others wait for theirs.
        waiting = sum(sequence.answers for sequence in prompts) + len(self.waiting)
        allowance = self.budget.allowance(plan.decode_rows, waiting, wanted_s, answering, plan.beside_rows)
        if allowance is None:
            return
        rank = self.waiting.rank
        prompts.sort(key=lambda sequence: (sequence.remaining, rank(sequence)))
        self._prompt_steps += 1
        if self._prompt_steps % OLDEST_EVERY == 0:
            oldest = min(prompts, key=rank)
            prompts.remove(oldest)
            prompts.insert(0, oldest)
        for sequence in prompts:
            count = allowance.take(sequence.next_chunk, sequence.position, sequence.weight)
            if count < sequence.next_chunk and self._whole_prompts:
                if plan.chunks:
                    break
                count = sequence.next_chunk
            if count == 0:
                break
            plan.add_prompt(sequence, count)

    def _admit(self) -> None:
        """Take sequences from the queue while there is room, in order; those that better wait are passed over."""
        passed: list[Sequence] = []
        self.kv.demand = len(self.running) + len(self.waiting)
        self.kv.token_s = self.budget.costs.token_s
        in_progress = [sequence for sequence in self.running if sequence.uncomputed > 1]
        looked_at = 0
        try:
            while looked_at < ADMIT_SCAN and len(self.running) < self._max_running:
                sequence = self.waiting.pop()
                if sequence is None:
                    break
                passed.append(sequence)  # it stands in the queue until it has started, whatever is raised
                looked_at += 1
                if self._better_waits(sequence, in_progress):
                    continue
                cached = self._place(sequence)
                if cached is None:
                    break
                if cached is LOADING:
                    looked_at -= 1
                    continue
                passed.pop()
                self._start(sequence, cached)
                if sequence.uncomputed > 1:
                    in_progress.append(sequence)
        finally:
            for sequence in passed:
                if not sequence.ended:
                    self.waiting.push(sequence)

    def _place(self, sequence: Sequence) -> int | Loading | None:
        """Find memory for a sequence that waits; None: not now, or never, and then it has ended."""
        try:
            if self.kv.fetch(sequence):
                return LOADING
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
        if not (self.running or self.kv.loading or self.kv.awaits_memory):
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


def _masks_of(plan: Plan) -> dict[int, Mask | Exception | None]:
    """What those may choose from who choose in this step, by the sequence's id, where that is not all tokens."""
    choosing = [
        each
        for sequence, chunk in zip(plan.sequences, plan.chunks, strict=True)
        if chunk.wanted_logits
        for each in (sequence, *sequence.twins)
        if each.chooser.constraint is not None
    ]
    masks = masks_for([each.chooser.constraint for each in choosing])
    return {} if masks is None else dict(zip(map(id, choosing), masks, strict=True))

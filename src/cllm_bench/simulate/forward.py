"""Steps in which little is decided, taken together.

While nobody can be admitted, a step adds one token to every answer and perhaps a chunk to a prompt. The cache is
concerned only where a sequence needs its next block or has completed one. So those calls are made, in the order in
which the scheduler would make them; prompt chunks are planned and applied by the scheduler; the rest is added up:

    step          0    1    2    3    4    5    6   ...   until an answer or a prompt is done, somebody arrives,
    answer A           grow                commit         a deadline passes, or memory runs out
    answer B                commit grow
    prompt C      64        64

The result is that of single steps, to the last bit: `tests/simulate/test_simulate_forward.py` compares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cllm.engine.plan import Plan
from cllm.engine.request import Sequence
from cllm_bench.simulate.backend import TracedAnswer, work_of
from cllm_bench.simulate.cost import StepWork
from cllm_bench.simulate.managers import NEVER, Refusals

if TYPE_CHECKING:
    from cllm_bench.simulate.server import SimulatedServer

WORTHWHILE = 3
"""Fewer steps than this are not worth the preparation."""

_NONE = Refusals(0, 0)


def forward(server: SimulatedServer, until: float) -> bool:
    """Take as many steps as possible at once; False if the next one has to be taken alone."""
    scheduler = server.scheduler
    refusal = _NONE
    if len(scheduler.waiting) and len(scheduler.running) < server.max_running:
        if server.refusal is None:
            return False
        refusal = server.refusal
    answers: list[Sequence] = []
    prompts: list[Sequence] = []
    steps = NEVER
    for sequence in scheduler.running:
        known = len(sequence.tokens)
        if known - sequence.num_computed != 1:
            prompts.append(sequence)
            continue
        if sequence.request.last_token_at != server.now:
            # It lacks one token of its prompt, or was preempted: the gap before its next token is its own.
            return False
        answers.append(sequence)
        left = sequence.max_length - known
        if left < steps:
            steps = left
            if steps <= WORTHWHILE:
                return False
    run = _Run(server, answers, prompts)
    run.take(steps - 1, until)
    if refusal.total and run.done:
        kv = server.kv
        total, fragmented = kv.refusals
        kv.refusals = Refusals(total + run.done * refusal.total, fragmented + run.done * refusal.fragmented)
        server.tally.batch_splits += run.done * (refusal.fragmented > 0)
    return run.done > 0


class _Run:
    """A number of steps of the same sequences. Answers' fields are brought up to date where the cache looks at them."""

    def __init__(self, server: SimulatedServer, answers: list[Sequence], prompts: list[Sequence]) -> None:
        self.done = 0
        self._server = server
        self._answers = answers
        self._prompts = prompts
        self._starts = [sequence.num_computed for sequence in answers]
        self._times = [server.now]
        # Step -> the answers for which `grow`, or `commit`, has something to do there.
        self._growing: dict[int, list[int]] = {}
        self._completing: dict[int, list[int]] = {}
        kv = server.kv
        for index, sequence in enumerate(answers):
            self._growing.setdefault(kv.grow_due(sequence), []).append(index)
            # The commit after step s counts s + 1 tokens.
            self._completing.setdefault(kv.commit_due(sequence) - 1, []).append(index)
        # Answers read one token more every step, until they reach the window.
        window = NEVER if server.window is None else server.window
        self._context = sum(min(start, window) for start in self._starts)
        self._lengthening = len(answers)
        self._full_at: dict[int, int] = {}
        if server.window is not None:
            for start in self._starts:
                step = max(window - start, 0)
                self._full_at[step] = self._full_at.get(step, 0) + 1

    def take(self, steps: int, until: float) -> None:
        """At most `steps` steps, none of which begins at `until` or later."""
        server = self._server
        deadline = server.scheduler.next_deadline()
        until = until if deadline is None else min(until, deadline)
        # A cache above its threshold evicts a little in every step, whether anything else happens or not.
        untidy = True
        while self.done < steps and server.now < until:
            if not (self._prompts or untidy):
                self._glide(min(steps, self._next_due()), until)
                if self.done == steps or server.now >= until:
                    break
            step = self.done
            if step in self._growing and not self._grow(step, self._growing.pop(step)):
                break
            plan = self._compute()
            self.done = step + 1
            if step in self._completing:
                self._complete(step, self._completing.pop(step))
            if plan is not None and self._apply(plan):
                return
            server.kv.maintain(0.0)
            untidy = server.kv.untidy
            self._lengthening -= self._full_at.pop(step, 0)
            self._context += self._lengthening
        self._settle()

    def _next_due(self) -> int:
        """The next step that concerns the cache, or after which an answer reads no more than before."""
        return min(min(due, default=NEVER) for due in (self._growing, self._completing, self._full_at))

    def _glide(self, end: int, until: float) -> None:
        """Steps up to `end` in which nothing happens but time."""
        server, rows = self._server, len(self._answers)
        observe = server.scheduler.budget.observe
        fixed, context_s = server.cost.without_context(rows), server.cost.context_s
        overhead = server.cost.overhead(rows)
        context, lengthening, now = self._context, self._lengthening, server.now
        times = self._times
        while self.done < end and now < until:
            compute = fixed + context * context_s
            now += compute + overhead
            times.append(now)
            observe(0, rows, compute)
            context += lengthening
            self.done += 1
        server.now, self._context = now, context

    def _compute(self) -> Plan | None:
        """Let the clock go on by one step; its prompt chunks, if it has any."""
        server = self._server
        rows = chosen = len(self._answers)
        work = StepWork(rows, self._context, 0, 0, 0)
        plan = None
        prompt_tokens = 0
        if self._prompts:
            plan = Plan(decode_rows=rows)
            server.scheduler.plan_prompts(plan, self._prompts)
            added = work_of(plan.chunks, server.window)
            work = StepWork(rows + added.rows, self._context + added.context, *added[2:])
            prompt_tokens = plan.prompt_tokens
            chosen += sum(chunk.wanted_logits for chunk in plan.chunks)
        compute = server.cost.compute(work)
        server.now += compute + server.move_seconds() + server.cost.overhead(chosen)
        self._times.append(server.now)
        server.scheduler.budget.observe(prompt_tokens, rows, compute, 0.0 if plan is None else plan.pairs)
        server.tally.computed_tokens += prompt_tokens
        return plan if prompt_tokens else None

    def _apply(self, plan: Plan) -> bool:
        """Take the chunks' results in. True if a prompt is done or lacks one token, which makes it an answer."""
        ends_run = any(
            sequence.remaining - len(chunk.tokens) <= 1
            for sequence, chunk in zip(plan.sequences, plan.chunks, strict=True)
        )
        if ends_run:
            self._settle()
        server = self._server
        server.scheduler.apply(plan, server.backend.result(len(plan.chunks)))
        server.scheduler.take_outputs()
        if ends_run:
            server.kv.maintain(0.0)
        return ends_run

    def _grow(self, step: int, due: list[int]) -> bool:
        kv = self._server.kv
        due.sort()
        for index in due:
            sequence = self._answers[index]
            sequence.num_computed = self._starts[index] + step
            refusals = kv.refusals
            if not kv.grow(sequence, 1):
                # The scheduler takes this step, and will be refused itself.
                kv.refusals = refusals
                return False
            self._growing.setdefault(step + kv.grow_due(sequence), []).append(index)
        return True

    def _complete(self, step: int, due: list[int]) -> None:
        kv = self._server.kv
        due.sort()
        for index in due:
            sequence = self._answers[index]
            _bring_up_to(sequence, self._starts[index] + step + 1)
            kv.commit(sequence)
            self._completing.setdefault(step + kv.commit_due(sequence), []).append(index)

    def _settle(self) -> None:
        """All answers as they are after the last step: one token further than they are computed."""
        done, server = self.done, self._server
        gaps = np.diff(np.array(self._times)).astype(np.float32).tobytes()
        for start, sequence in zip(self._starts, self._answers, strict=True):
            _bring_up_to(sequence, start + done + 1)
            sequence.num_computed = start + done
            request = sequence.request
            request.gaps.frombytes(gaps)
            request.last_token_at = server.now
        tokens = done * len(self._answers)
        server.scheduler.generated_tokens += tokens
        server.tally.steps += done
        server.tally.computed_tokens += tokens


def _bring_up_to(sequence: Sequence, computed: int) -> None:
    """So many tokens are computed, and those are known."""
    sequence.num_computed = computed
    missing = computed - len(sequence.tokens)
    if missing > 0:
        answer: TracedAnswer = sequence.chooser  # type: ignore[assignment]
        sequence.tokens.extend(answer.take(missing))

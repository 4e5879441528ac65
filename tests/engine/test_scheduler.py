"""The scheduler on the fake backend, stepped by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cllm.backends.base import Chunk, StepResult
from cllm.backends.fake import FakeBackend
from cllm.engine.budget import StepBudget
from cllm.engine.params import SamplingParams
from cllm.engine.plan import StepPlan
from cllm.engine.request import FinishReason, Output, RequestState
from cllm.engine.requests import WaitingQueue
from cllm.engine.scheduler import Scheduler
from cllm.engine.stepper import Stepper
from cllm.errors import BackendError, RequestTimeoutError, StepAbortedError
from cllm.kv.ops import BlockGeometry, BlockOps
from cllm.kv.paged.manager import PagedKVManager
from engine_kit import CONTEXT, answer, make_request, make_scheduler, reference, run, step
from pipelined_backend import PipelinedFake


def test_batched_equals_alone(layout: str) -> None:
    backend = FakeBackend()
    scheduler = make_scheduler(backend, layout)
    requests = [make_request(f"prompt number {n} " * (n + 1)) for n in range(6)]
    for request in requests:
        scheduler.requests.add(request)
    outputs = run(scheduler, backend)
    for request in requests:
        assert answer(outputs, request) == reference(request)
        assert request.state is RequestState.COMPLETED


def test_cached_equals_uncached_and_costs_less(layout: str) -> None:
    backend = FakeBackend()
    scheduler = make_scheduler(backend, layout)
    first, second = (make_request("a long shared prompt, the same both times") for _ in range(2))
    scheduler.requests.add(first)
    first_outputs = run(scheduler, backend)
    spent = backend.computed_tokens
    scheduler.requests.add(second)
    outputs = run(scheduler, backend)
    assert answer(outputs, second) == answer(first_outputs, first) == reference(second)
    assert backend.computed_tokens - spent < spent / 2
    assert second.hit.tokens >= 32


def test_a_shared_prompt_is_computed_once_even_when_all_come_together(layout: str) -> None:
    backend = FakeBackend()
    scheduler = make_scheduler(backend, layout)
    shared = "s" * 120
    requests = [make_request(f"{shared} user {n}") for n in range(6)]
    for request in requests:
        scheduler.requests.add(request)
    outputs = run(scheduler, backend)
    for request in requests:
        assert answer(outputs, request) == reference(request)
    generated = sum(len(answer(outputs, request)) for request in requests)
    assert backend.computed_tokens <= 120 + 6 * 16 + generated


def test_who_asks_for_many_answers_does_not_make_others_wait() -> None:
    """A step of all 81 rows would take 0.81 s, eight times the longest gap."""
    backend = FakeBackend()
    scheduler = make_scheduler(backend, tokens=16_384, running=128)
    scheduler.planner.budget = StepBudget(inter_token_s=0.1, max_gap_s=0.1, prompt_only_s=0.5, max_tokens=32)
    many = make_request("many answers", SamplingParams(n=80, temperature=1.0, seed=3, max_tokens=30, ignore_eos=True))
    one = make_request("a single one", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    scheduler.requests.add(many)
    for _ in range(4):
        step(scheduler, backend)
    scheduler.requests.add(one)
    rows, steps_of_one, outputs = [], [], list[Output]()
    while scheduler.requests.has_work:
        outputs += (new := step(scheduler, backend))
        rows.append(sum(1 for output in new if output.token_id is not None))
        steps_of_one.append(any(output.request_id == one.id for output in new))
        scheduler.kv.check()
    assert answer(outputs, one) == reference(one)
    first = steps_of_one.index(True)
    assert all(steps_of_one[first : first + 30])
    # The others take turns: 32 rows a step, in which nobody is left out.
    assert max(rows[first:]) <= 33
    assert sorted(o.answer for o in outputs if o.request_id == many.id and o.reason is not None) == list(range(80))
    assert answer(outputs, many, 79) == reference(many, 79)[-len(answer(outputs, many, 79)) :]


@pytest.mark.parametrize(("shared", "waits"), [(12, False), (16, True)])
def test_nobody_waits_for_less_than_can_be_shared(shared: int, waits: bool) -> None:
    """Blocks of 16 are shared whole: 12 tokens in common are no reason to wait."""
    backend = FakeBackend()
    geometry = BlockGeometry(64, 16)
    backend.allocate(geometry)
    assert isinstance(backend.ops, BlockOps)
    budget = StepBudget(inter_token_s=0.1, max_gap_s=0.25, prompt_only_s=0.5, max_tokens=8)
    scheduler = Scheduler(PagedKVManager(backend.ops, geometry, bytes_per_token=8), budget, max_running=4)
    first, second = (make_request("s" * shared + name * 40) for name in "ab")
    scheduler.requests.add(first)
    scheduler.requests.add(second)
    scheduler.schedule()
    assert first.state is RequestState.PROCESSING
    assert (second.state is RequestState.PENDING) == waits
    outputs = run(scheduler, backend)
    assert answer(outputs, first) == reference(first) and answer(outputs, second) == reference(second)


def test_decodes_come_first_and_prompts_are_cut(layout: str) -> None:
    backend = FakeBackend()
    scheduler = make_scheduler(backend, layout, max_step_tokens=16)
    talker = make_request("hi", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    scheduler.requests.add(talker)
    step(scheduler, backend)
    long = make_request("x" * 200)
    scheduler.requests.add(long)
    plans: list[StepPlan] = []
    stepper = Stepper(backend, scheduler, timer=lambda: 0.0, on_computed=plans.append)
    for _ in range(5):
        stepper.advance()
        assert plans[-1].decode_rows == 1 and plans[-1].sequences[0].request is talker
        assert plans[-1].prompt_tokens <= 16
    assert answer(run(scheduler, backend), long) == reference(long)


def test_a_short_prompt_passes_a_long_one(layout: str) -> None:
    backend = FakeBackend()
    scheduler = make_scheduler(backend, layout, max_step_tokens=16)
    long, short = make_request("l" * 220), make_request("short")
    scheduler.requests.add(long)
    step(scheduler, backend)
    scheduler.requests.add(short)
    step(scheduler, backend)
    assert short.first_token_at is not None and long.first_token_at is None
    others = [make_request(f"{n} is short too") for n in range(6)]
    before = long.sequences[0].num_computed
    for other in others:
        scheduler.requests.add(other)
        step(scheduler, backend)
    assert long.sequences[0].num_computed > before


def test_priorities_and_ageing_order_the_queue() -> None:
    backend = FakeBackend()
    scheduler = make_scheduler(backend, running=1, ageing_s=10.0)
    urgent = make_request("urgent", priority=-1, arrival=5.0)
    normal = make_request("normal", arrival=0.0)
    aged = make_request("aged", priority=1, arrival=-20.0)
    for request in (normal, urgent, aged):
        scheduler.requests.add(request)
    ends = [o.request_id for o in run(scheduler, backend) if o.reason is not None]
    assert ends == [aged.id, urgent.id, normal.id]


def test_preemption_recomputes_and_nothing_changes() -> None:
    backend = FakeBackend()
    scheduler = make_scheduler(backend, "paged", tokens=64)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    requests = [make_request(f"{n}{n}{n}{n}", params, max_context=64) for n in range(3)]
    for request in requests:
        scheduler.requests.add(request)
    outputs = run(scheduler, backend)
    assert scheduler.requests.preemptions > 0
    for request in requests:
        assert answer(outputs, request) == reference(request)


def test_answers_to_one_prompt_share_it(layout: str) -> None:
    backend = FakeBackend()
    scheduler = make_scheduler(backend, layout, running=4)
    params = SamplingParams(n=6, temperature=1.0, seed=11, max_tokens=10)
    request = make_request("many answers to this one", params)
    scheduler.requests.add(request)
    outputs = run(scheduler, backend)
    for index in range(6):
        assert answer(outputs, request, index) == reference(request, index)
    assert len({tuple(answer(outputs, request, index)) for index in range(6)}) > 1
    assert request.state is RequestState.COMPLETED


def test_limits_end_an_answer(layout: str) -> None:
    backend = FakeBackend()
    scheduler = make_scheduler(backend, layout)
    by_length = make_request("abc", SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    by_context = make_request("a" * 250, SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
    first = reference(make_request("abc"))[0]
    by_stop_token = make_request("abc", SamplingParams(temperature=0.0, stop_token_ids=[first]))
    for request in (by_length, by_context, by_stop_token):
        scheduler.requests.add(request)
    ends = {o.request_id: o for o in run(scheduler, backend) if o.reason is not None}
    assert ends[by_length.id].reason is FinishReason.LENGTH and by_length.generated == 5
    assert ends[by_context.id].reason is FinishReason.LENGTH and by_context.generated == CONTEXT - 250
    assert ends[by_stop_token.id].reason is FinishReason.STOP
    assert ends[by_stop_token.id].stop_token == first


def test_deadlines_end_queued_and_running_requests(layout: str) -> None:
    now = [0.0]
    backend = FakeBackend()
    scheduler = make_scheduler(backend, layout, running=1, clock=lambda: now[0])
    running, queued = (make_request("zz", timeout_s=5.0) for _ in range(2))
    scheduler.requests.add(running)
    step(scheduler, backend)
    scheduler.requests.add(queued)
    scheduler.requests.expire()
    assert scheduler.requests.take_outputs() == []
    now[0] = 5.0
    scheduler.requests.expire()
    ends = scheduler.requests.take_outputs()
    assert {o.request_id for o in ends} == {running.id, queued.id}
    assert all(o.reason is FinishReason.TIMEOUT and isinstance(o.error, RequestTimeoutError) for o in ends)
    assert not scheduler.requests.has_work and scheduler.kv.usage().referenced == 0
    assert running.state is RequestState.TIMEOUT


def test_a_cancelled_twin_leaves_the_others_alone(layout: str) -> None:
    backend = FakeBackend()
    scheduler = make_scheduler(backend, layout)
    request = make_request("one of three", SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6))
    scheduler.requests.add(request)
    scheduler.requests.finish(request, 0, FinishReason.CANCELLED)
    outputs = run(scheduler, backend)
    for index in (1, 2):
        assert answer(outputs, request, index) == reference(request, index)


def test_unusable_logits_fail_one_request_only(layout: str) -> None:
    backend = FakeBackend()
    scheduler = make_scheduler(backend, layout)
    good, bad = make_request("good"), make_request("bad")
    scheduler.requests.add(good)
    scheduler.requests.add(bad)
    compute = backend.collect

    def spoiled(chunks: Sequence[Chunk]) -> StepResult:
        result = compute(chunks)
        assert result.logits is not None
        result.logits[[chunk.tokens == bad.prompt for chunk in chunks]] = float("nan")
        return result

    backend.collect = spoiled  # type: ignore[method-assign]
    outputs = step(scheduler, backend)
    ended = [o for o in outputs if o.reason is not None]
    assert [o.request_id for o in ended] == [bad.id] and isinstance(ended[0].error, BackendError)
    assert answer(outputs + run(scheduler, backend), good) == reference(good)


def test_a_prompt_that_is_preempted_half_way_counts_once() -> None:
    """Its tokens are those of one prompt, and what it finds of its own work was not cached."""
    backend = FakeBackend()
    scheduler = make_scheduler(backend, "paged", tokens=44, max_step_tokens=16)
    other = make_request("abc", SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True))
    long = make_request("l" * 40, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), priority=1)
    scheduler.requests.add(long)
    outputs = step(scheduler, backend)
    scheduler.requests.add(other)
    while not long.preemptions:
        computed = long.sequences[0].num_computed
        outputs += step(scheduler, backend)
    assert 16 <= computed < 40, "it was not half way"
    outputs += run(scheduler, backend)
    assert answer(outputs, long) == reference(long)
    assert scheduler.requests.prompt_tokens == 43 and scheduler.requests.cached_tokens == 0
    assert long.hit.tokens == 0 and {o.hit.tokens for o in outputs} == {0}
    usage = scheduler.kv.usage()
    assert (usage.query_tokens, usage.hit_tokens) == (43, 0)


def test_answers_that_queue_up_count_their_prompt_once(layout: str) -> None:
    backend = FakeBackend()
    scheduler = make_scheduler(backend, layout, running=2)
    request = make_request("many answers to this", SamplingParams(n=5, temperature=1.0, seed=1, max_tokens=4))
    scheduler.requests.add(request)
    scheduler.requests.finish(request, 0, FinishReason.CANCELLED)
    run(scheduler, backend)
    assert scheduler.requests.prompt_tokens == 20 and scheduler.requests.cached_tokens == 0
    usage = scheduler.kv.usage()
    assert (usage.query_tokens, usage.hit_tokens) == (20, 0)


def test_who_waits_for_room_counts_once_however_long() -> None:
    backend = FakeBackend()
    scheduler = make_scheduler(backend, "paged", tokens=64)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for letter in "ab":
        scheduler.requests.add(make_request(letter * 36, params, max_context=64))
    run(scheduler, backend)
    assert scheduler.kv.usage().allocation_failures == 1


def test_what_can_never_fit_ends_with_its_size(layout: str) -> None:
    backend = FakeBackend()
    scheduler = make_scheduler(backend, "paged", tokens=32)
    impossible, possible = make_request("x" * 40, max_context=64), make_request("fits")
    scheduler.requests.add(impossible)
    scheduler.requests.add(possible)
    outputs = run(scheduler, backend)
    (end,) = [o for o in outputs if o.request_id == impossible.id]
    assert isinstance(end.error, BackendError) and "no room in the KV cache for 40 tokens" in str(end.error)
    assert answer(outputs, possible) == reference(possible)


def test_a_chooser_that_fails_ends_its_own_answer_only(layout: str) -> None:
    """The others have drawn already; their tokens count."""
    backend = FakeBackend()
    scheduler = make_scheduler(backend, layout)
    params = SamplingParams(temperature=1.0, seed=8, max_tokens=6)
    requests = [make_request(f"number {n}", params) for n in range(3)]
    for request in requests:
        scheduler.requests.add(request)
    outputs = step(scheduler, backend)

    def fail(logits: object, mask: object) -> None:
        raise ArithmeticError("cannot choose")

    bad = requests[1].sequences[0]
    bad.chooser = type("Chooser", (), {"choose": staticmethod(fail), "constraint": None})()
    outputs += run(scheduler, backend)
    (end,) = [o for o in outputs if o.request_id == requests[1].id and o.reason is not None]
    assert end.reason is FinishReason.ERROR and "ArithmeticError: cannot choose" in str(end.error)
    for request in (requests[0], requests[2]):
        assert answer(outputs, request) == reference(request)


def test_a_queue_takes_everybody_once_and_lets_anybody_go() -> None:
    queue = WaitingQueue(10.0)
    first, second, third = (make_request(name, arrival=float(n)).sequences[0] for n, name in enumerate("abc"))
    for sequence in (second, first, first):
        queue.push(sequence)
    queue.discard(third)
    assert len(queue) == 2 and list(queue) == [second, first]
    queue.discard(first)
    queue.discard(first)
    queue.push(first)
    assert [queue.pop(), queue.pop(), queue.pop()] == [first, second, None]
    assert len(queue) == 0


def test_a_backend_that_computes_ahead_gives_the_same_answers_in_hardly_more_steps() -> None:
    answers: list[list[list[int]]] = []
    steps: list[int] = []
    for backend in (FakeBackend(), PipelinedFake()):
        scheduler = make_scheduler(backend, "paged", running=8)
        stepper = Stepper(backend, scheduler, timer=lambda: 0.0)
        params = SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True, logprobs=2)
        requests = [make_request(f"number {n}", params) for n in range(4)]
        for request in requests:
            scheduler.requests.add(request)
        outputs: list[Output] = []
        while scheduler.requests.has_work or stepper.under_way:
            stepper.advance()
            outputs += scheduler.requests.take_outputs()
        answers.append([answer(outputs, request) for request in requests])
        steps.append(stepper.steps)
    assert answers[0] == answers[1]
    assert steps[0] <= steps[1] <= steps[0] + 2


@pytest.mark.parametrize("lost", range(6))
def test_a_step_that_is_lost_after_it_was_submitted_changes_no_answer(lost: int) -> None:
    """The backend may have gone on to the lost step's tokens: nothing may follow what only it knows."""
    backend = PipelinedFake()
    scheduler = make_scheduler(backend, "paged", running=8)
    stepper = Stepper(backend, scheduler, timer=lambda: 0.0)
    submit, calls = backend.submit, 0

    def failing(chunks: Sequence[Chunk]) -> int:
        nonlocal calls
        calls += 1
        ticket = submit(chunks)
        if calls == lost + 1:
            raise StepAbortedError("cancelled")
        return ticket

    backend.submit = failing  # type: ignore[method-assign]
    request = make_request("a prompt", SamplingParams(temperature=0.0, max_tokens=6, n=2, ignore_eos=True))
    scheduler.requests.add(request)
    outputs: list[Output] = []
    while scheduler.requests.has_work or stepper.under_way:
        stepper.advance()
        outputs += scheduler.requests.take_outputs()
    assert calls > lost and answer(outputs, request) == reference(request)

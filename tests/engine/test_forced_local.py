"""Long runs of forced tokens where layers with a window have room for few tokens at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cllm.backends.base import Chunk
from cllm.backends.fake import FakeBackend
from cllm.engine.budget import StepBudget
from cllm.engine.params import SamplingParams
from cllm.engine.scheduler import Scheduler
from cllm.engine.stepper import Stepper
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.sequence import STATE_BLOCKS
from kv_kit import assert_states, paged
from pipelined_backend import PipelinedFake
from structured_kit import alone, by_schema, constrained

NAMES = ["x" * 60, "y" * 150]
RECORD = by_schema(
    {
        "type": "object",
        "properties": {name: {"type": "string", "maxLength": 3} for name in NAMES},
        "required": NAMES,
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize("kind", [FakeBackend, PipelinedFake])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("blocks", [72, 82, 300])
def test_more_forced_tokens_than_there_is_ever_room_for(kind: type[FakeBackend], n: int, blocks: int) -> None:
    answer_in_parts(*paged(blocks, window=5, ahead=8, kind=kind), n)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("blocks", [92, 110, 300])
@pytest.mark.parametrize("window", [0, 5])
def test_steps_of_forced_tokens_end_where_a_state_is_due(window: int, n: int, blocks: int) -> None:
    answer_in_parts(*paged(blocks, window=window, ahead=8, states=2), n)


def answer_in_parts(backend: FakeBackend, kv: PagedKVManager, n: int) -> None:
    budget = StepBudget(inter_token_s=0.1, max_gap_s=0.25, prompt_only_s=0.5, max_tokens=32)
    scheduler = Scheduler(kv, budget, max_running=4)
    stepper = Stepper(backend, scheduler, timer=lambda: 0.0)
    request = constrained("who?", RECORD, SamplingParams(temperature=0.0, max_tokens=240, n=n))
    scheduler.requests.add(request)
    while scheduler.requests.has_work or stepper.under_way:
        stepper.advance()
        kv.check()
        assert_states(backend, kv)
        for sequence in scheduler.requests.running:
            states = sequence.state
            assert states is None or sequence.num_computed - states.known_at_end(4) < 4 * STATE_BLOCKS
        assert stepper.steps < 60 and scheduler.requests.preemptions < 5
    outputs = scheduler.requests.take_outputs()
    for answer in range(n):
        tokens = [out.token_id for out in outputs if out.answer == answer and out.token_id is not None]
        assert tokens == alone(request, RECORD, answer) and len(tokens) > 200


def test_forced_tokens_behind_windows_that_are_computed_again_leave_what_full_layers_have() -> None:
    """Who was preempted has as few tokens to compute as are forced, some of them only for its windows."""
    backend, kv = paged(300, window=5, ahead=8, reach=4)
    budget = StepBudget(inter_token_s=0.1, max_gap_s=0.25, prompt_only_s=0.5, max_tokens=32)
    scheduler = Scheduler(kv, budget, max_running=4)
    stepper = Stepper(backend, scheduler, timer=lambda: 0.0)
    request = constrained("who?", RECORD, SamplingParams(temperature=0.0, max_tokens=240))
    (sequence,), local = request.sequences, kv.arena.local
    scheduler.requests.add(request)
    rebuilt = 0

    def look(chunks: Sequence[Chunk]) -> None:
        nonlocal rebuilt
        rebuilt += sequence.rebuilt > 0
        assert [chunk.known for chunk in chunks] == [sequence.rebuilt]

    backend.faults.before_step = look
    while scheduler.requests.has_work:
        stepper.advance()
        if sequence.forced > 30 and len(sequence.tokens) - sequence.num_computed > 40 and not rebuilt:
            scheduler.requests.preempt(sequence)
            assert local is not None
            for snapshot in list(local.policy):
                local.drop(snapshot)
        kv.check()
    tokens = [out.token_id for out in scheduler.requests.take_outputs() if out.token_id is not None]
    assert rebuilt and tokens == alone(request, RECORD)

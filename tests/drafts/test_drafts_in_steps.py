"""What a step with drafts does beside the answers: whose memory it takes, what it counts, whom it tells."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cllm import AsyncLLM, SamplingParams
from cllm.backends.base import Chunk
from cllm.backends.fake import FakeBackend
from cllm.config import load_config
from cllm.engine.plan import Drafting
from cllm.engine.request import Request
from cllm.engine.request import Sequence as Answer
from cllm.engine.stepper import Stepper
from cllm.errors import BackendError, StepAbortedError
from cllm.kv.paged.manager import PagedKVManager
from draft_kit import LONG, Lone, ScriptedDrafter, by_answer, draft_with, oracle
from engine_kit import LAYOUTS, make_request, make_scheduler, reference
from pipelined_backend import PipelinedFake
from step_of import rows_of


def last_steps(lone: Lone, request: Request, count: int) -> None:
    """Until the answer has so many tokens."""
    lone.scheduler.requests.add(request)
    while request.generated < count:
        lone.step()


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_nobody_is_preempted_nor_anything_evicted_for_a_draft(kind: str) -> None:
    """Three answers whose tokens fit exactly: what drafts took is there when a token needs it."""

    def run(drafter: ScriptedDrafter | None) -> Lone:
        lone = Lone("paged", drafter, tokens=36, running=3)
        lone.run(*(make_request(letter * 4, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
                   for letter in "abc"))  # fmt: skip
        return lone

    plain, drafted = run(None), run(oracle((kind,)))
    assert drafted.scheduler.requests.drafted_tokens > 0
    for lone in (plain, drafted):
        usage = lone.scheduler.kv.usage()
        assert lone.scheduler.requests.preemptions == usage.evictions == usage.allocation_failures == 0


@pytest.mark.parametrize("kind", ["right", "half", "wrong"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_between_steps_is_that_of_the_tokens(layout: str, kind: str) -> None:
    lone = Lone(layout, oracle((kind,)))
    request = make_request("some prompt", LONG)
    lone.scheduler.requests.add(request)
    (sequence,) = request.sequences
    while lone.scheduler.requests.has_work:
        lone.step()
        if sequence.running and request.generated:
            assert sequence.num_computed == len(sequence.tokens) - 1
            if layout == "paged":
                assert len(sequence.blocks) == -(-sequence.num_computed // 4)
            else:
                lone.scheduler.kv.verify(sequence)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cache_has_what_it_has_without_drafts(layout: str) -> None:
    """The same names of blocks, in the tree of prefixes and in its events, and nothing that was drafted wrong."""

    def run(drafter: ScriptedDrafter | None) -> set[bytes]:
        lone = Lone(layout, drafter)
        lone.run(*(make_request(prompt, LONG) for prompt in ("one prompt", "one prompt more", "another")))
        names = lone.scheduler.kv.held_names()[1]
        assert lone.scheduler.kv.usage().blocks_removed == 0
        assert lone.scheduler.kv.usage().blocks_stored == len(names)
        return names

    assert run(oracle(("right", "half", "wrong", "ends"))) == run(None)


@pytest.mark.parametrize("fails", [BackendError("a fault"), StepAbortedError("somebody was cancelled")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_that_did_not_happen_leaves_no_drafts(layout: str, fails: Exception) -> None:
    lone = Lone(layout, oracle())
    request = make_request("a prompt", LONG)
    last_steps(lone, request, 3)
    computed: list[list[int]] = []

    def fail_once(chunks: Sequence[Chunk]) -> None:
        computed.append([len(chunk.tokens) for chunk in chunks])
        if len(computed) == 1:
            lone.backend.memory.write(chunks[0], np.asarray(chunks[0].tokens))
            raise fails

    lone.backend.faults.before_step = fail_once
    (sequence,) = request.sequences
    before = sequence.num_computed
    lone.stepper.advance()
    lone.scheduler.kv.check()
    assert computed[0] == [9]
    if isinstance(fails, StepAbortedError):
        assert len(computed) == 1 and sequence.num_computed == before
        if layout == "slots":
            lone.scheduler.kv.verify(sequence)
    else:  # alone, without drafts
        assert computed[1:] == [[1]] and sequence.num_computed == before + 1
    if layout == "paged":
        assert len(sequence.blocks) == (before + 1 + 3) // 4
    lone.run()
    assert sequence.tokens.tolist()[sequence.n_prompt :] == reference(request)


def test_drafts_are_as_long_as_there_is_room() -> None:
    """Two blocks are free: one for the next token, and the other for what is drafted behind it."""
    lone = Lone("paged", oracle(longest=64), tokens=32, running=1)
    last_steps(lone, make_request("abcd", SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)), 1)
    kv = lone.scheduler.kv
    assert isinstance(kv, PagedKVManager)
    assert kv.arena.pool.extend(kv.arena.pool.free - 2) is not None
    plan = lone.scheduler.schedule()
    assert [(len(chunk.tokens), chunk.wanted_logits) for chunk in plan.chunks] == [(8, 8)]
    assert (plan.decode_rows, plan.drafted, plan.rows, kv.arena.pool.free) == (1, 7, 8, 0)


def test_memory_that_is_to_be_given_back_is_not_for_drafts() -> None:
    """Other models are to have three of the five blocks that are free."""
    lone = Lone("paged", oracle(longest=64), tokens=32, running=1)
    request = make_request("abcd", SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    last_steps(lone, request, 1)
    kv, sequence = lone.scheduler.kv, request.sequences[0]
    assert isinstance(kv, PagedKVManager)
    assert kv.arena.pool.extend(kv.arena.pool.free - 5) is not None
    kv.tables._resizer = SimpleNamespace(pending=3, want=lambda blocks: False)  # type: ignore[assignment]
    assert kv.grow_within_free(sequence, 64) == sequence.room - sequence.end == 8
    kv.tables._resizer = SimpleNamespace(pending=9, want=lambda blocks: False)  # type: ignore[assignment]
    kv.truncate(sequence, sequence.num_computed)
    free = kv.arena.pool.free
    assert kv.grow_within_free(sequence, 64) == 0 and kv.arena.pool.free == free


# -- which rows ------------------------------------------------------------------------------------------------------


def test_a_prompt_has_no_drafts_and_an_answer_none_beyond_its_length() -> None:
    for layout in LAYOUTS:
        lone = Lone(layout, oracle(longest=64))
        request = make_request("prompt", SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
        steps = lone_chunks(lone, request)
        assert steps == [(6, 1), (8, 8)]
        request = make_request("x", SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        assert lone_chunks(lone, request) == [(1, 1), (1, 1)]


def lone_chunks(lone: Lone, request: Request) -> list[tuple[int, int]]:
    """Tokens and wanted rows of each of its chunks."""
    seen: list[tuple[int, int]] = []
    lone.backend.faults.before_step = lambda chunks: seen.extend(
        (len(chunk.tokens), chunk.wanted_logits) for chunk in chunks
    )
    lone.run(request)
    return seen


def test_a_step_that_leaves_rows_out_has_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cllm.engine.planner.FEW_ROWS", 2)
    lone = Lone("paged", oracle(), running=3)
    request = make_request("abc", replace(LONG, n=3))
    lone.scheduler.requests.add(request)
    while len(lone.scheduler.requests.running) < 3 or lone.scheduler.requests.generated_tokens < 6:
        lone.step()
    assert lone.scheduler.requests.drafted_tokens > 0
    monkeypatch.setattr(lone.scheduler.budget, "rows_at_once", lambda rows, requests: 2)
    plan = lone.scheduler.schedule()
    assert plan.decode_rows == 2 and plan.drafted == 0


def test_what_a_step_may_have_goes_round() -> None:
    """With room for few drafts, not always the same ones get them."""
    drafter = oracle(("wrong",), allowances=(3,))
    lone = Lone("paged", drafter, running=3)
    requests = [make_request(letter, LONG) for letter in "abc"]
    drafted: dict[str, int] = {request.id: 0 for request in requests}

    def note(sequence: Answer, most: int) -> array[int]:
        draft = propose(sequence, most)
        drafted[sequence.request.id] += len(draft)
        return draft

    propose = drafter.propose
    drafter.propose = note  # type: ignore[method-assign]
    lone.run(*requests)
    assert all(drafted.values()) and max(count for _, count, _ in drafter.steps) == 3


def test_the_drafter_hears_of_prompts_and_of_every_step() -> None:
    told: list[tuple[int, bool]] = []
    drafter = oracle()
    drafter.begin_step = lambda rows, wait: told.append((rows, wait)) or 0  # type: ignore[method-assign,func-returns-value]
    lone = Lone("paged", drafter, running=2)
    last_steps(lone, make_request("first", LONG), 3)
    assert told and not any(wait for _, wait in told)
    for letter in "xy":
        lone.scheduler.requests.add(make_request(letter * 60, LONG))
    lone.step()
    assert told[-1] == (1, True)  # one is admitted, the other has to wait
    assert len(drafter.steps) == lone.stepper.steps


def test_what_is_promised_of_a_step_under_way_is_what_lands() -> None:
    lone = Lone("paged", oracle(longest=3))
    request = make_request("prompt", LONG)
    last_steps(lone, request, 2)
    plan = lone.scheduler.schedule()
    assert plan.drafted == 3
    lone.scheduler.planner.launch(plan)
    assert request.sequences[0].promised == 4
    assert plan.settle(0) and request.sequences[0].promised == request.sequences[0].submitted == 0


# -- what is counted -------------------------------------------------------------------------------------------------


def test_tokens_that_come_together_have_no_time_between_them() -> None:
    lone = Lone("paged", oracle(longest=4))
    request = make_request("prompt", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    lone.scheduler.requests.add(request)
    arrivals: list[int] = []
    while lone.scheduler.requests.has_work:
        arrivals.append(sum(output.token_id is not None for output in lone.step()))
    assert max(arrivals) > 1 and sum(arrivals) == 12
    expected = [gap for count in arrivals[1:] for gap in [1.0, *[0.0] * (count - 1)]]
    assert list(request.gaps) == expected


def test_observers_hear_of_all_rows_and_the_budget_of_drafts_apart() -> None:
    """Drafts are cheaper than an answer's rows: taken for those, they would make them seem to cost less."""
    drafter = oracle(longest=5)
    lone = Lone("slots", drafter)
    told: list[tuple[int, int]] = []
    observed: list[tuple[int, int, int]] = []
    observe = lone.scheduler.budget.observe

    def note(prompt_tokens: int, rows: int, seconds: float, pairs: float, drafted: int) -> None:
        observed.append((prompt_tokens, rows, drafted))
        observe(prompt_tokens, rows, seconds, pairs, drafted)

    class Observer:
        def on_step(self, seconds: float, prompt_tokens: int, decode_tokens: int) -> None:
            told.append((prompt_tokens, decode_tokens))

        def on_finished(self, record: object) -> None: ...

        def on_eviction(self, count: int, seconds: float) -> None: ...

    lone.scheduler.budget.observe = note  # type: ignore[method-assign]
    lone.scheduler.requests.observers.append(Observer())
    lone.run(make_request("prompt", LONG))
    assert told == [(prompts, rows + drafted) for rows, drafted, prompts in drafter.steps]
    assert observed == [(prompts, rows, drafted) for rows, drafted, prompts in drafter.steps]
    assert sum(map(sum, told)) == lone.backend.computed_tokens


# -- drafters and backends that cannot -------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["begin_step", "propose", "observe_step", "end"])
def test_a_drafter_that_fails_is_not_asked_again(call: str, caplog: pytest.LogCaptureFixture) -> None:
    drafter = oracle(("half",))
    calls: list[int] = []

    def fail(*facts: object) -> Any:
        calls.append(1)
        raise KeyError("a drafter's fault")

    setattr(drafter, call, fail)
    lone = Lone("slots", drafter)
    request = make_request("prompt", LONG)
    with caplog.at_level(logging.ERROR, "cllm.engine"):
        lone.scheduler.requests.add(request)
        while lone.scheduler.requests.has_work:
            lone.step()
    assert len(calls) == 1 and lone.scheduler.drafting is not None and not lone.scheduler.drafting.alive
    assert [record.message for record in caplog.records] == ["drafting failed; continuing without drafts"]
    (answer,) = by_answer(lone.outputs).values()
    assert [told[0] for told in answer] == reference(request)


def test_a_backend_that_computes_ahead_takes_none() -> None:
    backend = PipelinedFake()
    scheduler = make_scheduler(backend, drafting=Drafting(oracle(), backend.traits.most_drafts))
    stepper = Stepper(backend, scheduler, timer=lambda: 0.0)
    request = make_request("prompt", LONG)
    scheduler.requests.add(request)
    while scheduler.requests.has_work or stepper.under_way:
        stepper.advance()
    assert scheduler.requests.drafted_tokens == 0
    assert request.sequences[0].tokens.tolist()[request.sequences[0].n_prompt :] == reference(request)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_is_that_of_its_token_alone(layout: str) -> None:
    lone, alone = Lone(layout), FakeBackend()
    make_scheduler(alone, layout)
    tokens = array("i", list(b"some tokens to compute"))
    blocks = list(range(8))
    one_by_one = [rows_of(alone, [Chunk(tokens[i : i + 1], i, 1, blocks=blocks)])[0] for i in range(len(tokens))]
    together = rows_of(
        lone.backend,
        [
            Chunk(tokens[:3], 0, 0, blocks=blocks),
        ],
    )
    assert together.shape == (0, 320)
    together = rows_of(lone.backend, [Chunk(tokens[3:], 3, 10, blocks=blocks)])
    assert (together == one_by_one[-10:]).all()


# -- text ------------------------------------------------------------------------------------------------------------


async def test_a_stop_string_among_accepted_tokens_ends_the_answer_there() -> None:
    config = load_config(None, {"backend.type": "fake"}).config

    async def ask(drafts: bool, stop: tuple[str, ...]) -> tuple[Any, ...]:
        llm = AsyncLLM(config)
        await llm.start()
        try:
            assert llm.executor.engine is not None
            scheduler = llm.executor.engine.scheduler
            most = llm.executor.engine.backend.traits.most_drafts
            draft_with(scheduler, Drafting(oracle(longest=16), most) if drafts else None)
            params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, stop=stop, logprobs=1)
            generation = llm.submit([104, 105, 33], params)
            deltas = [delta async for delta in generation]
            await asyncio.sleep(0.05)  # what comes after the end does not count
            assert (scheduler.requests.accepted_drafts > 0) == drafts
            ids = [token for delta in deltas for token in delta.token_ids]
            logprobs = [each for delta in deltas for each in delta.logprobs or []]
            text = "".join(delta.text for delta in deltas)
            return text, ids, logprobs, deltas[-1].finish_reason, deltas[-1].stop_reason, generation.completion_tokens
        finally:
            await llm.shutdown(0)

    whole = await ask(False, ())
    assert whole == await ask(True, ())
    text = whole[0]
    for at in (5, 17, 30):
        stop = (text[at : at + 2],)
        plain = await ask(False, stop)
        assert plain[3:5] == ("stop", stop[0]) and plain[5] < 48
        assert await ask(True, stop) == plain

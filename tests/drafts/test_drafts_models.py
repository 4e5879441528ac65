"""Drafts on real backends: the native engine's answers are the same bits, llama.cpp's the same within its rounding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import starmap
from typing import Any

import pytest

from cllm import LLM, SamplingParams
from cllm.drafts.drafter import Drafter
from cllm.engine.plan import Drafting
from cllm.engine.request import Request
from cllm.engine.scheduler import Scheduler
from cllm.generation import Completion
from draft_kit import ScriptedDrafter, draft_with
from thorough import exhaustive, slow, some

pytestmark = [slow, pytest.mark.model]

SETTINGS: dict[str, Any] = {"resources.max_context_length": 512, "resources.kv_cache_max_memory_mb": 100}
SUBJECTS = ["the sea", "bread", "winter"]
PROMPTS = [
    f"Write two or three sentences about {subject}, and say why so many people like it now." for subject in SUBJECTS
]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=28, ignore_eos=True, logprobs=3),
    "penalised": SamplingParams(
        temperature=0, max_tokens=28, logprobs=2, repetition_penalty=1.2, frequency_penalty=0.4, min_tokens=20
    ),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=28, logprobs=1),
    "two answers": SamplingParams(temperature=1.0, top_k=40, seed=3, max_tokens=20, n=2, logprobs=0),
}


def scheduler_of(llm: LLM) -> Scheduler:
    engine = llm._llm.executor.engine
    assert engine is not None
    return engine.scheduler


def empty_cache(llm: LLM) -> None:
    engine = llm._llm.executor.engine
    assert engine is not None

    def reset() -> None:
        engine.backend.rebuild()
        engine.scheduler.kv.reset()

    engine.call(reset).result(60)


def bits(answers: Sequence[Completion]) -> list[Any]:
    return [
        (answer.text, answer.finish_reason, [(p.token_id, p.logprob, p.top) for p in answer.logprobs or []])
        for answer in answers
    ]


def draft(llm: LLM, answers: Sequence[Completion], kinds: Sequence[str]) -> ScriptedDrafter:
    """From now on, with what answers to these prompts are known to be."""
    known = {
        (repr(llm._llm.text.tokenizer.encode(prompt)), index): answers[place].token_ids
        for place, (prompt, index) in enumerate(places(len(answers)))
    }

    def expected(request: Request, index: int) -> Sequence[int]:
        return known[repr(request.prompt.tolist()), index]

    engine = llm._llm.executor.engine
    assert engine is not None
    drafter = ScriptedDrafter(expected, kinds, longest=9, vocabulary=49152)
    draft_with(scheduler_of(llm), Drafting(drafter, engine.backend.traits.most_drafts))
    return drafter


def places(answers: int) -> list[tuple[str, int]]:
    each = answers // len(PROMPTS)
    return [(prompt, index) for prompt in PROMPTS for index in range(each)]


def without_drafts(llm: LLM, params: SamplingParams) -> list[Completion]:
    draft_with(scheduler_of(llm), None)
    empty_cache(llm)
    return [answer for prompt in PROMPTS for answer in llm.generate(prompt, params)]


def counts(llm: LLM) -> tuple[int, int]:
    """Drafted tokens, and those that came true."""
    scheduler = scheduler_of(llm)
    return scheduler.requests.drafted_tokens, scheduler.requests.accepted_drafts


@pytest.fixture(scope="module")
def native(request: pytest.FixtureRequest) -> Iterator[LLM]:
    types = {"resources.kv_type_k": request.param, "resources.kv_type_v": request.param}
    with LLM("smollm2", backend="native", settings=SETTINGS | types) as llm:
        yield llm


@exhaustive
@pytest.mark.parametrize(
    ("native", "asked"),
    some([*(("f16", asked) for asked in PARAMS), ("q8_0", "greedy"), ("q4_0", "sampled")], 2),
    indirect=["native"],
)
def test_the_native_engine_gives_the_same_bits(native: LLM, asked: str) -> None:
    """Each alone, then all together in an empty cache, then again with what is left in the cache."""
    params = PARAMS[asked]
    expected = without_drafts(native, params)
    for kinds in (["right"], ["right", "half", "wrong", "ends", "none"]):
        empty_cache(native)
        draft(native, expected, kinds)
        before = counts(native)
        alone = [answer for prompt in PROMPTS[:2] for answer in native.generate(prompt, params)]
        assert bits(alone) == bits(expected[: len(alone)])
        empty_cache(native)
        assert bits(native.generate(PROMPTS, params, progress=False)) == bits(expected)
        again = native.generate(PROMPTS, params, progress=False)
        assert bits(again) == bits(expected) and all(answer.cached_tokens for answer in again)
        drafted, accepted = (after - count for after, count in zip(counts(native), before, strict=True))
        assert 0 < accepted <= drafted and (accepted < drafted or kinds == ["right"])
        scheduler_of(native).kv.check()


@pytest.mark.parametrize("native", ["q8_0"], indirect=True)
def test_what_was_drafted_right_is_shared_with_others(native: LLM) -> None:
    """Somebody goes on in the middle of an answer, with its K/V as they were computed as drafts."""
    params = PARAMS["greedy"]
    expected = without_drafts(native, params)
    empty_cache(native)
    draft(native, expected, ["right", "half"])
    native.generate(PROMPTS, params, progress=False)
    draft_with(scheduler_of(native), None)
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        ids = [*native._llm.text.tokenizer.encode(prompt), *answer.token_ids[:18]]
        (rest,) = native.generate([ids], replace(params, max_tokens=10))
        assert rest.cached_tokens == (len(ids) - 1) // 16 * 16
        assert bits([rest])[0][2] == bits([answer])[0][2][18:]


@pytest.fixture(scope="module")
def llama() -> Iterator[LLM]:
    settings = SETTINGS | {
        "backend.llama_cpp.n_seq_max": 4,
        "backend.llama_cpp.n_batch": 64,
        "backend.llama_cpp.n_ubatch": 64,
    }
    with LLM("smollm2", backend="llama_cpp", settings=settings) as llm:
        yield llm


@pytest.mark.parametrize("kinds", [["right"], ["wrong", "half", "ends"]])
def test_llama_cpp_gives_the_same_tokens(llama: LLM, kinds: list[str]) -> None:
    """Of a greedy answer, whose tokens are hardly ever as likely as others."""
    params = PARAMS["greedy"]
    expected = without_drafts(llama, params)
    draft(llama, expected, kinds)
    empty_cache(llama)
    _, before = counts(llama)
    alone = [answer for prompt in PROMPTS for answer in llama.generate(prompt, params)]
    together = llama.generate(PROMPTS, params, progress=False)
    assert counts(llama)[1] > before
    for answers in (alone, together):
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
        for logprob, other in starmap(pairs_of, zip(answers, expected, strict=True)):
            assert logprob == pytest.approx(other, abs=0.05)
    assert scheduler_of(llama).faults.position_mismatches == 0
    scheduler_of(llama).kv.check()


def pairs_of(answer: Completion, other: Completion) -> tuple[list[float], list[float]]:
    return [p.logprob for p in answer.logprobs or []], [p.logprob for p in other.logprobs or []]


class Willing(Drafter):
    """The real one, to which rows beside others cost nothing: it drafts whatever it finds."""

    def observe_step(self, rows: int, drafted: int, seconds: float, prompt_tokens: int) -> None:
        super().observe_step(rows, drafted, 0.01, prompt_tokens)


QUOTE = "Copy this line three times: the quick brown fox jumps over the lazy dog, and the dog sleeps on.\n"
LINE = "the quick brown fox jumps over the lazy dog, and the dog sleeps on.\n"


@exhaustive
@pytest.mark.parametrize("native", ["f16"], indirect=True)
@pytest.mark.parametrize("asked", some(PARAMS, 2))
def test_what_is_looked_up_changes_no_answer(native: LLM, asked: str) -> None:
    params = replace(PARAMS[asked], max_tokens=40)
    prompts = [QUOTE + LINE * 2 + LINE[:9], QUOTE + LINE[:20]]
    scheduler, engine = scheduler_of(native), native._llm.executor.engine
    assert engine is not None

    def ask() -> list[Any]:
        empty_cache(native)
        alone = [answer for prompt in prompts for answer in native.generate(prompt, params)]
        return bits(alone) + bits(native.generate(prompts, params, progress=False))

    draft_with(scheduler, None)
    expected = ask()
    before = scheduler.requests.drafted_tokens, scheduler.requests.accepted_drafts
    draft_with(scheduler, Drafting(Willing(), engine.backend.traits.most_drafts))
    assert ask() == expected
    assert ask() == expected  # now with recent answers to look up in
    assert scheduler.drafting.alive
    drafted, accepted = scheduler.requests.drafted_tokens - before[0], scheduler.requests.accepted_drafts - before[1]
    assert drafted > 0 and accepted > 0

"""Answers that were cut off go on elsewhere, from the tokens they have, exactly as they would have gone on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cllm.backends.fake import END_TOKEN
from cllm.engine.params import SamplingParams
from cllm.engine.reading import PromptScoring
from cllm.engine.request import FinishReason, Request
from cllm.errors import InvalidRequestError, ShuttingDownError
from cllm.kv.pins import PinMark
from cllm.kv.window import Window
from engine_kit import GREEDY, make_engine, make_request, reference
from resume_kit import LAYOUTS, Server, Told, cut_off, knowing, told
from structured_kit import SCHEMAS, by_schema, grammar
from thorough import sampled

PROMPT = "the same beginning of all of them"
SEED = 11
PENALTIES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 0.7, "presence_penalty": 0.6},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.4},
]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True, "logprobs": 2},
    "drawn": {"temperature": 1.0, "top_p": 0.9, "logprobs": 0},
    "penalised": {"temperature": 0.7, "ignore_eos": True, "repetition_penalty": 1.3, "frequency_penalty": 0.8},
    "biased": {"temperature": 1.0, "logit_bias": {97: 3.0, 98: 2.0}, "min_tokens": 9},
    "stopped": {"temperature": 1.0, "stop_token_ids": list(range(97, 104)), "min_tokens": 6},
    "a late end": {"temperature": 1.0, "logit_bias": {END_TOKEN: 2.0}, "min_tokens": 15, "presence_penalty": 1.0},
}
RECORD = by_schema(
    {
        "type": "object",
        "properties": {
            "the_name_of_the_person": {"type": "string", "maxLength": 5},
            "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        },
        "required": ["the_name_of_the_person", "ages"],
        "additionalProperties": False,
    }
)


def whole(layout: str, request: Request) -> list[Told]:
    """Uninterrupted, alone, uncached."""
    return told(Server(layout).run(request), request)


# -- the same answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_cut_at_every_token(kind: str, layout: str) -> None:
    params = SamplingParams(seed=SEED, max_tokens=20, **KINDS[kind])
    (answer,) = whole(layout, make_request(PROMPT, params))
    assert len(answer) > 5
    for cut in range(len(answer)):
        request = make_request(PROMPT, params, generated=cut_off([answer], [cut]))
        assert told(Server(layout, max_step_tokens=7).run(request), request) == [answer[cut:]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_several_answers_are_cut_at_different_tokens(kind: str, layout: str) -> None:
    params = SamplingParams(seed=SEED, n=3, max_tokens=16, **KINDS[kind])
    answers = whole(layout, make_request(PROMPT, params))
    for first in range(len(answers[0]) + 1):
        cuts = [first, min(3 * first % 16, len(answers[1])), max(len(answers[2]) - first, 0)]
        generated = cut_off(answers, cuts)
        if generated == [None] * 3:
            continue
        request = make_request(PROMPT, params, generated=generated)
        found = told(Server(layout).run(request), request)
        assert found == [answer[cut:] for answer, cut in zip(answers, cuts, strict=True)], f"cut at {cuts}"


@settings(max_examples=sampled(160), deadline=None)
@given(
    data=st.data(),
    layout=st.sampled_from(LAYOUTS),
    letters=st.text("ab", min_size=1, max_size=40),
    n=st.integers(1, 4),
    temperature=st.sampled_from([0.0, 1.0]),
    ends=st.booleans(),
    penalties=st.sampled_from(PENALTIES),
    stops=st.sampled_from([[], [97, 101], list(range(100, 110))]),
    logprobs=st.sampled_from([None, 0, 2]),
    max_tokens=st.integers(1, 30),
    min_tokens=st.sampled_from([0, 0, 1, 12]),
    kept=st.sampled_from([None, None, (0, 1), (1, 8), (4, 12), (9, 33)]),
    drafts=st.booleans(),
    tokens=st.sampled_from([1024, 128]),
    step=st.sampled_from([4, 32]),
    warm=st.sampled_from(["cold", "prompt", "answers"]),
)
def test_whatever_happens(
    data: st.DataObject, layout: str, letters: str, n: int, temperature: float, ends: bool, penalties: dict[str, Any],
    stops: list[int], logprobs: int | None, max_tokens: int, min_tokens: int, kept: tuple[int, int] | None,
    drafts: bool, tokens: int, step: int, warm: str,
) -> None:  # fmt: skip
    params = SamplingParams(
        n=n, temperature=temperature, seed=SEED, ignore_eos=not ends, stop_token_ids=stops, logprobs=logprobs,
        max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), **penalties,
    )  # fmt: skip
    unit = Server(layout).scheduler.kv.unit_tokens
    window = None if kept is None else Window.fit(*kept, unit)

    def ask(**options: Any) -> Request:
        return make_request(letters, params, window=window, **options)

    answers = whole(layout, ask())
    cuts = [data.draw(st.integers(0, len(answer))) for answer in answers]
    generated = cut_off(answers, cuts)
    assume(any(tokens is not None for tokens in generated))
    beside = make_request("ab" * 20, replace(GREEDY, max_tokens=20, ignore_eos=True))

    def known(request: Request, index: int) -> Sequence[int]:
        return reference(request, index) if request is beside else [token for token, *_ in answers[index]]

    drafter = knowing(known) if drafts and layout != "ahead" else None
    server = Server(layout, drafter, tokens=tokens, max_step_tokens=step)
    if warm == "answers":
        server.run(ask())
    elif warm == "prompt":
        server.run(make_request(letters, GREEDY))
    generated_before = server.scheduler.requests.generated_tokens
    request = ask(generated=generated)
    outputs = server.run(beside, request)
    assert told(outputs, request) == [answer[cut:] for answer, cut in zip(answers, cuts, strict=True)]
    assert [token for token, *_ in outputs[beside.id, 0]] == reference(beside)
    fresh = sum(map(len, answers)) - sum(cuts)
    record = server.records[request.id]
    assert server.scheduler.requests.generated_tokens - generated_before == fresh + 20
    assert (record.prompt_tokens, record.generated_tokens) == (len(letters), fresh)
    assert record.cached_tokens <= len(letters)
    assert (record.ttft_s is None) == any(cuts)


# -- grammars ------------------------------------------------------------------------------------------------------


def structured(structure: Any, params: SamplingParams, **options: Any) -> Request:
    return make_request("who?", params, constraint=grammar(structure).start(), **options)


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_structured_answer_is_cut_at_every_token(layout: str, logprobs: int | None) -> None:
    """Also within text that the grammar forces, and before the end that it forces."""
    params = SamplingParams(seed=SEED, max_tokens=120, logprobs=logprobs)
    (answer,) = whole(layout, structured(RECORD, params))
    assert len(answer) > 40 and answer[-1][2] is FinishReason.STOP
    for cut in range(len(answer)):
        request = structured(RECORD, params, generated=cut_off([answer], [cut]))
        assert told(Server(layout).run(request), request) == [answer[cut:]]


@settings(max_examples=sampled(60), deadline=None)
@given(
    data=st.data(),
    schema=SCHEMAS,
    layout=st.sampled_from(LAYOUTS),
    n=st.integers(1, 3),
    penalties=st.sampled_from(PENALTIES),
    logprobs=st.sampled_from([None, 2]),
    max_tokens=st.sampled_from([9, 150]),
    tokens=st.sampled_from([1024, 256]),
    drafts=st.booleans(),
)
def test_structured_answers_of_all_kinds(
    data: st.DataObject, schema: Any, layout: str, n: int, penalties: dict[str, Any], logprobs: int | None,
    max_tokens: int, tokens: int, drafts: bool,
) -> None:  # fmt: skip
    structure = by_schema(schema)
    params = SamplingParams(n=n, seed=SEED, max_tokens=max_tokens, logprobs=logprobs, **penalties)
    answers = whole(layout, structured(structure, params))
    cuts = [data.draw(st.integers(0, len(answer))) for answer in answers]
    generated = cut_off(answers, cuts)
    assume(any(each is not None for each in generated))

    def known(request: Request, index: int) -> Sequence[int]:
        return [token for token, *_ in answers[index]]

    server = Server(layout, knowing(known) if drafts and layout != "ahead" else None, tokens=tokens)
    request = structured(structure, params, generated=generated)
    assert told(server.run(request), request) == [answer[cut:] for answer, cut in zip(answers, cuts, strict=True)]


def test_tokens_that_break_the_structure_are_refused() -> None:
    params = SamplingParams(seed=SEED, n=2)
    begins = list(b'{"the_name')
    for tokens, place in ((list(b"no"), 0), ([*begins, 33], len(begins))):
        with pytest.raises(InvalidRequestError) as error:
            structured(RECORD, params, generated=[begins, tokens])
        assert error.value.param == "generated"
        assert f"generated[1] does not follow the answer's structure: token {place} is {tokens[place]}" in str(
            error.value
        )


# -- what is computed ----------------------------------------------------------------------------------------------


def test_what_the_cache_has_of_the_answer_is_used() -> None:
    """Of the prompt and of what was generated."""
    params = SamplingParams(seed=SEED, max_tokens=40, ignore_eos=True)
    server = Server("paged")
    first = make_request(PROMPT, params)
    answers = told(server.run(first), first)
    generated = cut_off(answers, [30])
    assert server.computed(make_request(PROMPT, params, generated=generated)) <= 10 + 4
    (cached,) = [r.cached_tokens for i, r in server.records.items() if i != first.id]
    assert cached == len(PROMPT)
    assert server.scheduler.requests.cached_tokens == cached
    elsewhere = Server("paged")
    assert elsewhere.computed(make_request(PROMPT, params, generated=generated)) == len(PROMPT) + 39


@pytest.mark.parametrize("generated", [[5, 9, 2], [5, 0, 0], [0, 4, 0]], ids=str)
def test_answers_share_the_prompt(generated: list[int]) -> None:
    prompt, params = "x" * 120, SamplingParams(seed=SEED, n=3, max_tokens=12, ignore_eos=True)
    server = Server("paged")
    answers = whole("paged", make_request(prompt, params))
    request = make_request(prompt, params, generated=cut_off(answers, generated))
    computed = server.computed(request)
    assert computed <= 120 + 3 * 12 + 2 * 4
    assert (request.hit.tokens, server.scheduler.requests.prompt_tokens) == (0, 120)


def test_ended_answers_are_not_run_again() -> None:
    params = SamplingParams(seed=SEED, n=3, max_tokens=10, ignore_eos=True)
    answers = whole("paged", make_request(PROMPT, params))
    request = make_request(PROMPT, params, generated=cut_off(answers, [10, 4, 10]))
    outputs = Server("paged").run(request)
    assert list(outputs) == [(request.id, 1)] and outputs[request.id, 1] == answers[1][4:]


def test_prompts_are_not_scored_again() -> None:
    params = SamplingParams(seed=SEED, max_tokens=6, prompt_logprobs=1, ignore_eos=True)
    for generated, reads in (([[]], 1), ([[97]], 0)):
        request = make_request(PROMPT, params, reading=PromptScoring(1), generated=generated)
        server = Server("paged")
        server.scheduler.requests.add(request)
        while server.scheduler.requests.has_work:
            server.step()
        assert sum(output.read is not None for output in server.scheduler.requests.take_outputs()) == reads


def test_pins_are_made_even_if_the_first_answer_had_ended() -> None:
    mark = PinMark(len(PROMPT))
    params = SamplingParams(seed=SEED, n=2, max_tokens=6, ignore_eos=True)
    server = Server("paged")
    server.run(make_request(PROMPT, params, generated=[None, [97, 98]], pins=[mark]))
    assert mark.pinned_tokens == len(PROMPT) // 4 * 4 and server.scheduler.kv.usage().pins == 1


def test_progress_counts_the_prompt_and_what_is_new() -> None:
    params = SamplingParams(seed=SEED, n=2, max_tokens=30, ignore_eos=True)
    request = make_request("y" * 50, params, generated=[None, list(range(97, 117))])
    server = Server("paged", max_step_tokens=16)
    server.scheduler.requests.add(request)
    seen = []
    while server.scheduler.requests.has_work:
        server.step()
        if server.scheduler.requests.by_id:
            seen.append((request.computed, request.generated))
    assert seen[0] == (16, 0) and (50, 0) in seen and seen[-1] == (50, 9)


# -- ends ----------------------------------------------------------------------------------------------------------


def test_an_answer_of_a_resumed_request_can_be_cancelled() -> None:
    params = SamplingParams(seed=SEED, n=3, max_tokens=10, ignore_eos=True)
    answers = whole("paged", make_request(PROMPT, params))
    request = make_request(PROMPT, params, generated=cut_off(answers, [2, 10, 5]))
    server = Server("paged")
    server.scheduler.requests.add(request)
    for index in (1, 2):  # the first of these had ended before
        server.scheduler.requests.finish(request, index, FinishReason.CANCELLED)
    outputs = server.run()
    assert outputs[request.id, 0] == answers[0][2:]
    assert outputs[request.id, 2] == [(None, None, FinishReason.CANCELLED, None)]
    assert (request.id, 1) not in outputs


def test_a_server_that_shuts_down_refuses_it_only_while_all_of_it_waits() -> None:
    params = SamplingParams(seed=SEED, n=2, max_tokens=10, ignore_eos=True)
    generated = cut_off(whole("paged", make_request(PROMPT, params)), [3, 4])
    engine, _, collector = make_engine(running=1)
    started, waiting = (make_request(PROMPT, params, generated=generated) for _ in range(2))
    engine._accepting = True
    engine.submit(started)
    engine.turn()
    assert len(engine.scheduler.requests.running) == 1 and len(engine.scheduler.requests.waiting) == 1
    engine.submit(waiting)
    engine.begin_stop(1e6)
    while not engine.should_stop:
        engine.turn()
    for index in range(2):
        assert collector.ends[started.id, index].reason is FinishReason.LENGTH
        assert isinstance(collector.ends[waiting.id, index].error, ShuttingDownError)


@pytest.mark.parametrize(
    ("generated", "params", "words", "param"),
    [
        ([[97]], {"seed": None}, "generated needs a seed", "seed"),
        ([[97], [98]], {}, "generated is for 2 answers; the request has 1", "generated"),
        ([None, None], {"n": 2}, "all answers have ended", "generated"),
        ([[97, 320]], {}, r"generated\[0\] has a token id outside of 0 to 319", "generated"),
        ([[], [-1]], {"n": 2}, r"generated\[1\] has a token id outside", "generated"),
        ([[1 << 40]], {}, "has a token id outside", "generated"),
        ([["a"]], {}, "must be a list of token ids, or None", "generated"),
        ([97], {}, "must be a list of token ids, or None", "generated"),
        ([[97] * 8], {}, r"generated\[0\] has 8 tokens, and the answer ends after 8; pass None", "generated"),
        ([[97] * 230], {"max_tokens": None}, "has 230 tokens, and the answer ends after 223", "generated"),
        ([[97, END_TOKEN]], {}, f"has the token {END_TOKEN}, which ends the answer; pass None", "generated"),
        ([[97, 98, 97]], {"stop_token_ids": [98]}, "has the token 98, which ends the answer", "generated"),
    ],
)
def test_what_cannot_go_on_is_refused(generated: Any, params: dict[str, Any], words: str, param: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as error:
        make_request(PROMPT, SamplingParams(**{"seed": 1, "max_tokens": 8, **params}), generated=generated)
    assert error.value.param == param


def test_nothing_generated_is_an_ordinary_request() -> None:
    params = SamplingParams(seed=SEED, n=2, max_tokens=0)
    request = make_request(PROMPT, params, generated=[[], []])
    assert not request.resumed
    outputs = Server("paged").run(request)
    assert [told_[-1][2] for told_ in told(outputs, request)] == [FinishReason.LENGTH] * 2

"""Requests of `AsyncLLM` whose tokens go to a sink, and answers that go on from tokens generated elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from cllm import AsyncLLM, SamplingParams
from cllm.config import load_config
from cllm.engine.request import FinishReason, Output, Request
from cllm.errors import BackendError, InvalidRequestError, RequestCancelledError, ShuttingDownError
from cllm.loading.embedder import EMBEDDING
from cllm.structured.structure import Structure
from cllm.text.detokenizer import Detokenizer
from engine_kit import assert_nothing_left
from resume_kit import Outputs, queued, said

SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True, logprobs=1)
ENDLESS = SamplingParams(seed=5, max_tokens=4000, ignore_eos=True)


def fake_config(**settings: Any) -> Any:
    settings = {"backend.type": "fake", "drafts.enabled": False, **settings}
    return load_config(None, {key.replace("__", "."): value for key, value in settings.items()}).config


async def assert_idle(llm: AsyncLLM) -> None:
    """Nothing is left of what was cancelled before."""
    engine = llm.executor.engine
    assert engine is not None
    await asyncio.wrap_future(engine.call(lambda: assert_nothing_left(engine)))


# -- sinks ---------------------------------------------------------------------------------------------------------


async def test_a_sink_gets_the_tokens_of_every_answer() -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=12, ignore_eos=True, logprobs=1)
    async with AsyncLLM(fake_config()) as llm:
        completions = await llm.submit("the same", params).collect()
        sink = queued(llm, "the same", params, request_id="mine")
        assert [request.id for request in llm.requests()] == ["mine"] and sink.request.id == "mine"
        await sink.all()
        for index, completion in enumerate(completions):
            assert sink.tokens(index) == completion.token_ids
            ours = [each for each in sink.outputs if each.answer == index]
            assert [each.logprob for each in ours] == completion.logprobs
            assert [each.reason for each in ours] == [None] * 11 + [FinishReason.LENGTH]
        assert llm.requests() == [] and sink.error is None


async def test_the_cache_has_no_more_sequences_than_it_may() -> None:
    settings = {"resources__kv_cache_max_size": 4, "backend__fake__latency_ms": 1.0}
    params = SamplingParams(max_tokens=20, n=2, temperature=1.0, ignore_eos=True)
    async with AsyncLLM(fake_config(**settings)) as llm:
        seen = []
        sinks = [queued(llm, f"{number} is a prompt of its own", params) for number in range(10)]
        for sink in sinks:
            await sink.all()
            kv = llm.executor.snapshot().kv
            seen.append((kv.sequences_running, kv.sequences_running + kv.sequences_held))
        await assert_idle(llm)
        assert max(running for running, _ in seen) > 0 and max(every for _, every in seen) == 4
        assert llm.executor.snapshot().kv.sequences_held == 4


async def test_a_sink_gets_an_embedding() -> None:
    async with AsyncLLM(fake_config()) as llm:
        generation = llm.submit("a text", EMBEDDING, embeds=True)
        await generation.collect()
        read, end = await queued(llm, "a text", EMBEDDING, embeds=True).all()
        assert isinstance(read.read, np.ndarray) and (read.read == generation.embedding).all()
        assert end.reason is FinishReason.LENGTH and llm.requests() == []


async def test_one_answer_is_cancelled() -> None:
    async with AsyncLLM(fake_config(backend__fake__latency_ms=1.0)) as llm:
        sink = queued(llm, "two answers", SamplingParams(seed=1, n=2, max_tokens=4000, ignore_eos=True))
        await sink.until(lambda: len(sink.outputs) > 4)
        llm.cancel(sink.request.id, 1, FinishReason.STOP)
        await sink.until(lambda: any(each.reason for each in sink.outputs))
        (end,) = [each for each in sink.outputs if each.reason is not None]
        assert (end.answer, end.reason, end.token_id) == (1, FinishReason.STOP, None)
        assert not sink.done and len(llm.requests()) == 1
        llm.cancel(sink.request.id, 0)
        assert (await sink.all())[-1].reason is FinishReason.CANCELLED
        await assert_idle(llm)
        assert llm.requests() == []


async def test_a_cancelled_request_says_nothing_more() -> None:
    async with AsyncLLM(fake_config(backend__fake__latency_ms=1.0)) as llm:
        sink = queued(llm, "for ever", ENDLESS)
        await sink.until(lambda: len(sink.outputs) > 2)
        llm.cancel(sink.request.id)
        told = len(sink.outputs)
        assert llm.requests() == []
        await assert_idle(llm)
        await asyncio.sleep(0.01)
        assert len(sink.outputs) == told and sink.error is None
        llm.cancel("nobody")
        llm.cancel("nobody", 3)


async def test_end_fails_the_sink() -> None:
    async with AsyncLLM(fake_config(backend__fake__latency_ms=1.0)) as llm:
        sink = queued(llm, "for ever", ENDLESS)
        assert llm.end(sink.request.id, "the operator said so") and not llm.end(sink.request.id, "again")
        assert isinstance(sink.error, RequestCancelledError) and str(sink.error) == "the operator said so"
        await assert_idle(llm)


async def test_shutting_down_ends_sinks() -> None:
    async with AsyncLLM(fake_config(backend__fake__latency_ms=1.0, scheduler__max_running=1)) as llm:
        running, waiting = (queued(llm, "for ever", ENDLESS) for _ in range(2))
        await running.until(lambda: len(running.outputs) > 2)
        await llm.shutdown(0)
        for sink in (running, waiting):
            assert sink.done
            error = sink.error or sink.outputs[-1].error
            assert isinstance(error, ShuttingDownError)


async def test_sinks_are_told_of_the_end_even_if_the_model_cannot_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = AsyncLLM(fake_config(backend__fake__latency_ms=1.0))
    await llm.start()
    sink = queued(llm, "for ever", ENDLESS)
    await sink.until(lambda: len(sink.outputs) > 2)
    stop = llm.executor.stop

    async def fails(grace_s: float) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(llm.executor, "stop", fails)
    with pytest.raises(OSError, match="the disk is gone"):
        await llm.shutdown(0)
    assert isinstance(sink.error, ShuttingDownError) and llm.requests() == []
    await stop(0)


async def test_a_sink_that_raises_harms_nobody_else() -> None:
    def raises(output: Output) -> None:
        raise RuntimeError("the connection is gone")

    async with AsyncLLM(fake_config(backend__fake__latency_ms=1.0)) as llm:
        broken = queued(llm, "one", ENDLESS, lambda request: Outputs(request, raises))
        other = queued(llm, "another", SAMPLED)
        await other.all()
        assert len(other.tokens()) == 40
        assert isinstance(broken.error, BackendError) and "the connection is gone" in str(broken.error)
        await assert_idle(llm)
        assert llm.requests() == []


async def test_what_is_refused_leaves_no_sink() -> None:
    async with AsyncLLM(fake_config()) as llm:
        made: list[Request] = []

        def make(request: Request) -> Outputs:
            made.append(request)
            return Outputs(request)

        with pytest.raises(InvalidRequestError, match="needs a seed"):
            queued(llm, "go on", SamplingParams(), make, generated=[[97]])
        assert made == [] and llm.requests() == []


# -- answers that go on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structured", [False, True])
async def test_a_replica_goes_on_where_another_one_died(structured: bool) -> None:
    schema = Structure("json_schema", '{"type": "array", "items": {"enum": ["a", "bcd"]}, "minItems": 2}')
    params = SamplingParams(
        temperature=1.0, seed=5, n=2, max_tokens=40, logprobs=2, frequency_penalty=0.5, prompt_logprobs=0,
        structured=schema if structured else None,
    )  # fmt: skip
    async with AsyncLLM(fake_config()) as one, AsyncLLM(fake_config()) as other:
        grammar = await one.text.compile(schema) if structured else None
        whole = await queued(one, "tell me", params, grammar=grammar).all()
        assert whole[0].read is not None
        told = whole[1:]
        assert len(told) > 8
        for cut in range(0, len(told), 3):
            generated: list[list[int] | None] = [[], []]
            for output in told[:cut]:
                tokens = generated[output.answer]
                assert tokens is not None and output.token_id is not None
                tokens.append(output.token_id)
                if output.reason is not None:
                    generated[output.answer] = None
            grammar = await other.text.compile(schema) if structured else None
            rest = await queued(other, "tell me", params, grammar=grammar, generated=generated).all()
            rest = [output for output in rest if output.read is None]
            for index in range(2):
                assert [said(o) for o in told[:cut] + rest if o.answer == index] == [
                    said(o) for o in told if o.answer == index
                ]


async def test_the_text_goes_on_within_a_character_and_a_stop_string() -> None:
    bias = dict.fromkeys([*range(0xC3, 0xDF), *range(0x80, 0x9F)], 8.0)  # characters of two bytes, often
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True, logit_bias=bias)
    async with AsyncLLM(fake_config()) as llm:
        (whole,) = await llm.submit("letters", params).collect()
        text = whole.text
        stop = next(
            text[at : at + 3]
            for at in range(10, len(text))
            if "\x7f" < text[at + 1] < "\ufffd" and text.find(text[at : at + 3]) == at
        )
        stopped = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True, logit_bias=bias, stop=[stop])
        (expected,) = await llm.submit("letters", stopped).collect()
        assert expected.finish_reason == "stop" and len(expected.token_ids) > 10
        for cut in range(len(expected.token_ids) - 1):
            stream = Detokenizer(llm.text.tokenizer, [stop])
            before = "".join(map(stream.push, expected.token_ids[:cut]))
            generation = llm.submit("letters", stopped, generated=[expected.token_ids[:cut]])
            (rest,) = await generation.collect()
            assert before + rest.text == expected.text
            assert (rest.token_ids, rest.finish_reason) == (expected.token_ids[cut:], "stop")
            assert generation.completion_tokens == len(expected.token_ids) - cut
        with pytest.raises(InvalidRequestError, match=r"generated\[0\] has the stop string .* pass None"):
            llm.submit("letters", stopped, generated=[expected.token_ids])
        assert llm.requests() == []


async def test_a_generation_of_which_some_answers_had_ended() -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=10, ignore_eos=True)
    async with AsyncLLM(fake_config()) as llm:
        first, _, last = await llm.submit("three", params).collect()
        generation = llm.submit("three", params, generated=[first.token_ids[:4], None, []])
        found = await generation.collect()
        assert [each.token_ids for each in found] == [first.token_ids[4:], [], last.token_ids]
        assert [each.finish_reason for each in found] == ["length", "", "length"]
        assert generation.done and llm.requests() == []

"""`LLM` and `AsyncLLM`: on the fake backend for behaviour, on the real model for faults that must heal."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from cllm import LLM, AsyncLLM, SamplingParams
from cllm.config import load_config
from cllm.engine import row_sampler
from cllm.engine.loop import Engine
from cllm.engine.time_sharing import TimeSharing
from cllm.errors import (
    BackendError,
    ConfigError,
    InvalidRequestError,
    RequestCancelledError,
    RequestTimeoutError,
    ShuttingDownError,
)
from cllm.kv.ops import SlotOps
from cllm.loading.open_model import ModelShare
from cllm.loading.parts import ModelParts
from cllm.structured.structure import Structure
from cllm.tasks.chat import AnswerRules, prepare_chat
from cllm.tasks.warm import restore_pins
from thorough import slow

GREEDY = SamplingParams(temperature=0, max_tokens=12)
REAL = {
    "resources.max_context_length": 512,
    "resources.kv_cache_max_memory_mb": 100,
    "backend.llama_cpp.n_seq_max": 4,
}


def fake_config(**settings: Any) -> Any:
    return load_config(
        None, {"backend.type": "fake", **{key.replace("__", "."): v for key, v in settings.items()}}
    ).config


# -- the start -----------------------------------------------------------------------------------------------------


async def test_a_start_that_fails_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[ModelParts] = []
    close = ModelParts.close

    def counted(parts: ModelParts) -> None:
        closed.append(parts)
        close(parts)

    def fails(engine: Engine) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ModelParts, "close", counted)
    monkeypatch.setattr(Engine, "start", fails)
    sharing = TimeSharing()
    llm = AsyncLLM(fake_config(), share=ModelShare(time_sharing=sharing))
    with pytest.raises(RuntimeError, match="new thread"):
        await llm.start()
    assert len(closed) == 1 and sharing.members == () and not llm.ready
    monkeypatch.undo()
    async with llm:
        assert llm.ready and len(sharing.members) == 1


# -- pins that were lost -------------------------------------------------------------------------------------------


async def test_memory_that_is_lost_during_the_last_look_for_pins_is_looked_at_again() -> None:
    looks, ends = 0, asyncio.Event()

    async def look(llm: AsyncLLM) -> None:
        nonlocal looks
        looks += 1
        await ends.wait()

    async with AsyncLLM(fake_config()) as llm:
        llm.restore_pins = look
        for _ in range(3):
            llm._restore_pins()
            await asyncio.sleep(0.001)
        assert looks == 1 and llm._pinning is not None
        ends.set()
        await llm._pinning
        assert looks == 2


async def test_looking_for_lost_pins_ends_with_the_model() -> None:
    async with AsyncLLM(fake_config()) as llm:
        pass
    await restore_pins(llm)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(backend="fake") as opened:
        yield opened


async def test_the_instruction_set_reaches_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    class Sampler:
        def __init__(self, instruction_set: str) -> None:
            self._name = instruction_set
            self._rows = original(instruction_set)

        def argmax(self, values: Any) -> int:
            used.append(self._name)
            return int(self._rows.argmax(values))

    original = row_sampler.RowSampler
    monkeypatch.setattr(row_sampler, "RowSampler", Sampler)
    async with AsyncLLM(fake_config(backend__native__instruction_set="generic")) as llm:
        _ = [delta async for delta in llm.submit("which kernels?", GREEDY)]
    assert set(used) == {"generic"}


async def test_an_instruction_set_that_the_cpu_lacks_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    native = pytest.importorskip("cllm._native")
    config = fake_config(backend__native__instruction_set="avx512")
    if "avx512" in native.instruction_sets():
        pytest.skip("this CPU has them all")
    with pytest.raises(ConfigError, match=r"backend\.native\.instruction_set is avx512, but this CPU"):
        await AsyncLLM(config).start()


async def test_an_engine_that_gave_up_is_not_ready() -> None:
    async with AsyncLLM(fake_config()) as llm:
        engine = llm.executor.engine
        assert engine is not None and llm.ready

        def fail() -> None:
            raise BackendError("no context any more")

        engine.backend.rebuild = fail  # type: ignore[method-assign]
        engine.backend.faults.fatal, engine.backend.faults.steps_to_fail = True, 1  # type: ignore[attr-defined]
        with pytest.raises(BackendError, match="no context any more"):
            _ = [delta async for delta in llm.submit("too much", GREEDY)]
        assert not llm.ready
        with pytest.raises(ShuttingDownError):
            llm.submit("nobody is there", GREEDY)


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt {n}" for n in range(40)]
    answers = llm.generate(prompts, GREEDY, progress=False)
    assert [answer.text for answer in answers] == [llm.generate(p, GREEDY)[0].text for p in prompts]
    assert answers[0].prompt_tokens == len("prompt 0")


def test_several_answers_stand_together(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True)
    answers = llm.generate(["a", "b"], params, progress=False)
    assert len(answers) == 6 and all(len(answer.token_ids) == 5 for answer in answers)
    assert [a.text for a in llm.generate("b", params)] == [answer.text for answer in answers[3:]]


def test_token_ids_are_a_prompt_too(llm: LLM) -> None:
    assert llm.generate([104, 105], GREEDY)[0].prompt_tokens == 2
    assert len(llm.generate([[104], [105]], GREEDY, progress=False)) == 2


def test_streaming_gives_the_same_text(llm: LLM) -> None:
    assert "".join(llm.stream("stream me", GREEDY)) == llm.generate("stream me", GREEDY)[0].text


def test_a_stream_of_several_answers_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="n is 2; stream gives one answer"):
        next(llm.stream("stream me", SamplingParams(n=2)))


def test_a_chat_with_several_answers_is_refused(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for tools in ([], [tool]):
        with pytest.raises(InvalidRequestError, match="n is 2; chat gives one answer, only generate gives several"):
            llm.chat([{"role": "user", "content": "hi"}], SamplingParams(n=2), tools=tools)


def test_leaving_a_stream_cancels_it(llm: LLM) -> None:
    stream = llm.stream("go on for ever", SamplingParams(max_tokens=4000, ignore_eos=True))
    next(stream)
    stream.close()
    llm.generate("something else", GREEDY)
    assert llm.kv()["referenced"] == 0


def test_chat_and_kv(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "hello"}], GREEDY)
    assert answer.prompt_tokens > 5
    kv = llm.kv()
    assert kv["layout"] == "paged" and kv["free"] + kv["evictable"] + kv["referenced"] == kv["total"]


def test_chat_with_tools(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cllm.tasks.chat.AnswerRules", partial(AnswerRules, required=True, several=False))
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema, "strict": True}}
    asked = [{"role": "user", "content": "hello"}]
    answer = llm.chat(asked, SamplingParams(temperature=0, max_tokens=200), tools=[tool])
    assert (answer.finish_reason, answer.text) == ("tool_calls", "")
    (call,) = answer.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("look", {"a": 1})
    with pytest.raises(InvalidRequestError, match="two tools have the name look"):
        llm.chat(asked, tools=[tool, tool])
    deep: dict[str, Any] = {}
    for _ in range(5_000):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(InvalidRequestError, match="more than 128 levels deep"):
        llm.chat(asked, tools=[{"type": "function", "function": {"name": "look", "parameters": deep}}])


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"multipleOf": 99_999_989}, "multipleOf"),
        ({"allOf": [{"pattern": f"a{number}"} for number in range(12)]}, "patterns"),
        ({"type": "sting"}, r"sting \(at /properties/a\)$"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_its_tool(llm: LLM, schema: dict[str, Any], words: str) -> None:
    described = {"parameters": {"type": "object", "properties": {"a": schema}}, "strict": True}
    tools = [{"type": "function", "function": function} for function in ({"name": "f"}, {"name": "g", **described})]
    with pytest.raises(InvalidRequestError, match=words) as refused:
        llm.chat([{"role": "user", "content": "hello"}], tools=tools)
    assert refused.value.param == "tools[1]" and str(refused.value).startswith("tools[1]: ")
    assert "start:" not in str(refused.value), "nobody wrote that grammar"


def test_beside_tools_a_structure_is_refused_by_its_own_name(llm: LLM) -> None:
    params = SamplingParams(structured=Structure("json_schema", '{"type": "sting"}', "mine"))
    tool = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(InvalidRequestError, match=r"^mine: .*sting") as refused:
        llm.chat([{"role": "user", "content": "hello"}], params, tools=[tool])
    assert refused.value.param == "mine" and "start:" not in str(refused.value)


async def test_a_chat_without_tools_may_follow_any_grammar() -> None:
    async with AsyncLLM(fake_config()) as llm:
        params = SamplingParams(structured=Structure("gbnf", 'root ::= "yes"'), max_tokens=20)
        turn = await prepare_chat(llm.text, [{"role": "user", "content": "hello"}], params)
        (completion,) = await llm.queue(turn.submission).collect(turn.readers[0])
        assert completion.text == "yes"


def test_logprobs_are_one_per_token(llm: LLM) -> None:
    answer = llm.generate("count", SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True))[0]
    assert answer.logprobs is not None
    assert [logprob.token_id for logprob in answer.logprobs] == answer.token_ids


def test_a_completion_is_a_plain_record(llm: LLM) -> None:
    answer = llm.generate("hello", GREEDY)[0]
    fields = dataclasses.asdict(answer)
    assert (fields["text"], fields["finish_reason"]) == (answer.text, "length")
    assert answer.text and repr(answer.text) in repr(answer)
    assert dataclasses.replace(answer) == answer
    assert dataclasses.replace(answer, text="other").text == "other"


def test_an_empty_answer_has_no_logprobs_only_if_it_was_not_asked_for_them(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    asked = [{"role": "user", "content": "hello"}]
    for tools in ([], [tool]):
        assert llm.chat(asked, SamplingParams(max_tokens=0, logprobs=1), tools=tools).logprobs == []
        assert llm.chat(asked, SamplingParams(max_tokens=0), tools=tools).logprobs is None


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ([1, 9999], "9999"),
        ([-1], "-1"),
        ([1 << 40], str(1 << 40)),
        ("x" * 5000, "maximum context length is 4096 tokens, .* However, the prompt has 5000 tokens"),
    ],
)
def test_impossible_prompts_are_refused_at_once(llm: LLM, prompt: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as error:
        llm.generate([prompt], GREEDY)
    assert error.value.param == "prompt"


@pytest.mark.parametrize("layout", ["paged", "slots"])
def test_the_fake_backend_has_any_context(layout: str) -> None:
    settings = {"resources.max_context_length": 100_000, "backend.fake.layout": layout, "scheduler.max_running": 1}
    with LLM(backend="fake", settings=settings) as llm:
        (first,) = llm.generate(["x" * 99_990], GREEDY, progress=False)
        (second,) = llm.generate(["y" + "x" * 99_989], GREEDY, progress=False)
        assert first.prompt_tokens == second.prompt_tokens == 99_990
        assert first.token_ids != second.token_ids


def test_closing_twice_is_harmless_and_final() -> None:
    llm = LLM(backend="fake")
    llm.close()
    llm.close()
    with pytest.raises(ShuttingDownError):
        llm.generate("too late")


async def test_stop_strings_end_an_answer_and_its_work() -> None:
    async with AsyncLLM(fake_config(backend__fake__latency_ms=1.0, drafts__enabled=False)) as llm:
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        async with llm.submit("tell me", params) as generation:
            text = "".join([delta.text async for delta in generation])
        stop = text[20:23]
        stopped = llm.submit("tell me", SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, stop=[stop]))
        deltas = [delta async for delta in stopped]
        assert "".join(delta.text for delta in deltas) == text[: text.index(stop)]
        assert deltas[-1].finish_reason == "stop" and deltas[-1].stop_reason == stop
        await _until_idle(llm)
        assert llm.executor.snapshot().generated_tokens < 400 + 60


async def test_closing_a_generation_cancels_it() -> None:
    async with AsyncLLM(fake_config(backend__fake__latency_ms=1.0)) as llm:
        generation = llm.submit("endless", SamplingParams(max_tokens=3000, ignore_eos=True))
        await anext(aiter(generation))
        await generation.aclose()
        with pytest.raises(RequestCancelledError):
            while True:
                await anext(generation)
        await _until_idle(llm)
        assert llm.executor.snapshot().finished == {"cancelled": 1}


async def test_a_deadline_ends_a_generation() -> None:
    async with AsyncLLM(fake_config(backend__fake__latency_ms=5.0)) as llm:
        generation = llm.submit("slow", SamplingParams(max_tokens=3000, ignore_eos=True), timeout_s=0.05)
        with pytest.raises(RequestTimeoutError, match=r"0\.05 s"):
            async for _ in generation:
                pass


async def test_a_request_may_shorten_the_operators_deadline_and_not_lengthen_it() -> None:
    async with AsyncLLM(fake_config(backend__fake__latency_ms=5.0, scheduler__request_timeout_s=0.05)) as llm:
        generation = llm.submit("slow", SamplingParams(max_tokens=3000, ignore_eos=True), timeout_s=1e6)
        with pytest.raises(RequestTimeoutError, match=r"0\.05 s"):
            async for _ in generation:
                pass


async def test_shutdown_ends_what_runs_and_refuses_what_comes() -> None:
    llm = AsyncLLM(fake_config(backend__fake__latency_ms=5.0))
    await llm.start()
    generation = llm.submit("running", SamplingParams(max_tokens=3000, ignore_eos=True))
    await anext(aiter(generation))
    await llm.shutdown(0)
    with pytest.raises(ShuttingDownError):
        while True:
            await anext(generation)
    with pytest.raises(ShuttingDownError):
        llm.submit("late")
    assert not llm.ready


async def test_the_same_id_cannot_run_twice() -> None:
    async with AsyncLLM(fake_config(backend__fake__latency_ms=5.0)) as llm:
        first = llm.submit("one", SamplingParams(max_tokens=100, ignore_eos=True), request_id="mine")
        with pytest.raises(InvalidRequestError, match="mine"):
            llm.submit("two", request_id="mine")
        await first.aclose()


async def _until_idle(llm: AsyncLLM) -> None:
    async def idle() -> None:
        while llm.executor.snapshot().kv.referenced or llm.executor.snapshot().running:
            await asyncio.sleep(0.005)

    await asyncio.wait_for(idle(), 60)


@pytest.fixture(scope="module", params=["native", pytest.param("llama_cpp", marks=slow)])
def real(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM("smollm2", backend=request.param, settings=REAL) as opened:
        yield opened


STORY = "Write a short story about a lighthouse keeper and the sea. " * 3


@pytest.mark.model
def test_cached_equals_uncached_on_the_real_model(real: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    first, second = (real.generate(STORY, params)[0] for _ in range(2))
    unit = real.kv()["unit_tokens"]
    assert first.cached_tokens == 0
    assert second.cached_tokens == (second.prompt_tokens - 1) // unit * unit
    assert first.text == second.text and first.text.strip()


@pytest.mark.model
def test_answers_share_a_prompt_on_the_real_model(real: LLM) -> None:
    answers = real.generate("The best thing about summer is", SamplingParams(n=4, seed=3, max_tokens=8))
    assert len({answer.text for answer in answers}) > 1
    assert real.kv()["referenced"] == 0


@pytest.mark.model
@pytest.mark.parametrize("real", ["llama_cpp"], indirect=True)
def test_a_slot_that_loses_its_content_is_healed_on_the_real_model(real: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompt = "List the planets of the solar system:"
    expected = real.generate(prompt, params)[0].text
    engine = real._llm.executor.engine
    assert engine is not None
    steps = iter(range(10_000))
    original = engine.backend.collect

    def sabotage(chunks: Any) -> Any:
        if next(steps) == 5:
            assert isinstance(engine.backend.ops, SlotOps)
            engine.backend.ops.remove(chunks[0].slot, 3)
        return original(chunks)

    engine.backend.collect = sabotage  # type: ignore[method-assign]
    try:
        healed = real.generate(prompt, params)[0].text
    finally:
        engine.backend.collect = original  # type: ignore[method-assign]
    assert healed == expected
    assert engine.snapshot.position_mismatches == 1


@pytest.mark.model
def test_a_context_is_rebuilt_on_the_real_model(real: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = ["A recipe for soup:", "The history of Rome began"]
    expected = [real.generate(prompt, params)[0].text for prompt in prompts]
    engine = real._llm.executor.engine
    assert engine is not None
    steps = iter(range(10_000))
    original = engine.backend.collect

    def lose_context(chunks: Any) -> Any:
        if next(steps) == 2:  # few are needed where drafts fit
            raise BackendError("the context is gone", fatal=True)
        return original(chunks)

    engine.backend.collect = lose_context  # type: ignore[method-assign]
    try:
        resumed = [answer.text for answer in real.generate(prompts, params, progress=False)]
    finally:
        engine.backend.collect = original  # type: ignore[method-assign]
    assert resumed == expected
    assert engine.snapshot.rebuilds == 1

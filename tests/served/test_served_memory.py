"""Several models under one budget: what fits, who makes room, and that nobody's answers change for it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from cllm.backends.fake import FakeBackend
from cllm.config import Config, load_config
from cllm.engine.params import SamplingParams
from cllm.errors import ConfigError, ModelUnavailableError
from cllm.llm import AsyncLLM
from cllm.loading import fake_model
from cllm.served import ServedModels
from cllm.served.memory import say_what_is_held
from native_kit import write_model
from served_models import complete, config, serving, states


async def test_what_the_process_holds_is_said_in_parts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="cllm"):
        async with serving("a", "b", resources__max_memory_mb=64) as (client, served):
            account = served.memories["cpu"].ledger.open("c", fixed=20 << 20, least=0)
            seen = (await client.get("/kv")).json()["models"]
            say_what_is_held(served.memories, before=10 << 20)
            account.close()
    assert abs(seen["resident_bytes"] - psutil.Process().memory_info().rss) < 0.1 * seen["resident_bytes"]
    said = [line.message for line in caplog.records if line.message.startswith("the process holds ")]
    assert len(said) == 2  # at the start, and now
    held, counted, before, others = (int(size.replace(",", "")) for size in re.findall(r"([\d,]+) MiB", said[1]))
    assert before == 10 and 20 <= counted <= 64
    assert abs(held - (counted + before + others)) <= 2 and abs(held - seen["resident_bytes"] / 2**20) < 0.1 * held


async def test_the_least_recently_used_makes_room() -> None:
    # A context of 4,096 tokens is 32 KiB; with its share of the arena in whole extents two fit into 80 KiB, not three.
    entries = [{"name": name, "load": "first_use"} for name in "abc"]
    async with serving(*entries, resources__max_memory_mb=80 / 1024) as (client, served):
        for name in "ab":
            assert (await complete(client, name)).status_code == 200
        assert (await complete(client, "a")).status_code == 200
        assert (await complete(client, "c")).status_code == 200
        assert await states(client) == {"a": "ready", "b": "unloaded", "c": "ready"}
        served.memories["cpu"].ledger.check()


async def test_what_has_no_room_beside_pinned_and_busy_ones_is_refused_with_the_estimate() -> None:
    entries = [{"name": "a", "pinned": True}, {"name": "b", "load": "first_use"}]
    async with serving(*entries, resources__max_memory_mb=48 / 1024) as (client, served):
        answer = await complete(client, "b")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_unavailable")
        message = answer.json()["error"]["message"]
        assert message.startswith("b needs 0 MiB for its weights and at least 0 MiB for the K/V of one context of 4096")
        assert "a (0 MiB, pinned)" in message and "resources.max_memory_mb" in message
        assert (await complete(client, "a")).status_code == 200
        with pytest.raises(ModelUnavailableError):
            await served.load(served.models[1])


def test_what_can_never_fit_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"^a needs .* K/V of one context of 4096 tokens: more than the 0 MiB"):
        ServedModels(config("a", resources__max_memory_mb=16 / 1024))
    with pytest.raises(ConfigError, match=r"^2 models should be loaded together, but do not fit .*first_use"):
        ServedModels(config("a", "b", resources__max_memory_mb=48 / 1024))


def test_a_context_that_a_model_cannot_have_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_model, "open_fake", lambda config: FakeBackend())
    lazy = {"name": "b", "load": "first_use", "resources": {"max_context_length": 8192}}
    with pytest.raises(ConfigError, match=r"max_context_length is 8192, but the model was trained for 4096 tokens"):
        ServedModels(config("a", lazy))


@pytest.mark.parametrize("name", ["x", "y", "b"])
def test_names_are_unique(name: str) -> None:
    """Each alias, whichever it is, and the name that a model without one is shown by."""
    entries = [{"name": "a", "aliases": ["x", "y", "b"]}, {"name": "b", "aliases": [] if name == "b" else ["z", name]}]
    settings = {"backend": {"type": "fake"}, "models": entries, "resources": {"max_memory_mb": 1.0}}
    with pytest.raises(ConfigError, match=f"two models are called '{name}', a and b; give one of them another alias"):
        ServedModels(Config.model_validate(settings))


@pytest.mark.parametrize("context", [3328, 4096])
async def test_a_budget_for_one_context_is_enough_for_one(context: int) -> None:
    """Also where the context is no whole number of extents: the last one is narrower then."""
    settings = {"max_context_length": context, "max_memory_mb": context * 8 / 2**20, "block_size": 16}
    flags = {f"resources__{key}": value for key, value in settings.items()}
    entries = ["a", {"name": "b", "load": "first_use"}]
    async with serving(*entries, **flags, scheduler__request_timeout_s=5.0) as (client, served):
        for name in "aba":
            body = {"model": name, "prompt": [5] * (context - 8), "max_tokens": 8, "ignore_eos": True}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
        served.memories["cpu"].ledger.check()


async def test_two_busy_models_share_a_budget_that_is_never_passed() -> None:
    """Both answer all their requests, whatever they take from each other; and answers are those of a lone model."""
    prompts = [f"{number} " + "lorem ipsum dolor sit amet " * (5 + number % 7) for number in range(24)]
    async with serving("alone") as (client, _):
        answers = [await complete(client, None, prompt, max_tokens=30, ignore_eos=True) for prompt in prompts]
        expected = {
            prompt: answer.json()["choices"][0]["text"] for prompt, answer in zip(prompts, answers, strict=True)
        }
    async with serving("a", "b", resources__max_memory_mb=96 / 1024) as (client, served):

        async def ask(model: str, prompt: str) -> None:
            answer = await complete(client, model, prompt, max_tokens=30, ignore_eos=True)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == expected[prompt]
            served.memories["cpu"].ledger.check()

        for _ in range(2):
            await asyncio.gather(*(ask(model, prompt) for prompt in prompts for model in "ab"))
        for each in served.models:
            assert each.account is not None and each.llm is not None
            assert each.llm.executor.kv()["bytes"]["total"] <= each.account.kv


async def test_who_waits_for_another_models_memory_sleeps_and_is_served_when_it_comes() -> None:
    slow = {"fake": {"latency_ms": 5.0}}
    async with serving({"name": "a", "backend": slow}, "b", resources__max_memory_mb=74 / 1024) as (client, served):
        a, b = served.models
        long = "x" * 3900
        running = [
            asyncio.create_task(complete(client, "a", f"{n}{long}", max_tokens=60, ignore_eos=True)) for n in "12"
        ]
        while a.llm is None or a.llm.executor.snapshot().generated_tokens < 2:
            await asyncio.sleep(0.005)
        assert b.llm is not None and b.account is not None
        kv, tries = b.llm.executor.parts.scheduler.kv, 0
        admit = kv.admit

        def counted(sequence: Any) -> int | None:
            nonlocal tries
            tries += 1
            return admit(sequence)

        kv.admit = counted  # type: ignore[method-assign]
        waiting = asyncio.create_task(complete(client, "b", long))
        while not b.account.is_entitled:
            await asyncio.sleep(0.001)
        assert not any(each.done() for each in running)
        assert (await waiting).status_code == 200
        assert {answer.status_code for answer in await asyncio.gather(*running)} == {200}
        assert tries < 100, "it asks when there is something new, not all the time"
        served.memories["cpu"].ledger.check()


@pytest.mark.model
async def test_what_cannot_shrink_is_counted_as_a_whole_and_gives_way_as_a_whole(tmp_path: Path) -> None:
    paths = [str(write_model(tmp_path / f"{name}.gguf", seed=seed)) for seed, name in enumerate("abc")]
    rigid = {"type": "llama_cpp", "llama_cpp": {"n_seq_max": 2}}
    entries = [{"name": path, "backend": rigid, "load": "first_use"} for path in paths[:2]]
    common = {"resources.max_context_length": 256, "backend.threads": 2, "kv.disk.enabled": False}
    settings = {**common, "backend.type": "native", "models": [*entries, paths[2]], "resources.max_memory_mb": 8.0}
    served = ServedModels(load_config(None, settings, {}).config)
    await served.start()
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    try:
        assert [each.estimate.is_elastic for each in served.models] == [False, False, True]
        for _ in range(2):
            for each in served.models:
                llm = await served.acquire(each)
                answer = [token async for delta in llm.submit([5, 6, 7], params) for token in delta.token_ids]
                assert len(answer) == 8 and each.account is not None
                if not each.estimate.is_elastic:
                    assert (each.account.kv, each.account.least) == (0, 0)
                    assert llm.executor.kv()["bytes"]["total"] <= each.account.fixed - each.estimate.weights
                each.release()
                served.memories["cpu"].ledger.check()
            before = served.memories["cpu"].ledger.free
            taken = served.models[0].account
            assert taken is not None
            await served.unload(served.models[0])
            assert served.memories["cpu"].ledger.free == before + taken.fixed
    finally:
        await served.shutdown(0)


async def test_native_models_answer_to_the_bit_as_if_alone_while_memory_changes_hands(tmp_path: Path) -> None:
    paths = {name: str(write_model(tmp_path / f"{name}.gguf", seed=seed)) for seed, name in enumerate("ab")}
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)
    prompts = [[3 + (number * 7 + place * place) % 50 for place in range(20 + 9 * number)] for number in range(8)]
    common = {"backend.type": "native", "resources.max_context_length": 120, "backend.threads": 2}

    async def answer(llm: AsyncLLM, prompt: list[int]) -> list[Any]:
        found = [delta async for delta in llm.submit(prompt, params)]
        return [(each.token_ids, each.logprobs) for each in found]

    async def tokens(llm: AsyncLLM, prompt: list[int]) -> list[Any]:
        return [each for ids, logprobs in await answer(llm, prompt) for each in zip(ids, logprobs, strict=True)]

    expected = {}
    for name, path in paths.items():
        single = load_config(None, {**common, "model.name": path, "resources.kv_cache_max_memory_mb": 4.0}, {}).config
        async with AsyncLLM(single) as llm:
            for number, prompt in enumerate(prompts):
                expected[name, number] = await tokens(llm, prompt)
    probe = ServedModels(load_config(None, {**common, "models": list(paths.values())}, {}).config)
    needed = sum(probe.memories["cpu"].fixed(each) + 1.3 * each.estimate.context_bytes for each in probe.models)
    several = {**common, "models": list(paths.values()), "resources.max_memory_mb": needed / 2**20}
    served = ServedModels(load_config(None, several, {}).config)
    await served.start()

    async def ask(name: str, number: int) -> None:
        model = served.find(name)
        assert model is not None
        llm = await served.acquire(model)
        try:
            assert await tokens(llm, prompts[number]) == expected[name, number]
        finally:
            model.release()
        served.memories["cpu"].ledger.check()

    try:
        for _ in range(3):
            await asyncio.gather(*(ask(name, number) for number in range(len(prompts)) for name in paths))
        evicted = [model.llm.executor.kv()["evictions"] for model in served.models if model.llm is not None]
        assert len(evicted) == 2 and sum(evicted) > 0
    finally:
        await served.shutdown(0)

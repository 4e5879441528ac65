"""Several models behind one server: routing, loading once, unloading, and what does not fit."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import serve_kit
from cllm.cli import app as cllm_app
from cllm.config import Config, load_config
from cllm.engine.params import SamplingParams
from cllm.errors import ConfigError, ModelError, ModelUnavailableError
from cllm.llm import AsyncLLM
from cllm.served import ServedModels, models
from cllm.server.app import create_app
from gguf_kit import tiny_model
from native_kit import write_model


def config(*entries: Any, **settings: Any) -> Config:
    flags: dict[str, Any] = {"backend.type": "fake", "models": list(entries), "resources.max_memory_mb": 1.0}
    flags |= {key.replace("__", "."): value for key, value in settings.items()}
    return load_config(None, flags, {}).config


@asynccontextmanager
async def serving(*entries: Any, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, ServedModels]]:
    settings_of_all = config(*entries, **settings)
    served = ServedModels(settings_of_all)
    await served.start()
    transport = httpx.ASGITransport(app=create_app(served, settings_of_all))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client, served
    finally:
        await served.shutdown(0)
    assert served.ledger.free == served.ledger.budget - sum(each.fixed + each.kv for each in served.ledger.standings())


async def complete(client: httpx.AsyncClient, model: str | None, prompt: str = "hello", **more: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **({"model": model} if model else {}), **more}
    return await client.post("/v1/completions", json=body)


# -- routing -------------------------------------------------------------------------------------------------------


async def test_requests_go_to_the_model_they_name() -> None:
    first = {"name": "a", "aliases": ["ay", "first"]}
    second = {"name": "b", "resources": {"max_context_length": 100}}
    async with serving(first, second) as (client, served):
        for name, answers in (("ay", "ay"), ("first", "ay"), ("a", "ay"), ("b", "b"), (None, "ay")):
            answer = await complete(client, name)
            assert (answer.status_code, answer.json()["model"]) == (200, answers)
        finished = [sum(now.finished.values()) for each in served.models if (now := each.snapshot())]
        assert finished == [4, 1]
        too_long = await complete(client, "b", "x" * 200)
        assert too_long.status_code == 400
        assert (await complete(client, "a", "x" * 200)).status_code == 200


async def test_an_unknown_model_is_404_with_the_list() -> None:
    async with serving("a", "b") as (client, _):
        for answer in (
            await complete(client, "c"),
            await client.get("/kv?model=c"),
            await client.get("/v1/models/c"),
            await client.post("/models/load", json={"model": "c"}),
            await client.post("/encode", json={"model": "c", "text": "x"}),
        ):
            assert answer.status_code == 404
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert error["message"] == "The model 'c' is not served here; ask for 'a' or 'b'."


async def test_every_endpoint_works_for_each_model() -> None:
    async with serving("a", {"name": "b", "resources": {"max_context_length": 100}}) as (client, _):
        chat = {"model": "b", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        assert (await client.post("/v1/chat/completions", json=chat)).json()["model"] == "b"
        assert (await client.post("/generate", json={"model": "b", "prompt": "hi"})).status_code == 200
        assert (await client.post("/encode", json={"model": "b", "text": "hi"})).json()["data"]["length"] == 2
        load = {"model": "b", "requests": 2, "concurrency": 1, "max_tokens": 2, "prompt": "x"}
        assert (await client.post("/benchmark", json=load)).status_code == 200
        assert (await client.get("/model/info?model=b")).json()["data"]["context_length"] == 100
        assert (await client.get("/model/info")).json()["data"]["context_length"] == 4096
        assert (await client.get("/kv?model=b")).json()["query_tokens"] > 0
        assert (await client.get("/kv")).json()["query_tokens"] == 0
        metrics = (await client.get("/metrics")).text
        assert metrics.count("# TYPE cllm:num_requests_running gauge") == 1
        assert 'cllm:request_success_total{finished_reason="length",model_name="b"}' in metrics
        assert 'cllm:num_requests_running{model_name="a"} 0.0' in metrics
        assert "cllm:memory_budget_bytes 1.048576e+06" in metrics
        assert (await client.get("/health")).json() == {"status": "ok", "model_loaded": True, "model": "a"}
        assert "/models/load" in (await client.get("/openapi.json")).json()["paths"]


async def test_one_model_has_no_endpoints_of_several() -> None:
    single = load_config(None, {"backend.type": "fake"}, {}).config
    async with AsyncLLM(single) as llm:
        transport = httpx.ASGITransport(app=create_app(llm, single))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.post("/models/load", json={"model": "fake"})).status_code == 404
            (card,) = (await client.get("/v1/models")).json()["data"]
            assert set(card) == {"id", "object", "created", "owned_by", "max_model_len"}
            assert "memory_budget" not in (await client.get("/metrics")).text


# -- loading and unloading -----------------------------------------------------------------------------------------


async def states(client: httpx.AsyncClient) -> dict[str, str]:
    return {card["id"]: card["state"] for card in (await client.get("/v1/models")).json()["data"]}


async def test_fifty_who_ask_for_a_model_that_is_not_loaded_load_it_once() -> None:
    async with serving("a", {"name": "b", "load": "first_use"}) as (client, served):
        assert await states(client) == {"a": "ready", "b": "unloaded"}
        assert (await client.get("/ready")).status_code == 200
        answers = await asyncio.gather(*(complete(client, "b", f"hello {number}") for number in range(50)))
        assert {answer.status_code for answer in answers} == {200}
        assert served.models[1].loads == 1
        assert await states(client) == {"a": "ready", "b": "ready"}


async def test_loading_and_unloading_by_hand() -> None:
    async with serving("a", {"name": "b", "load": "first_use"}) as (client, served):
        loaded = await client.post("/models/load", json={"model": "b"})
        assert (loaded.status_code, loaded.json()["state"]) == (200, "ready")
        unloaded = await client.post("/models/unload", json={"model": "b"})
        assert (unloaded.status_code, unloaded.json()["state"], unloaded.json()["kv_bytes"]) == (200, "unloaded", 0)
        assert (await client.get("/kv?model=b")).json()["error"]["code"] == "model_not_loaded"
        assert (await complete(client, "b")).status_code == 200
        assert served.models[1].loads == 2
        assert (await client.post("/models/load", json={})).status_code == 400


async def test_unloading_while_requests_run_is_refused_or_waits() -> None:
    async with serving("a", {"name": "b", "backend": {"fake": {"latency_ms": 5.0}}}) as (client, served):
        running = asyncio.create_task(complete(client, "b", max_tokens=40, ignore_eos=True))
        while not served.models[1].users:
            await asyncio.sleep(0.001)
        refused = await client.post("/models/unload", json={"model": "b"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_busy")
        assert "b has 1 requests running" in refused.json()["error"]["message"]
        waits = await client.post("/models/unload", json={"model": "b", "wait": True})
        assert (waits.status_code, waits.json()["state"]) == (200, "unloaded")
        assert running.done() and running.result().json()["usage"]["completion_tokens"] == 40


async def test_who_comes_while_it_is_unloaded_waits_and_has_it_loaded_again() -> None:
    async with serving("a", {"name": "b", "backend": {"fake": {"latency_ms": 5.0}}}) as (client, served):
        b = served.models[1]
        running = asyncio.create_task(complete(client, "b", max_tokens=20, ignore_eos=True))
        while not b.users:
            await asyncio.sleep(0.001)
        unloading = asyncio.create_task(served.unload(b, wait=True))
        while b.state != "unloading":
            await asyncio.sleep(0.001)
        late = await complete(client, "b", timeout=30)
        assert (late.status_code, running.done(), unloading.done(), b.loads) == (200, True, True, 2)


async def test_a_request_waits_for_a_load_no_longer_than_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = asyncio.Event()

    async def never(llm: AsyncLLM) -> None:
        await blocked.wait()
        raise ModelError("it is damaged")

    async with serving("a", {"name": "b", "load": "first_use"}) as (client, served):
        monkeypatch.setattr(AsyncLLM, "start", never)
        answer = await complete(client, "b", timeout=0.05)
        assert answer.status_code == 408
        assert "b is still being loaded" in answer.json()["error"]["message"]
        assert (await complete(client, "a")).status_code == 200, "others are not held up"
        blocked.set()
        with pytest.raises(ModelError):
            await served.load(served.models[1])


async def test_a_model_that_cannot_be_loaded_says_why_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    start, failures = AsyncLLM.start, [True]

    async def fails_once(llm: AsyncLLM) -> None:
        if failures:
            failures.pop()
            raise ModelError("b.gguf: it is damaged")
        await start(llm)

    async with serving("a", {"name": "b", "load": "first_use"}) as (client, served):
        monkeypatch.setattr(AsyncLLM, "start", fails_once)
        b = served.models[1]
        first = await complete(client, "b")
        assert first.status_code == 500 and "it is damaged" in first.json()["error"]["message"]
        assert await states(client) == {"a": "ready", "b": "failed"}
        second = await complete(client, "b")
        assert (second.status_code, second.json()["error"]["code"]) == (503, "model_unavailable")
        assert int(second.headers["retry-after"]) >= 1
        assert [standing.name for standing in served.ledger.standings()] == ["a"], "nothing is left behind"
        b.retry_at = 0.0
        assert (await complete(client, "b")).status_code == 200


async def test_idle_models_are_unloaded_and_pinned_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "TEND_S", 0.01)
    entries = [{"name": "a", "unload_after_s": 0.01}, {"name": "b", "unload_after_s": 0.01, "pinned": True}, "c"]
    async with serving(*entries) as (client, served):
        while served.models[0].state != "unloaded":
            await asyncio.sleep(0.01)
        assert await states(client) == {"a": "unloaded", "b": "ready", "c": "ready"}
        assert (await complete(client, "a")).status_code == 200


async def test_a_model_whose_engine_gave_up_is_loaded_again() -> None:
    async with serving("a", "b") as (client, served):
        b = served.models[1]
        assert b.llm is not None and b.llm._engine is not None
        await asyncio.to_thread(b.llm._engine.stop, 0)
        assert not b.ready
        assert (await complete(client, "b")).status_code == 200
        assert b.loads == 2


# -- memory --------------------------------------------------------------------------------------------------------


def needs(context: int) -> dict[str, Any]:
    return {"resources": {"max_context_length": context}}


async def test_the_least_recently_used_makes_room() -> None:
    # A context of 4,096 tokens is 32 KiB; with its share of the arena in whole extents two fit into 80 KiB, not three.
    entries = [{"name": name, "load": "first_use"} for name in "abc"]
    async with serving(*entries, resources__max_memory_mb=80 / 1024) as (client, served):
        for name in "ab":
            assert (await complete(client, name)).status_code == 200
        assert (await complete(client, "a")).status_code == 200
        assert (await complete(client, "c")).status_code == 200
        assert await states(client) == {"a": "ready", "b": "unloaded", "c": "ready"}
        served.ledger.check()


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
    with pytest.raises(ConfigError, match=r"^2 models are to be loaded together, but do not fit .*first_use"):
        ServedModels(config("a", "b", resources__max_memory_mb=48 / 1024))


def test_names_are_unique() -> None:
    with pytest.raises(ConfigError, match="two models are called 'x'"):
        ServedModels(config({"name": "a", "aliases": ["x"]}, {"name": "b", "aliases": ["x"]}))


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
            served.ledger.check()

        for _ in range(2):
            await asyncio.gather(*(ask(model, prompt) for prompt in prompts for model in "ab"))
        for each in served.models:
            assert each.account is not None and each.llm is not None
            assert each.llm.kv()["bytes"]["total"] <= each.account.kv


async def test_who_waits_for_another_models_memory_sleeps_and_is_served_when_it_comes() -> None:
    slow = {"fake": {"latency_ms": 5.0}}
    async with serving({"name": "a", "backend": slow}, "b", resources__max_memory_mb=74 / 1024) as (client, served):
        a, b = served.models
        long = "x" * 3900
        running = [
            asyncio.create_task(complete(client, "a", f"{n}{long}", max_tokens=60, ignore_eos=True)) for n in "12"
        ]
        while a.llm is None or a.llm.snapshot().generated_tokens < 2:
            await asyncio.sleep(0.005)
        assert b.llm is not None and b.account is not None
        kv, tries = b.llm._loaded.scheduler.kv, 0
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
        served.ledger.check()


# -- files ---------------------------------------------------------------------------------------------------------


def test_a_directory_is_all_its_models(tmp_path: Path) -> None:
    for name in ("one", "two"):
        tiny_model(tmp_path / f"{name}.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    (tmp_path / "notes.txt").write_text("no model")
    settings = {"backend.type": "llama_cpp", "models": [str(tmp_path)], "resources.max_memory_mb": 100.0}
    served = ServedModels(load_config(None, settings, {}).config)
    assert [each.name for each in served.models] == ["one", "two"]
    assert not any(each.at_start for each in served.models)


def test_a_directory_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="a directory without models"):
        ServedModels(load_config(None, {"models": [str(tmp_path)]}, {}).config)


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
    needed = sum(probe.shares.fixed(each) + 1.3 * each.estimate.context_bytes for each in probe.models)
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
        served.ledger.check()

    try:
        for _ in range(3):
            await asyncio.gather(*(ask(name, number) for number in range(len(prompts)) for name in paths))
        evicted = [model.llm.kv()["evictions"] for model in served.models if model.llm is not None]
        assert len(evicted) == 2 and sum(evicted) > 0
    finally:
        await served.shutdown(0)


# -- the whole server ----------------------------------------------------------------------------------------------


def test_a_stream_keeps_its_model_until_it_ends_or_its_client_leaves() -> None:
    entries = "models=[one, {name: two, load: first_use, backend: {fake: {latency_ms: 20}}}]"
    with serve_kit.serving(entries, "resources.max_memory_mb=4") as server:

        def card() -> dict[str, Any]:
            found: dict[str, Any] = httpx.get(f"{server.url}/v1/models/two").json()
            return found

        assert card()["state"] == "unloaded"
        body = {"model": "two", "prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            assert (card()["state"], card()["requests"]) == ("ready", 1)
            refused = httpx.post(f"{server.url}/models/unload", json={"model": "two"})
            assert refused.status_code == 409
        serve_kit.until(lambda: card()["requests"] == 0)
        assert httpx.post(f"{server.url}/models/unload", json={"model": "two"}).status_code == 200
        assert (card()["state"], card()["kv_bytes"]) == ("unloaded", 0)
        assert server.logged("two is loaded, after") and server.logged("model two")
        server.send(signal.SIGTERM)
        assert server.end() == 0


def test_what_cannot_be_served_is_one_line() -> None:
    command = [sys.executable, "-m", "cllm", "serve", "a", "b", "--backend", "fake", "--port", "0"]
    command += ["--set", "resources.max_memory_mb=0.04"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "2 models are to be loaded together, but do not fit" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_the_list_of_models_says_what_each_takes(tmp_path: Path) -> None:
    write_model(tmp_path / "one.gguf", context_length=512)
    (tmp_path / "two.gguf").write_bytes(b"no model")
    shown = CliRunner().invoke(cllm_app, ["models", str(tmp_path), "--backend", "native", "--json", "-"])
    assert shown.exit_code == 0
    one, two = json.loads(shown.stdout)
    # Two layers, two K/V heads of 16 values, keys and values of 2 bytes each.
    assert (one["kv_bytes_per_1000_tokens"], one["context"], one["context_bytes"]) == (256_000, 512, 512 * 256)
    assert (one["backend"], one["file_bytes"]) == ("native", (tmp_path / "one.gguf").stat().st_size)
    assert one["weights_bytes"] > 0
    assert "two.gguf" in two["problem"]
    table = CliRunner().invoke(cllm_app, ["models", str(tmp_path), "--backend", "native"]).stdout
    assert "one.gguf" in table and "two.gguf: " in table


def test_known_names_are_listed_before_they_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLLM_CACHE_DIR", str(tmp_path))
    assert (
        CliRunner().invoke(cllm_app, ["models"]).stdout == "smollm2: not here yet; fetch it with: cllm pull smollm2\n"
    )

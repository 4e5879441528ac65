"""Prefixes that are ready before they are asked for: the configuration's, the operator's, and what requests mark."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cllm.config import Config, load_config
from cllm.engine.params import SamplingParams
from cllm.engine.submission import Submission
from cllm.engine.tenant import ANONYMOUS, COMMON, Tenant
from cllm.errors import BackendError, ConfigError
from cllm.kv.pins import PinMark
from cllm.llm import ONE_TOKEN, AsyncLLM
from cllm.server.app import create_app
from cllm.server.auth.key_file import add_key
from cllm.tasks.warm import warm_up
from cluster_kit import LocalCluster
from http_kit import client_for
from scripted_llm import ScriptedLLM

SYSTEM = "You answer in one word, whatever you are asked, and never say why. " * 2
LONG = "It was the best of times, it was the worst of times, it was the age of wisdom. "
EPHEMERAL = {"type": "ephemeral"}


def fake_config(*, layout: str = "paged", server: dict[str, Any] | None = None, **kv: Any) -> Config:
    backend = {"type": "fake", "fake": {"layout": layout}}
    return Config.model_validate({"backend": backend, "kv": kv, "server": server or {}})


class Client(httpx.AsyncClient):
    llm: AsyncLLM

    async def ask(self, path: str, **body: Any) -> dict[str, Any]:
        response = await self.post(path, json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def pins(self) -> dict[str, Any]:
        """As `/kv` lists them, once the engine has published the latest."""
        if isinstance(self.llm, LocalCluster):
            await self.llm.caught_up()
        else:
            await asyncio.sleep(0.05)
        found: dict[str, Any] = (await self.get("/kv")).json()["details"]["pins"]
        return found


@asynccontextmanager
async def client_of(config: Config, key: str | None = None) -> AsyncIterator[Client]:
    llm = AsyncLLM(config)
    app = create_app(llm, config)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with Client(transport=transport, base_url="http://test", headers=headers) as client:
            client.llm = llm
            yield client


def cached(answer: dict[str, Any]) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


async def chat(client: Client, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return await client.ask("/v1/chat/completions", messages=list(messages), max_tokens=1, **more)


# -- at the start --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["paged", "slots"])
async def test_what_the_configuration_names_is_there_before_the_first_request(layout: str, tmp_path: Path) -> None:
    text, messages = tmp_path / "prompt.txt", tmp_path / "chat.json"
    text.write_text(LONG.upper())
    messages.write_text(json.dumps({"messages": [{"role": "system", "content": SYSTEM.upper()}]}))
    warm = [
        LONG,
        {"prompt": SYSTEM, "role": "system"},
        {"file": str(text), "ttl_s": 60},
        {"file": str(messages), "pin": False},
    ]
    async with client_of(fake_config(layout=layout, warm=warm)) as client:
        listed = await client.pins()
        assert [pin["source"] for pin in listed["prefixes"]] == ["warm"] * 3
        assert [pin["until"] is None for pin in listed["prefixes"]] == [True, True, False]
        for prompt in (LONG, LONG.upper()):
            answer = await client.ask("/v1/completions", prompt=prompt + "And then?", max_tokens=1)
            assert cached(answer) >= len(prompt) // 16 * 16
        for system in (SYSTEM, SYSTEM.upper()):
            answer = await chat(client, {"role": "system", "content": system}, {"role": "user", "content": "Why?"})
            assert cached(answer) >= len(system) // 16 * 16


async def test_what_cannot_be_computed_keeps_nobody_waiting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"messages": 5}')
    warm = [{"file": str(tmp_path / "gone.txt")}, {"file": str(wrong)}, "x" * 100_000, LONG]
    with caplog.at_level(logging.INFO, "cllm.warm"):
        async with client_of(fake_config(warm=warm)) as client:
            assert (await client.get("/ready")).status_code == 200
            assert len((await client.pins())["prefixes"]) == 1
    said = [record.getMessage() for record in caplog.records if record.name == "cllm.warm"]
    assert [line.startswith(f"kv.warm[{number}] could not be computed") for number, line in enumerate(said)] == [
        *(True, True, True, False)
    ]


async def test_files_that_are_no_text_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe, binary, cut, deep = (tmp_path / name for name in ("pipe", "binary.txt", "cut.json", "deep.json"))
    os.mkfifo(pipe)
    binary.write_bytes(b"\xdb\x00")
    cut.write_text('{"messages": [')
    deep.write_text("[" * 100_000)
    files = (pipe, binary, cut, deep, tmp_path)
    with caplog.at_level(logging.INFO, "cllm.warm"):
        async with client_of(fake_config(warm=[{"file": str(file)} for file in files])) as client:
            assert (await client.get("/ready")).status_code == 200
    said = [record.getMessage() for record in caplog.records if record.name == "cllm.warm"]
    problems = (
        f"{pipe} is not a regular file",
        f"{binary} is not UTF-8 text",
        f"{cut} is not JSON: ",
        f"{deep} is not JSON: ",
        f"[Errno 21] Is a directory: {str(tmp_path)!r}",
    )
    assert len(said) == len(problems)
    for number, (line, problem) in enumerate(zip(said, problems, strict=True)):
        assert line.startswith(f"kv.warm[{number}] could not be computed: {problem}")


def test_nobody_waits_for_a_file_when_the_server_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, go_on, has_read = threading.Event(), threading.Event(), threading.Event()

    def read(path: Path) -> str:
        reads.set()
        go_on.wait(60)
        has_read.set()
        return "x"

    async def stopped() -> None:
        llm: Any = ScriptedLLM()
        task = asyncio.create_task(warm_up(llm, fake_config(warm=[{"file": "x"}]).kv.warm, lambda shared: ANONYMOUS))
        while not reads.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    monkeypatch.setattr("cllm.tasks.warm._read", read)
    asyncio.run(stopped())
    assert not has_read.is_set()
    go_on.set()


async def test_beside_requests_it_is_computed_later() -> None:
    async with client_of(fake_config(warm=[LONG], warm_before_ready=False)) as client:
        for _ in range(200):
            if (await client.pins())["prefixes"]:
                break
        assert (await client.pins())["prefixes"][0]["tokens"] == len(LONG) // 16 * 16


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({}, "kv.warm[0] is {} (flag): it must be one of prompt, messages and file, not none of them"),
        ({"prompt": "a", "file": "b"}, "it must be one of prompt, messages and file, not prompt and file"),
        ({"messages": [{"role": "user", "content": "a"}], "role": "user"}, "a text with a role, not both"),
        ({"messages": []}, "kv.warm[0].messages is [] (flag): it must be a non-empty list"),
        ({"messages": [{"role": "bot", "content": ""}]}, "kv.warm[0].messages[0].role is 'bot'"),
        ({"prompt": "a", "ttl_s": 0}, "kv.warm[0].ttl_s is 0 (flag): it must be more than 0"),
        ({"prompt": ""}, "kv.warm[0].prompt is '' (flag): it must be a non-empty string"),
        ({"prompts": "a"}, "kv.warm[0].prompts is 'a' (flag): it must be removed: there is no such key"),
        (5, "kv.warm[0] is 5 (flag): it must be a string or an object"),
    ],
)
def test_an_entry_that_is_wrong_is_named(entry: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(overrides={"kv.warm": [entry]})
    assert problem in str(raised.value)


def with_keys(tmp_path: Path, *names: str, operator: bool = True) -> tuple[dict[str, Any], list[str]]:
    """A server's settings with a key for each name, and the keys."""
    file = tmp_path / "keys.json"
    keys = [add_key(file, name, None) for name in names]
    return {"api_keys": str(file), **({"api_key": "sesame"} if operator else {})}, keys


async def completed(client: Client, key: str, prompt: str, **more: Any) -> int:
    """What of a prompt a key finds."""
    client.headers["authorization"] = f"Bearer {key}"
    return cached(await client.ask("/v1/completions", prompt=prompt, max_tokens=1, **more))


@pytest.mark.parametrize("layout", ["paged", "slots"])
@pytest.mark.parametrize("operator", [True, False])
async def test_what_the_configuration_names_is_warm_for_all_keys(tmp_path: Path, layout: str, operator: bool) -> None:
    server, (ann, bob) = with_keys(tmp_path, "ann", "bob", operator=operator)
    async with client_of(fake_config(layout=layout, server=server, warm=[LONG])) as client:
        whole = len(LONG) // 16 * 16
        own = LONG + "Ann has a secret. " * 4
        assert await completed(client, ann, own) >= whole
        assert whole <= await completed(client, bob, own) <= len(LONG)
        assert await completed(client, ann, own) >= len(own) - 16
        assert await completed(client, bob, own.replace("Ann", "Bob")) <= len(LONG)


async def test_what_is_not_shared_is_the_operators(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server, (ann,) = with_keys(tmp_path, "ann")
    warm = [{"prompt": LONG, "shared": False}]
    async with client_of(fake_config(server=server, warm=warm)) as client:
        assert await completed(client, ann, LONG) == 0
        assert await completed(client, "sesame", LONG) > 0
    del server["api_key"]
    async with client_of(fake_config(server=server, warm=warm)) as client:
        assert await completed(client, ann, LONG) == 0
    assert "skipping kv.warm[0]: it is not shared" in caplog.text


# -- POST /kv/warm -------------------------------------------------------------------------------------------------


async def test_a_prefix_is_computed_pinned_and_let_go() -> None:
    async with client_of(fake_config()) as client:
        first = await client.ask("/kv/warm", prompt=LONG, ttl_s=60)
        again = await client.ask("/kv/warm", prompt=LONG)
        whole = len(LONG) // 16 * 16
        assert (first["tokens"], first["cached_tokens"], first["pinned_tokens"]) == (len(LONG), 0, whole)
        assert again["id"] == first["id"] and again["cached_tokens"] > 0
        (pin,) = (await client.pins())["prefixes"]
        assert (pin["id"], pin["tokens"], pin["uses"], pin["until"]) == (first["id"], whole, 2, None)
        kv = (await client.get("/kv")).json()
        assert kv["pinned"] == kv["referenced"] == whole // 16 and kv["pins"] == 1
        gone = await client.delete(f"/kv/warm/{first['id']}")
        assert gone.status_code == 204
        unknown = await client.delete(f"/kv/warm/{first['id']}")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "pin_not_found")
        assert "GET /kv lists them" in unknown.json()["error"]["message"]
        assert (await client.pins())["prefixes"] == []
        assert cached(await client.ask("/v1/completions", prompt=LONG + "!", max_tokens=1)) == whole


async def test_messages_and_no_pin() -> None:
    async with client_of(fake_config()) as client:
        messages = [{"role": "developer", "content": SYSTEM}]
        warmed = await client.ask("/kv/warm", messages=messages, pin=False)
        assert warmed["id"] is None and warmed["pinned_tokens"] == 0
        answer = await chat(client, {"role": "system", "content": SYSTEM}, {"role": "user", "content": "Why?"})
        assert cached(answer) == warmed["tokens"] // 16 * 16


async def test_over_the_limit_it_is_refused_with_numbers() -> None:
    async with client_of(fake_config(pin_limit=0.0)) as client:
        refused = await client.post("/kv/warm", json={"prompt": LONG})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (409, "not_pinned", "pin")
        assert "0 of the 0 that kv.pin_limit allows are pinned" in error["message"]
        assert cached(await client.ask("/v1/completions", prompt=LONG, max_tokens=1)) > 0


@pytest.mark.parametrize("layout", ["paged", "slots"])
async def test_a_second_pin_only_lengthens_and_the_answer_says_what_is_left(layout: str) -> None:
    async with client_of(fake_config(layout=layout)) as client:
        short = await client.ask("/kv/warm", prompt=LONG, ttl_s=60)
        longer = await client.ask("/kv/warm", prompt=LONG, ttl_s=3600)
        shorter = await client.ask("/kv/warm", prompt=LONG, ttl_s=1)
        assert (short["ttl_s"], longer["ttl_s"]) == (60, 3600) and 60 < shorter["ttl_s"] <= 3600
        assert (await client.ask("/kv/warm", prompt=LONG))["ttl_s"] is None
        assert (await client.ask("/kv/warm", prompt=LONG, ttl_s=60))["ttl_s"] is None
        assert (await client.ask("/kv/warm", prompt=SYSTEM, ttl_s=60, pin=False))["ttl_s"] is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": "a", "ttl_s": 0}, "ttl_s"),
        ({"prompt": "a", "pin": 1}, "pin"),
        ({"prompt": "a", "for": 5}, "for"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    async with client_for(ScriptedLLM()) as client:
        refused = await client.post("/kv/warm", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


# -- marks in requests ---------------------------------------------------------------------------------------------


async def test_marks_pin_what_stands_before_them() -> None:
    async with client_of(fake_config()) as client:
        parts = [
            {"type": "text", "text": LONG, "cache_control": {**EPHEMERAL, "ttl": "1h"}},
            {"type": "text", "text": "Why?"},
        ]
        system = {"role": "system", "content": SYSTEM, "cache_control": EPHEMERAL}
        await chat(client, system, {"role": "user", "content": parts})
        pins = (await client.pins())["prefixes"]
        assert [pin["source"] for pin in pins] == ["request"] * 2
        now = time.time()
        assert [290 < pin["until"] - now <= 301 for pin in pins] == [True, False]
        assert [3590 < pin["until"] - now <= 3601 for pin in pins] == [False, True]
        template = len("<|im_start|>system\n") + len(SYSTEM)
        assert template // 16 * 16 <= pins[0]["tokens"] <= template + len("<|im_end|>\n")
        assert pins[0]["tokens"] + len(LONG) // 16 * 16 <= pins[1]["tokens"]


async def test_marks_that_say_nothing_are_taken() -> None:
    """As clients send them whose types have the field."""
    part = {"type": "text", "text": LONG, "cache_control": None}
    async with client_of(fake_config()) as client:
        message = {"role": "user", "content": [part], "cache_control": None}
        await chat(client, message, cache_control=None)
        assert (await client.pins())["prefixes"] == []
        marked = {"role": "system", "content": [{**part, "cache_control": {**EPHEMERAL, "ttl": None}}]}
        await chat(client, marked, message, tools=[])
        (pin,) = (await client.pins())["prefixes"]
        assert 290 < pin["until"] - time.time() <= 301


async def test_a_mark_on_a_head_that_changes_keeps_what_does_not() -> None:
    """The first part goes, with its mark; the second is the same in every request."""
    async with client_of(fake_config()) as client:
        for stamp in ("eb6c6", "36ee5"):
            head = f"x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={stamp};"
            texts = [head, "You are a coding agent.", SYSTEM]
            parts = [{"type": "text", "text": text, "cache_control": EPHEMERAL} for text in texts]
            answer = await chat(client, {"role": "system", "content": parts}, {"role": "user", "content": "Why?"})
        assert cached(answer) >= len(SYSTEM)
        assert len({pin["id"] for pin in (await client.pins())["prefixes"]}) <= 3


async def test_a_mark_on_the_request_pins_its_prompt() -> None:
    async with client_of(fake_config()) as client:
        for path in ("/v1/completions", "/generate"):
            await client.ask(path, prompt=path + LONG, max_tokens=1, cache_control=EPHEMERAL)
        await chat(client, {"role": "user", "content": LONG}, cache_control=EPHEMERAL)
        assert len((await client.pins())["prefixes"]) == 3


async def test_a_mark_is_a_hint() -> None:
    async with client_of(fake_config(pin_limit=0.0)) as client:
        await chat(client, {"role": "user", "content": LONG, "cache_control": EPHEMERAL})
        assert (await client.pins())["refused"] == 1
    async with client_of(fake_config(pin_marks=False)) as client:
        await chat(client, {"role": "user", "content": LONG}, cache_control=EPHEMERAL)
        listed = await client.pins()
        assert (listed["prefixes"], listed["refused"]) == ([], 0)


@pytest.mark.parametrize(
    "control",
    [
        {},
        {"type": "for ever"},
        {**EPHEMERAL, "ttl": "25h"},
        {**EPHEMERAL, "ttl": 300},
        {**EPHEMERAL, "ttl": "86401s"},
        {**EPHEMERAL, "ttl": "1441m"},
        {**EPHEMERAL, "ttl": "5m\n"},
    ],
)
async def test_a_mark_that_is_none_is_refused_by_name(control: dict[str, Any]) -> None:
    message = {"role": "user", "content": "a", "cache_control": control}
    async with client_for(ScriptedLLM()) as client:
        refused = await client.post("/v1/chat/completions", json={"messages": [message]})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"].startswith("messages[0].cache_control")
    if isinstance(control.get("ttl"), str):
        assert (
            error["message"]
            == f"{error['param']} must be a duration such as 30s, 5m or 1h, at most 24h, not {control['ttl']!r}."
        )


async def test_there_are_four_marks_at_most() -> None:
    marked = {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": EPHEMERAL}] * 5}
    async with client_for(ScriptedLLM()) as client:
        refused = await client.post("/v1/chat/completions", json={"messages": [marked]})
    assert "5 cache_control marks; at most 4" in refused.json()["error"]["message"]


@pytest.mark.single
async def test_the_page_shows_what_is_pinned() -> None:
    for layout in ("paged", "slots"):
        config = fake_config(layout=layout, warm=[LONG, {"prompt": SYSTEM, "pin": False}])
        async with AsyncLLM(config) as llm:
            await warm_up(llm, config.kv.warm, lambda shared: ANONYMOUS)
            llm.executor.watch()
            while (picture := llm.executor.view()) is None:
                await asyncio.sleep(0.01)
            llm.executor.unwatch()
        pins = {prefix.pins: prefix.users for prefix in picture.kv.prefixes}
        assert pins == {0: 0, 1: 0}


# -- who may -------------------------------------------------------------------------------------------------------


async def test_only_the_operator_warms_for_all(tmp_path: Path) -> None:
    server, (ann, bob) = with_keys(tmp_path, "ann", "bob")
    async with client_of(fake_config(server=server), ann) as client:
        refused = await client.post("/kv/warm", json={"prompt": LONG, "shared": True})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_key_required")
        assert refused.json()["error"]["param"] == "shared"
        assert (await client.get("/kv")).status_code == 403
        client.headers["authorization"] = "Bearer sesame"
        await client.ask("/kv/warm", prompt=LONG.upper())
        assert await completed(client, ann, LONG.upper()) == 0
        client.headers["authorization"] = "Bearer sesame"
        await client.ask("/kv/warm", prompt=LONG, shared=True)
        assert [pin["shared"] for pin in (await client.pins())["prefixes"]] == [False, True]
        assert await completed(client, ann, LONG) == await completed(client, bob, LONG) > 0


async def test_every_key_warms_and_lets_go_for_itself(tmp_path: Path) -> None:
    server, (ann, bob) = with_keys(tmp_path, "ann", "bob")
    async with client_of(fake_config(server=server), ann) as client:
        mine = await client.ask("/kv/warm", prompt=LONG)
        assert mine["ttl_s"] == 86400
        too_long = await client.post("/kv/warm", json={"prompt": LONG, "ttl_s": 90000})
        assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "ttl_s")
        assert await completed(client, bob, LONG) == 0
        not_his = await client.delete(f"/kv/warm/{mine['id']}")
        assert not_his.status_code == 404
        assert not_his.json()["error"]["message"] == "Unknown or expired pin."
        client.headers["authorization"] = f"Bearer {ann}"
        assert (await client.delete(f"/kv/warm/{mine['id']}")).status_code == 204
        his = await client.ask("/kv/warm", prompt=LONG)
        client.headers["authorization"] = "Bearer sesame"
        assert (await client.delete(f"/kv/warm/{his['id']}")).status_code == 204


async def test_marks_of_a_key_pin_in_its_own_space(tmp_path: Path) -> None:
    ann, bob = (add_key(tmp_path / "keys.json", name, None) for name in ("ann", "bob"))
    server = {"api_keys": str(tmp_path / "keys.json"), "api_key": "sesame"}
    async with client_of(fake_config(server=server), ann) as client:
        await client.ask("/v1/completions", prompt=LONG, max_tokens=1, cache_control=EPHEMERAL)
        client.headers["authorization"] = f"Bearer {bob}"
        answer = await client.ask("/v1/completions", prompt=LONG, max_tokens=1, cache_control=EPHEMERAL)
        assert cached(answer) == 0
        client.headers["authorization"] = "Bearer sesame"
        assert len({pin["id"] for pin in (await client.pins())["prefixes"]}) == 2


# -- memory that is lost -------------------------------------------------------------------------------------------


async def lose_memory(llm: AsyncLLM) -> None:
    engine = llm.executor.engine
    await asyncio.wrap_future(engine.call(lambda: engine._rebuild(BackendError("lost", fatal=True))))


async def until_pinned(llm: AsyncLLM, count: int) -> list[dict[str, Any]]:
    for _ in range(500):
        lost = await llm.executor.lost_pins()
        found: list[dict[str, Any]] = llm.executor.parts.scheduler.kv.details()["pins"]["prefixes"]
        if not lost and len(found) == count and all(pin["state"] == "pinned" for pin in found):
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(f"not pinned: {found}")


@pytest.mark.single
async def test_what_was_pinned_is_computed_again_when_memory_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    config = fake_config(warm=[LONG, {"prompt": SYSTEM, "ttl_s": 1000}])
    async with AsyncLLM(config) as llm:
        create_app(llm, config)
        await warm_up(llm, config.kv.warm, lambda shared: COMMON)
        tokens = llm.text.tokenizer.encode(LONG.upper())
        pins = [PinMark(len(tokens), 500)]
        await llm.warm(Submission(tokens, ONE_TOKEN, tenant=Tenant("ann", b"ann"), pins=pins))
        before = await until_pinned(llm, 3)
        for _ in range(2):
            await lose_memory(llm)
            with caplog.at_level(logging.INFO, "cllm.warm"):
                after = await until_pinned(llm, 3)
            for key in ("id", "tokens", "source", "shared"):
                assert sorted(pin[key] for pin in after) == sorted(pin[key] for pin in before)
            ends = [[pin["until"] for pin in sorted(pins, key=lambda p: p["id"])] for pins in (before, after)]
            assert all(abs(a - b) < 2 if a and b else a is b for a, b in zip(*ends, strict=True))
        assert "was computed and pinned again" in caplog.text
        async with llm.submit(LONG + "!", SamplingParams(max_tokens=1)) as generation:
            async for _ in generation:
                pass
        assert generation.cached_tokens == len(LONG) // 16 * 16


@pytest.mark.single
async def test_what_cannot_be_pinned_again_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = fake_config(warm=[LONG, SYSTEM])
    async with AsyncLLM(config) as llm:
        create_app(llm, config)
        await warm_up(llm, config.kv.warm, lambda shared: ANONYMOUS)
        monkeypatch.setattr(llm.executor.parts.scheduler.kv.pins.all, "limit_bytes", 0)  # type: ignore[attr-defined]
        await lose_memory(llm)
        for _ in range(500):
            if not await llm.executor.lost_pins():
                break
            await asyncio.sleep(0.01)
        assert await llm.executor.lost_pins() == [] and llm.executor.snapshot().kv.pins == 0
    assert caplog.text.count("could not be restored: it needs") == 2

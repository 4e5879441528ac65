"""Several keys over HTTP: who is let in, what each may do, what it finds in the cache, and what is counted for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, RateLimitError

from cllm.config import Config, ServerConfig
from cllm.engine.observer import RequestRecord
from cllm.engine.tenant import ANONYMOUS
from cllm.errors import BackendError, ConfigError
from cllm.llm import AsyncLLM
from cllm.observe.log import RequestLog
from cllm.server.app import create_app
from cllm.server.auth import tenants
from cllm.server.auth.key_file import add_key, remove_key
from cllm.server.auth.tenants import Tenants
from http_kit import app_for, client_for, config_with, served
from metrics_kit import record
from scripted_llm import ScriptedLLM

PROMPT = {"prompt": "hi", "max_tokens": 5}


@pytest.fixture
def keys(path: Path) -> dict[str, str]:
    return {"ann": add_key(path, "ann", None), "bob": add_key(path, "bob", 2)}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def llm_with(path: Path, **server: Any) -> ScriptedLLM:
    return ScriptedLLM(config_with(api_keys=str(path), **server))


async def tenant_seen(llm: ScriptedLLM, key: str) -> Any:
    async with client_for(llm) as client:
        assert (await client.post("/v1/completions", json=PROMPT, headers=bearer(key))).status_code == 200
    return llm.submissions[-1].tenant


# -- who is let in -------------------------------------------------------------------------------------------------


async def test_every_key_opens_and_no_other_does(path: Path, keys: dict[str, str]) -> None:
    async with client_for(llm_with(path, api_key="sesame")) as client:
        for key in (*keys.values(), "sesame"):
            assert (await client.get("/v1/models", headers=bearer(key))).status_code == 200
        stored = path.read_text().split('"')
        for key in ("", "ann", keys["ann"][:-1], keys["ann"] + "x", *stored[:40]):
            refused = await client.get("/v1/models", headers={"authorization": f"Bearer {key}".encode()})
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        for path_of_monitors in ("/health", "/ready", "/metrics"):
            assert (await client.get(path_of_monitors)).status_code == 200


async def test_the_api_description_asks_for_a_key(path: Path, keys: dict[str, str]) -> None:
    schema = app_for(llm_with(path)).openapi()
    assert schema["paths"]["/v1/models"]["get"]["security"] == [{"ApiKey": []}]
    assert "403" in schema["paths"]["/kv"]["get"]["responses"]


def test_a_server_without_its_file_of_keys_does_not_start(path: Path) -> None:
    with pytest.raises(ConfigError, match="no such key file"):
        app_for(llm_with(path))


async def test_a_file_without_keys_lets_nobody_in(
    path: Path, keys: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    for name in keys:
        remove_key(path, name)
    async with client_for(llm_with(path)) as client:
        assert (await client.get("/v1/models", headers=bearer(keys["ann"]))).status_code == 401
        assert (await client.get("/v1/models")).status_code == 401
    assert "every request will be refused" in caplog.text


# -- the file changes ----------------------------------------------------------------------------------------------


async def test_keys_come_and_go_while_the_server_runs(
    path: Path, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants, "LOOK_EVERY_S", 0.0)
    async with client_for(llm_with(path)) as client:

        async def status(key: str) -> int:
            return (await client.get("/v1/models", headers=bearer(key))).status_code

        assert await status(keys["ann"]) == 200
        cyd = add_key(path, "cyd", None)
        assert await status(cyd) == 200
        remove_key(path, "ann")
        assert (await status(keys["ann"]), await status(keys["bob"]), await status(cyd)) == (401, 200, 200)


@pytest.mark.parametrize("damage", [lambda path: path.write_text("{"), lambda path: path.unlink()])
async def test_a_file_that_breaks_leaves_the_keys_as_they_were(
    path: Path,
    keys: dict[str, str],
    damage: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tenants, "LOOK_EVERY_S", 0.0)
    whole = path.read_text()
    async with client_for(llm_with(path)) as client:
        damage(path)
        for _ in range(3):
            assert (await client.get("/v1/models", headers=bearer(keys["ann"]))).status_code == 200
            assert (await client.get("/v1/models", headers=bearer("other"))).status_code == 401
        assert caplog.text.count("the previous keys stay valid") == 1  # not with every request
        path.write_text(whole)
        remove_key(path, "ann")
        assert (await client.get("/v1/models", headers=bearer(keys["ann"]))).status_code == 401


# -- spaces --------------------------------------------------------------------------------------------------------


async def test_every_key_has_a_space_of_its_own(path: Path, keys: dict[str, str]) -> None:
    llm = llm_with(path, api_key="sesame")
    seen = [await tenant_seen(llm, key) for key in (keys["ann"], keys["bob"], "sesame", keys["ann"])]
    assert [tenant.name for tenant in seen] == ["ann", "bob", "api_key", "ann"]
    assert len({tenant.space for tenant in seen}) == 3 and all(tenant.space for tenant in seen)
    assert seen[0] == seen[3] == await tenant_seen(llm_with(path), keys["ann"])  # after a restart, too


async def test_a_new_key_under_an_old_name_begins_with_nothing(path: Path, keys: dict[str, str]) -> None:
    before = await tenant_seen(llm_with(path), keys["ann"])
    remove_key(path, "ann")
    after = await tenant_seen(llm_with(path), add_key(path, "ann", None))
    assert after.name == before.name and after.space != before.space


async def test_sharing_has_to_be_asked_for(path: Path, keys: dict[str, str]) -> None:
    llm = llm_with(path, share_prefixes=True)
    assert [await tenant_seen(llm, key) for key in keys.values()] == [("ann", b""), ("bob", b"")]


async def test_one_key_alone_is_nobody_in_particular() -> None:
    assert await tenant_seen(ScriptedLLM(config_with(api_key="sesame")), "sesame") == ANONYMOUS


@pytest.mark.parametrize("field", ["cache_salt", "tenant", "space"])
async def test_a_client_cannot_choose_its_space(path: Path, keys: dict[str, str], field: str) -> None:
    llm = llm_with(path)
    async with client_for(llm) as client:
        body = {**PROMPT, field: "bob"}
        refused = await client.post("/v1/completions", json=body, headers=bearer(keys["ann"]))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        sent = {**bearer(keys["ann"]), f"x-{field}": "bob", "x-request-id": "bob"}
        await client.post("/v1/completions", json={**PROMPT, "user": "bob"}, headers=sent)
    assert llm.submissions[-1].tenant.name == "ann"


@asynccontextmanager
async def running(path: Path, layout: str, **server: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A real engine on the fake backend behind the app."""
    config = Config.model_validate(
        {
            "backend": {"type": "fake", "fake": {"layout": layout}},
            "resources": {"kv_cache_max_memory_mb": 8, "max_context_length": 512},
            "server": {"api_keys": str(path), **server},
        }
    )
    async with AsyncLLM(config) as llm:
        transport = httpx.ASGITransport(app=create_app(llm, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client


PATHS = {
    "/v1/completions": {"prompt": "p" * 200, "max_tokens": 3, "temperature": 0},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "p" * 200}], "max_tokens": 3, "temperature": 0},
    "/generate": {"prompt": "p" * 200, "max_tokens": 3, "temperature": 0},
}


def cached_in(reply: dict[str, Any]) -> int:
    if "usage" in reply:
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
    return int(reply["data"]["cached_tokens"])


@pytest.mark.parametrize("layout", ["paged", "slots"])
@pytest.mark.parametrize("endpoint", PATHS)
@pytest.mark.parametrize("shared", [False, True])
async def test_what_another_key_asked_is_not_to_be_seen(
    path: Path, keys: dict[str, str], layout: str, endpoint: str, shared: bool
) -> None:
    async with running(path, layout, share_prefixes=shared, api_key="sesame") as client:

        async def ask(key: str) -> tuple[int, Any]:
            reply = (await client.post(endpoint, json=PATHS[endpoint], headers=bearer(key))).json()
            return cached_in(reply), reply["choices"][0] if "choices" in reply else reply["data"]["text"]

        first = await ask(keys["ann"])
        others = [await ask(keys["bob"]), await ask("sesame")]
        again = await ask(keys["ann"])
    assert first[0] == 0 and again[0] >= 192
    assert all((cached >= 192) is shared and (shared or cached == 0) for cached, _ in others)
    assert all(answer == first[1] for _, answer in (again, *others))


# -- what only the operator may see --------------------------------------------------------------------------------

OPERATORS = [("GET", "/kv"), ("POST", "/benchmark"), ("GET", "/kv/stream")]


@pytest.mark.parametrize(("method", "url"), OPERATORS)
async def test_what_shows_all_keys_needs_the_operators(path: Path, keys: dict[str, str], method: str, url: str) -> None:
    async with client_for(llm_with(path, api_key="sesame", page=False)) as client:
        refused = await client.request(method, url, json={}, headers=bearer(keys["ann"]))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_key_required")
        allowed = await client.request(method, url, json={}, headers=bearer("sesame"))
        assert allowed.status_code != 403


async def test_whoever_is_alone_or_shares_may_look(path: Path, keys: dict[str, str]) -> None:
    async with client_for(llm_with(path, share_prefixes=True)) as client:
        assert (await client.get("/kv", headers=bearer(keys["ann"]))).status_code == 200
    remove_key(path, "bob")
    async with client_for(llm_with(path)) as client:
        assert (await client.get("/kv", headers=bearer(keys["ann"]))).status_code == 200


# -- limits --------------------------------------------------------------------------------------------------------


async def test_a_key_has_no_more_requests_at_once_than_it_may(path: Path, keys: dict[str, str]) -> None:
    llm = llm_with(path)
    llm.hold(0)
    async with served(llm) as app:
        ann, bob = (AsyncOpenAI(base_url=f"{app.url}/v1", api_key=keys[name], max_retries=0) for name in ("ann", "bob"))

        async def ask(client: AsyncOpenAI) -> Any:
            return await client.completions.create(model="tiny", prompt="hi", max_tokens=2)

        async def started(count: int) -> None:
            while len(llm.generations) < count:
                await llm.submitted.wait()
                llm.submitted.clear()

        waiting = [asyncio.ensure_future(ask(bob)) for _ in range(2)]
        await started(2)
        with pytest.raises(RateLimitError) as raised:
            await ask(bob)
        assert raised.value.code == "rate_limit_exceeded" and raised.value.type == "rate_limit_error"
        assert raised.value.response.headers["retry-after"] == "1"
        assert "'bob' has 2 requests running; its limit is 2 (max_concurrent)" in raised.value.message
        assert (await bob.models.list()).data  # asks for no work
        waiting += [asyncio.ensure_future(ask(ann)) for _ in range(4)]
        await started(6)
        llm.release()
        await asyncio.gather(*waiting)
        assert len(llm.generations) == 6
        await ask(bob)


@pytest.mark.parametrize("end", ["answer", "failure", "bad request", "leaves"])
async def test_a_request_that_ended_in_any_way_makes_room(path: Path, end: str) -> None:
    key = add_key(path, "ann", 1)
    llm = llm_with(path)
    async with served(llm) as app, httpx.AsyncClient(base_url=app.url, headers=bearer(key)) as client:
        for _ in range(3):
            if end == "leaves":
                llm.hold(1)
                async with client.stream("POST", "/v1/completions", json={**PROMPT, "stream": True}) as response:
                    assert response.status_code == 200
                await app.idle.wait()
                llm.release()
            elif end == "failure":
                llm.fail(BackendError("it broke"), after=1)
                assert (await client.post("/v1/completions", json=PROMPT)).status_code == 500
                llm.mend()
            elif end == "bad request":
                assert (await client.post("/v1/completions", json={"prompt": 1.5})).status_code == 400
                assert (await client.post("/v1/nothing", json={})).status_code == 404
            assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200


async def test_a_limit_of_cllms_own_endpoints_has_their_form(path: Path) -> None:
    key = add_key(path, "ann", 1)
    llm = llm_with(path)
    llm.hold(0)
    async with client_for(llm) as client:
        first = asyncio.ensure_future(client.post("/generate", json=PROMPT, headers=bearer(key)))
        await llm.submitted.wait()
        refused = await client.post("/generate", json=PROMPT, headers=bearer(key))
        assert (refused.status_code, refused.json()["success"]) == (429, False)
        llm.release()
        assert (await first).status_code == 200


async def test_what_runs_still_counts_when_the_file_is_read_again(
    path: Path, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants, "LOOK_EVERY_S", 0.0)
    found = Tenants(ServerConfig(api_keys=path))
    bob = found.find(keys["bob"].encode())
    assert bob is not None and bob.enter() and bob.enter()
    add_key(path, "cyd", None)
    again = found.find(keys["bob"].encode())
    assert again is not None and not again.enter()


# -- usage and log -------------------------------------------------------------------------------------------------


async def test_usage_is_counted_by_name(path: Path, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "LOOK_EVERY_S", 0.0)
    llm = llm_with(path, api_key="sesame")

    def ended(**changes: Any) -> RequestRecord:
        return record(prompt_tokens=10, cached_tokens=4, generated_tokens=3, **changes)

    async with client_for(llm) as client:
        for observer in llm.observers:
            for tenant in ("ann", "ann", "api_key", "", "nobody-known"):
                observer.on_finished(ended(tenant=tenant))
        text = (await client.get("/metrics")).text
        for line in (
            'cllm:key_requests_total{key="ann"} 2.0',
            'cllm:key_requests_total{key="bob"} 0.0',
            'cllm:key_requests_total{key="api_key"} 1.0',
            'cllm:key_prompt_tokens_total{key="ann"} 20.0',
            'cllm:key_prompt_tokens_cached_total{key="ann"} 8.0',
            'cllm:key_generation_tokens_total{key="ann"} 6.0',
            'cllm:key_requests_running{key="ann"} 0.0',
            'cllm:key_requests_refused_total{key="bob"} 0.0',
        ):
            assert line in text
        assert "nobody-known" not in text
        assert not any(key in text for key in (*keys.values(), "sesame"))
        remove_key(path, "ann")
        await client.get("/v1/models", headers=bearer("sesame"))
        assert 'key="ann"' not in (await client.get("/metrics")).text


async def test_a_single_key_has_no_metrics_of_its_own() -> None:
    async with client_for(ScriptedLLM(config_with(api_key="sesame"))) as client:
        assert "key_requests" not in (await client.get("/metrics")).text


@pytest.mark.parametrize("layout", ["paged", "slots"])
async def test_the_engines_counts_arrive_and_the_log_has_the_name(
    path: Path, keys: dict[str, str], layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cllm")
    async with running(path, layout) as client:
        app: Any = client._transport.app  # type: ignore[attr-defined]
        app.state.cllm.serves.default.observers.append(RequestLog())
        for _ in range(2):
            await client.post("/v1/completions", json=PATHS["/v1/completions"], headers=bearer(keys["bob"]))
        text = (await client.get("/metrics")).text
    assert 'cllm:key_requests_total{key="bob"} 2.0' in text
    assert 'cllm:key_prompt_tokens_total{key="bob"} 400.0' in text
    assert 'cllm:key_prompt_tokens_cached_total{key="bob"} 192.0' in text or layout == "slots"
    assert 'cllm:key_generation_tokens_total{key="bob"} 6.0' in text
    lines = [line for line in caplog.records if "prompt 200" in line.getMessage()]
    assert len(lines) == 2
    assert all("key bob" in line.getMessage() and line.fields["key"] == "bob" for line in lines)  # type: ignore[attr-defined]
    assert keys["bob"] not in caplog.text

"""What one key may learn of others, and for how long: several models, pins, and streams that outlive a key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from cllm.config import Config, ServerConfig
from cllm.llm import AsyncLLM
from cllm.served import ServedModels
from cllm.server.app import create_app
from cllm.server.auth import tenants
from cllm.server.auth.key_file import add_key, remove_key
from cllm.server.auth.tenants import Tenants
from http_kit import served
from native_kit import write_model
from served_models import config as config_of_several

LIMIT_S = 60.0


@pytest.fixture
def ann(path: Path) -> str:
    return add_key(path, "ann", None)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@asynccontextmanager
async def requested(serves: Any, config: Config) -> AsyncIterator[httpx.AsyncClient]:
    await serves.start()
    try:
        transport = httpx.ASGITransport(app=create_app(serves, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client
    finally:
        await serves.shutdown(0)


# -- streams -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loses", [lambda path: remove_key(path, "ann"), lambda path: None], ids=["its key is removed", "another one comes"]
)
async def test_the_pages_stream_ends_with_the_right_to_it(
    path: Path, ann: str, loses: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that is alone sees all; once it is removed, or not alone any more, it does not."""
    monkeypatch.setattr(tenants, "LOOK_EVERY_S", 0.0)
    config = Config.model_validate({"backend": {"type": "fake"}, "server": {"api_keys": str(path)}})
    async with (
        AsyncLLM(config) as llm,
        served(cast(Any, llm)) as app,
        httpx.AsyncClient(base_url=app.url, timeout=LIMIT_S) as client,
        client.stream("GET", "/kv/stream", headers=bearer(ann)) as stream,
    ):
        assert stream.status_code == 200
        events = stream.aiter_lines()
        await anext(events)
        add_key(path, "bob", None)
        loses(path)

        async def rest() -> None:
            async for _ in events:
                pass

        await asyncio.wait_for(rest(), LIMIT_S)
        assert (await client.get("/kv/stream", headers=bearer(ann))).status_code in (401, 403)


# -- several models ------------------------------------------------------------------------------------------------


async def test_what_others_do_to_models_is_for_the_operator(path: Path, ann: str, tmp_path: Path) -> None:
    file = write_model(tmp_path / "tiny.gguf")
    entries = [{"name": str(file), "aliases": ["chat", "small"]}, {"name": str(file), "aliases": ["other"]}]
    config = config_of_several(
        *entries,
        backend__type="native",
        backend__threads=1,
        kv__disk__enabled=False,
        resources__max_memory_mb=64.0,
        server__api_keys=str(path),
        server__api_key="sesame",
    )
    several = ServedModels(config)
    async with requested(several, config) as client:
        several.models[0].error = "/somewhere/private is damaged"
        await several.acquire(several.models[0])
        for url in ("/v1/models", "/v1/models/chat"):
            answer = (await client.get(url, headers=bearer(ann))).json()
            (card, *_) = answer.get("data", [answer])
            assert (card["id"], card["state"], card["aliases"]) == ("chat", "ready", ["small"])
            assert (card["requests"], card["error"], card["kv_bytes"]) == (None, None, None)
            answer = (await client.get(url, headers=bearer("sesame"))).json()
            (card, *_) = answer.get("data", [answer])
            assert (card["requests"], card["error"]) == (1, "/somewhere/private is damaged")
            assert card["kv_bytes"] is not None and {"small", str(file)} <= set(card["aliases"])
        several.models[0].release()


# -- pins ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["paged", "slots"])
async def test_how_much_all_have_pinned_is_for_the_operator(path: Path, ann: str, layout: str) -> None:
    config = Config.model_validate(
        {
            "backend": {"type": "fake", "fake": {"layout": layout}},
            "resources": {"kv_cache_max_memory_mb": 0.25, "max_context_length": 512},
            "kv": {"pin_limit": 0.01},
            "server": {"api_keys": str(path), "api_key": "sesame"},
        }
    )
    async with requested(AsyncLLM(config), config) as client:
        for key, has_numbers in ((ann, False), ("sesame", True)):
            answer = await client.post("/kv/warm", json={"prompt": "x" * 500}, headers=bearer(key))
            message = answer.json()["error"]["message"]
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "not_pinned")
            assert "kv.pin_limit" in message and ("kv.pin_limit allows are pinned" in message) is has_numbers


# -- the operator's space ------------------------------------------------------------------------------------------


def test_a_new_operators_key_is_a_new_space(path: Path, ann: str) -> None:
    def space(key: str) -> bytes:
        caller = Tenants(ServerConfig(api_keys=path, api_key=key)).find(key.encode())
        assert caller is not None and caller.tenant.name == "api_key"
        return caller.tenant.space

    assert space("sesame") == space("sesame") != space("another")

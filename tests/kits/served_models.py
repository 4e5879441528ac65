"""Several models on the fake backend behind an app, and requests to them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from cllm.config import Config, load_config
from cllm.served import ServedModels
from cllm.server.app import create_app


def config(*entries: Any, **settings: Any) -> Config:
    flags: dict[str, Any] = {"backend.type": "fake", "models": list(entries), "resources.max_memory_mb": 1.0}
    flags |= {key.replace("__", "."): value for key, value in settings.items()}
    return load_config(None, flags, {}).config


@asynccontextmanager
async def serving(*entries: Any, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, ServedModels]]:
    settings_of_all = config(*entries, **settings)
    served = ServedModels(settings_of_all)
    transport = httpx.ASGITransport(app=create_app(served, settings_of_all))
    await served.start()
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client, served
    finally:
        await served.shutdown(0)
    assert served.memories["cpu"].ledger.free == served.memories["cpu"].ledger.budget - sum(
        each.fixed + each.kv for each in served.account_status()
    )


async def complete(client: httpx.AsyncClient, model: str | None, prompt: str = "hello", **more: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **({"model": model} if model else {}), **more}
    return await client.post("/v1/completions", json=body)


async def states(client: httpx.AsyncClient) -> dict[str, str]:
    return {card["id"]: card["state"] for card in (await client.get("/v1/models")).json()["data"]}

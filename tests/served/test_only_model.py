"""A server with one model: a set of one, which stays loaded and has all the memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from cllm.config import Config, load_config
from cllm.errors import ModelError
from cllm.llm import AsyncLLM
from cllm.served import ModelSet, only_model, open_models
from cllm.server.app import create_app
from served_models import complete


@asynccontextmanager
async def serving_one(**settings: object) -> AsyncIterator[tuple[httpx.AsyncClient, ModelSet]]:
    config = load_config(None, {"backend.type": "fake", "model.name": "tiny", **settings}, {}).config
    served = open_models(config, before_mapping=lambda: None)
    app = create_app(served, config)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")
    async with app.router.lifespan_context(app), client:
        yield client, served
    assert not served.ready


async def test_it_answers_to_its_names_and_to_none() -> None:
    async with serving_one(**{"model.alias": "short"}) as (client, _):
        for name in ("short", "tiny", None):
            answer = await complete(client, name)
            assert (answer.status_code, answer.json()["model"]) == (200, "short")
        answer = await complete(client, "other")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert answer.json()["error"]["message"] == "The model 'other' does not exist; available: 'short'."


async def test_what_only_several_models_have_is_not_there() -> None:
    async with serving_one() as (client, _):
        listed = (await client.get("/v1/models")).json()
        assert listed.keys() == {"object", "data"} and "state" not in listed["data"][0]
        assert not {"model", "models"} & (await client.get("/kv")).json().keys()
        assert (await client.post("/models/load", json={"model": "tiny"})).status_code == 404
        assert "/models/load" not in (await client.get("/openapi.json")).json()["paths"]


async def test_a_request_gives_its_lease_back() -> None:
    async with serving_one() as (client, served):
        assert (await complete(client, None)).status_code == 200
        assert (await complete(client, None, stream=True)).status_code == 200
        assert (await complete(client, None, max_tokens=-1)).status_code == 400
        assert served.default.users == 0


async def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    config = Config.model_validate({"model": {"name": str(tmp_path / "broken.gguf")}})
    served = only_model(AsyncLLM(config), config)
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        await served.start()
    assert not served.ready
    await served.shutdown(0)

"""Rolling windows from outside: every endpoint, the Python API, settings, and how wrong ones are refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from cllm import LLM, AsyncLLM, ContextWindow, SamplingParams
from cllm.config import Config, load_config
from cllm.errors import ConfigError, InvalidRequestError
from cllm.server.app import create_app

CONTEXT = 128
FAKE = {"backend.type": "fake", "resources.max_context_length": CONTEXT, "log.level": "error"}
WINDOW = {"keep": 4, "recent": 64}


def config(**settings: Any) -> Config:
    return load_config(None, {**FAKE, **{key.replace("__", "."): value for key, value in settings.items()}}).config


@asynccontextmanager
async def client(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with AsyncLLM(config(**settings)) as llm:
        transport = httpx.ASGITransport(app=create_app(llm, llm.config), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as opened:
            yield opened


ENDPOINTS = {
    "/v1/completions": {"prompt": "on and on", "max_tokens": 300, "ignore_eos": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "on and on"}],
        "max_completion_tokens": 300,
        "ignore_eos": True,
    },
    "/generate": {"prompt": "on and on", "max_tokens": 300, "ignore_eos": True},
}


def tokens_of(reply: dict[str, Any]) -> tuple[int, str]:
    if "usage" in reply:
        return reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]
    return reply["data"]["generated_tokens"], reply["data"]["finish_reason"]


@pytest.mark.parametrize("layout", ["paged", "slots"])
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_an_answer_goes_on_beyond_the_context(path: str, layout: str) -> None:
    body = ENDPOINTS[path]
    async with client(backend__fake__layout=layout) as http:
        reply = await http.post(path, json={**body, "context_window": WINDOW})
        assert reply.status_code == 200, reply.text
        assert tokens_of(reply.json()) == (300, "length")
        plain = await http.post(path, json={**body, "context_window": None})
        assert tokens_of(plain.json())[1] == "length" and tokens_of(plain.json())[0] < CONTEXT
        metrics = (await http.get("/metrics")).text
        dropped = next(line for line in metrics.splitlines() if line.startswith("cllm:kv_window_dropped_tokens_total{"))
        assert float(dropped.rpartition(" ")[2]) >= 192


async def test_a_stream_goes_on_beyond_the_context() -> None:
    async with client() as http:
        reply = await http.post("/generate_stream", json={**ENDPOINTS["/generate"], "context_window": WINDOW})
    assert '"generated_tokens":300' in reply.text.replace(" ", "")


async def test_the_configured_window_is_the_default_and_null_switches_it_off() -> None:
    body = ENDPOINTS["/v1/completions"]
    async with client(kv__window__recent=64) as http:
        assert tokens_of((await http.post("/v1/completions", json=body)).json())[0] == 300
        plain = await http.post("/v1/completions", json={**body, "context_window": None})
        assert tokens_of(plain.json())[0] == CONTEXT - len("on and on")
        own = await http.post("/v1/completions", json={**body, "context_window": {"recent": 32}})
        assert tokens_of(own.json())[0] == 300


async def test_prompts_may_be_longer_than_the_context() -> None:
    long = {"prompt": "x" * 1000, "max_tokens": 4}
    async with client(server__max_encode_tokens=2000) as http:
        refused = await http.post("/v1/completions", json=long)
        assert (
            refused.status_code == 400 and "maximum context length is 128 tokens" in refused.json()["error"]["message"]
        )
        taken = await http.post("/v1/completions", json={**long, "context_window": WINDOW})
        assert taken.json()["usage"]["prompt_tokens"] == 1000
        too_long = await http.post("/v1/completions", json={**long, "prompt": "x" * 3000, "context_window": WINDOW})
        assert too_long.status_code == 400 and "server.max_encode_tokens" in too_long.json()["error"]["message"]


@pytest.mark.parametrize(
    ("window", "param", "message"),
    [
        (
            {"recent": 8},
            "context_window.recent",
            "context_window.recent is 8; it must be a whole number of at least 16",
        ),
        ({"recent": 64, "keep": -1}, "context_window.keep", "at least 0"),
        ({"keep": 4}, "context_window.recent", "is missing"),
        ({"recent": 64, "size": 1}, "context_window.size", "is not a parameter"),
        (64, "context_window", "must be an object"),
        ({"recent": 128}, "context_window", "needs memory for 176 (16 + 128, and 32 between two drops)"),
        ({"recent": 32, "keep": 100}, "context_window", "the context is 128"),
    ],
)
async def test_a_wrong_window_is_refused_by_name(window: Any, param: str, message: str) -> None:
    async with client() as http:
        for path, body in ENDPOINTS.items():
            reply = await http.post(path, json={**body, "context_window": window})
            assert reply.status_code == 400
            error = reply.json()["error"]
            assert error["param"] == param and message in error["message"], error


async def test_log_probabilities_beyond_the_context_are_counted() -> None:
    body = {"prompt": "a", "max_tokens": 500, "logprobs": 1, "context_window": WINDOW}
    async with client(server__max_logprobs=900) as http:
        refused = await http.post("/v1/completions", json=body)
        assert refused.status_code == 400 and "500 tokens x 2 log probabilities" in refused.json()["error"]["message"]


@pytest.mark.single
async def test_who_runs_shows_what_was_dropped() -> None:
    async with AsyncLLM(config()) as llm:
        params = SamplingParams(max_tokens=100_000, ignore_eos=True, context_window=ContextWindow(64))
        generation = llm.submit("on and on", params)
        async for _ in generation:
            running = llm.executor.kv()["details"]["running"]
            if running and running[0]["dropped"] >= 96:
                break
        assert running[0]["blocks"] * 16 <= 128 < running[0]["computed"]
        await generation.aclose()


def test_a_configured_window_that_cannot_be_had_is_an_error_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"kv\.window: a window of 4 kept and 120 recent tokens needs"):
        LLM(backend="fake", settings={"resources.max_context_length": CONTEXT, "kv.window.recent": 120})
    with pytest.raises(ConfigError, match=r"kv\.window\.recent is 3"):
        load_config(None, {"kv.window.recent": 3})


def test_a_window_is_a_whole_number_of_tokens() -> None:
    for wrong in (True, 64.0, "64", 15, 1 << 31):
        with pytest.raises(InvalidRequestError, match=r"context_window\.recent"):
            ContextWindow(recent=wrong)  # type: ignore[arg-type]


def test_the_python_api() -> None:
    with LLM(backend="fake", settings={"resources.max_context_length": CONTEXT}) as llm:
        params = SamplingParams(
            max_tokens=300, ignore_eos=True, temperature=0, context_window=ContextWindow(64, keep=8)
        )
        windowed, again = llm.generate(["once upon a time"] * 2, params, progress=False)
        assert len(windowed.token_ids) == 300 and windowed.text == again.text
        plain = llm.generate("once upon a time", SamplingParams(max_tokens=300, ignore_eos=True, temperature=0))[0]
        assert plain.finish_reason == "length" and len(plain.token_ids) == CONTEXT - 16
        assert windowed.token_ids[:60] == plain.token_ids[:60]

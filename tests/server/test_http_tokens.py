"""`/tokenize` and its kin, in vLLM's forms and in llama-server's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

import cllm
from cllm.config import load_config
from cllm.llm import AsyncLLM
from cllm.server.app import create_app

CHAT = [{"role": "user", "content": "Hi <eos>"}]


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with serving({}) as client:
        yield client


@asynccontextmanager
async def serving(flags: dict[str, Any]) -> AsyncIterator[httpx.AsyncClient]:
    config = load_config(None, {"backend.type": "fake", "server.max_encode_tokens": 2000, **flags}, {}).config
    async with AsyncLLM(config) as llm:
        transport = httpx.ASGITransport(app=create_app(llm, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_text_in_vllms_form(client: httpx.AsyncClient) -> None:
    assert await post(client, "/tokenize", prompt="Hé") == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [72, 0xC3, 0xA9],
        "token_strs": None,
    }
    assert (await post(client, "/tokenize", prompt="Hi", return_token_strs=True))["token_strs"] == ["H", "i"]
    assert (await post(client, "/tokenize", prompt="<eos>"))["tokens"] == [257]
    assert (await post(client, "/tokenize", content="<eos>", parse_special=False))["count"] == 5
    assert (await post(client, "/tokenize", prompt=""))["tokens"] == []


async def test_what_says_nothing_about_a_chat_goes_with_a_text(client: httpx.AsyncClient) -> None:
    nothing = {"tools": [], "chat_template_kwargs": {}, "continue_final_message": False}
    assert await post(client, "/tokenize", prompt="Hi", **nothing) == await post(client, "/tokenize", prompt="Hi")


async def test_a_text_in_llama_servers_form(client: httpx.AsyncClient) -> None:
    assert (await post(client, "/tokenize", content="a<eos>"))["tokens"] == [97, 257]
    assert (await post(client, "/tokenize", content="<eos>", parse_special=False))["count"] == 5
    pieces = (await post(client, "/tokenize", content="a<eos>", with_pieces=True))["tokens"]
    assert pieces == [{"id": 97, "piece": "a"}, {"id": 257, "piece": "<eos>"}]
    of_one_character = (await post(client, "/tokenize", content="é", with_pieces=True))["tokens"]
    assert of_one_character == [{"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}]


async def test_a_chat_has_the_tokens_of_its_prompt(client: httpx.AsyncClient) -> None:
    tokens = (await post(client, "/tokenize", messages=CHAT))["tokens"]
    answer = await post(client, "/v1/chat/completions", messages=CHAT, max_tokens=1)
    assert len(tokens) == answer["usage"]["prompt_tokens"]
    shorter = (await post(client, "/tokenize", messages=CHAT, add_generation_prompt=False))["tokens"]
    assert tokens[: len(shorter)] == shorter
    assert len(shorter) < len(tokens)
    for path in ("/apply-template", "/v1/chat/completions/render"):
        rendered = await post(client, path, messages=CHAT)
        assert rendered["prompt_token_ids"] == tokens
        assert rendered["prompt"] == "<|im_start|>user\nHi <eos><|im_end|>\n<|im_start|>assistant\n"


async def test_a_chat_with_all_that_makes_its_prompt(client: httpx.AsyncClient) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    started = [*CHAT, {"role": "assistant", "content": "Well"}]
    for extra in ({"tools": [tool]}, {"messages": started, "continue_final_message": True}):
        body = {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}, **extra}
        rendered = await post(client, "/apply-template", **body)
        assert (await post(client, "/tokenize", **body))["tokens"] == rendered["prompt_token_ids"]


async def test_a_chat_may_be_longer_than_the_context() -> None:
    async with serving({"resources.max_context_length": 256}) as client:
        assert (await post(client, "/tokenize", messages=[{"role": "user", "content": "x" * 1000}]))["count"] > 1000


async def test_tokens_become_text_again(client: httpx.AsyncClient) -> None:
    back = await post(client, "/detokenize", tokens=[72, 105, 257])
    assert back == {"prompt": "Hi<eos>", "content": "Hi<eos>"}
    assert (await post(client, "/detokenize", tokens=[]))["prompt"] == ""


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "content"),
        ("/tokenize", {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ("/tokenize", {"content": "a", "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"prompt": "x" * 2001}, "prompt"),
        ("/tokenize", {"content": "x" * 100_000}, "content"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ("/detokenize", {"tokens": [1, 99999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1] * 2001}, "tokens"),
        ("/apply-template", {"messages": []}, "messages"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_what_cannot_be_done_is_refused_by_name(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    refused = await client.post(path, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_what_tokenizer_and_server_these_are(client: httpx.AsyncClient) -> None:
    info = (await client.get("/tokenizer_info")).json()
    assert (info["vocab_size"], info["add_bos_token"], info["eos_token_ids"]) == (320, False, [257])
    assert info["added_tokens_decoder"]["257"] == {"content": "<eos>", "special": True}
    assert "messages" in info["chat_template"]
    assert (await client.get("/version")).json() == {"version": cllm.__version__}

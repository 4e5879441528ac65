"""Completions beyond the plain ones: no tokens at all, the best of several, and filling in the middle."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cllm.config import load_config
from cllm.engine.sampling import TokenLogprob
from cllm.generation import Completion
from cllm.llm import AsyncLLM
from cllm.server.app import create_app
from cllm.server.openai.routes import keep_best
from cllm.text.infill import InfillTokens, find_infill_tokens
from http_kit import client_for
from scripted_llm import ScriptedLLM


async def post(llm: ScriptedLLM, body: dict[str, Any]) -> httpx.Response:
    async with client_for(llm) as client:
        return await client.post("/v1/completions", json=body)


@pytest.mark.single
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("n", [1, 3])
async def test_no_tokens_are_an_empty_answer_to_a_computed_prompt(path: str, n: int) -> None:
    config = load_config(None, {"backend.type": "fake"}, {}).config
    body = {"prompt": "hello"} if "chat" not in path else {"messages": [{"role": "user", "content": "hello"}]}
    async with AsyncLLM(config) as llm:
        transport = httpx.ASGITransport(app=create_app(llm, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = (await client.post(path, json={**body, "max_tokens": 0, "n": n})).json()
            computed = llm.executor.snapshot().prompt_tokens
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * n
    for choice in answer["choices"]:
        assert (choice["text"] if "text" in choice else choice["message"]["content"]) == ""
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == computed > 0


def answer(text: str, *logprobs: float) -> Completion:
    return Completion(text, logprobs=[TokenLogprob(0, each, []) for each in logprobs], finish_reason="stop")


def test_the_best_are_those_with_the_highest_mean() -> None:
    whole = [answer("a", -1, -1), answer("b", -0.1, -0.2, -0.3), answer("none"), answer("c", -0.5)]
    assert [each.text for each in keep_best(whole, 4, 2, with_logprobs=True)] == ["b", "c"]
    assert [each.text for each in keep_best(whole, 2, 1, with_logprobs=False)] == ["b", "c"]
    assert whole[1].logprobs is None


async def test_best_of_generates_more_than_it_gives() -> None:
    llm = ScriptedLLM()
    reply = (await post(llm, {"prompt": ["a", "b"], "n": 2, "best_of": 3, "max_tokens": 4})).json()
    assert [generation.request.params.n for generation in llm.generations] == [3, 3]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in reply["choices"])
    assert reply["usage"]["completion_tokens"] == 2 * 3 * 4


async def test_a_suffix_is_refused_where_the_vocabulary_has_no_tokens_for_it() -> None:
    error = (await post(ScriptedLLM(), {"prompt": "def f(", "suffix": "return 1"})).json()["error"]
    assert error["param"] == "suffix"
    assert "no tokens for filling in the middle" in error["message"]


async def test_a_suffix_goes_behind_the_prompt_with_the_models_tokens_around_it() -> None:
    llm = ScriptedLLM()
    async with client_for(llm) as client:
        llm.text.tokenizer.infill = InfillTokens(1, 2, 3)  # type: ignore[misc]
        for prompt in ("ab", [97, 98]):
            body = {"prompt": prompt, "suffix": "z"}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        body = {"prompt": "ab", "suffix": "z" * 64}
        too_long = (await client.post("/v1/completions", json=body)).json()["error"]
    assert [list(generation.prompt_ids) for generation in llm.generations] == [[1, 97, 98, 2, 122, 3]] * 2
    assert too_long["code"] == "context_length_exceeded"


def test_the_tokens_are_found_by_name_only_if_all_are_there() -> None:
    names = {"<|fim_prefix|>": 5, "<|fim_suffix|>": 7, "<|fim_middle|>": 6}
    assert find_infill_tokens(names) == InfillTokens(5, 7, 6)
    assert find_infill_tokens({"<|fim_prefix|>": 5, "<|fim_suffix|>": 7}) is None

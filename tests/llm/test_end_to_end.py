"""The real model, over real HTTP, with the real `openai` client, on each backend that runs it."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from thorough import slow

pytestmark = pytest.mark.model

SETTINGS = [
    "resources.max_context_length=1024",
    "resources.kv_cache_max_memory_mb=400",
    "backend.llama_cpp.n_seq_max=8",
    "scheduler.max_queue=400",
]
BLOCK_TOKENS = 16
"""Paged memory caches whole blocks; at least one token of a prompt is always computed."""
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module", params=["native", pytest.param("llama_cpp", marks=slow)])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    command = [sys.executable, "-m", "cllm", "serve", "smollm2", "--port", "0", "--backend", request.param]
    for setting in SETTINGS:
        command += ["--set", setting]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True)
    reader.start()
    line = process.stdout.readline()
    found = re.search(r"http://\S+", line)
    assert found, f"no URL in {line!r}; log: {''.join(log)}"
    assert f"(smollm2, {request.param})" in line
    yield found[0]
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0, "".join(log)
    assert "Traceback" not in "".join(log)


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def idle(url: str) -> bool:
    kv = httpx.get(f"{url}/kv").json()
    return bool(kv["referenced"] == 0 and kv["running"] == 0 and kv["waiting"] == 0)


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.02)


def test_chat_answers_sensibly(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=16)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens > 10


def test_streaming_gives_the_same_text_and_usage(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "smollm2",
        "prompt": "Once upon a time, there was",
        "temperature": 0,
        "max_tokens": 24,
    }
    whole = client.completions.create(**request)
    pieces, usage = [], None
    for event in client.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        pieces += [choice.text for choice in event.choices]
        usage = event.usage or usage
    assert "".join(pieces) == whole.choices[0].text
    assert usage is not None and usage.completion_tokens == 24
    assert len(pieces) > 10


def test_a_repeated_prompt_is_cached_and_the_answer_equal(client: openai.OpenAI) -> None:
    prompt = "The following is a list of facts about rivers. " * 12
    first, second = (
        client.completions.create(model="smollm2", prompt=prompt, temperature=0, max_tokens=16) for _ in range(2)
    )
    assert first.choices[0].text == second.choices[0].text
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None and cached >= second.usage.prompt_tokens - BLOCK_TOKENS


def test_a_prefix_computed_by_one_user_serves_another_while_the_first_still_runs(client: openai.OpenAI) -> None:
    shared = "You are a patient teacher who explains things step by step to children. " * 10
    stream = client.completions.create(
        model="smollm2", prompt=shared + "Why is the sky blue?", max_tokens=100, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(stream))
    other = client.completions.create(model="smollm2", prompt=shared + "What is rain?", max_tokens=4)
    stream.close()
    assert other.usage is not None and other.usage.prompt_tokens_details is not None
    assert (other.usage.prompt_tokens_details.cached_tokens or 0) >= 100


async def test_batched_equals_alone(url: str) -> None:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120)
    subjects = ["the sea", "a small dog", "bread", "winter", "music", "a train", "the moon", "gardens"]

    async def ask(subject: str) -> str:
        answer = await client.completions.create(
            model="smollm2", prompt=f"Write one sentence about {subject}:", temperature=0, max_tokens=12
        )
        return answer.choices[0].text

    together = await asyncio.gather(*(ask(subject) for subject in subjects))
    alone = [await ask(subject) for subject in subjects]
    assert together == alone


def test_a_conversation_reuses_its_history(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Name three colours."}]
    for turn, follow_up in enumerate(["Name two more.", "Which one is the brightest?"]):
        answer = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=24)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        if turn:
            assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > 20
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": follow_up},
        ]


def test_seeds_logprobs_stops_and_many_answers(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "smollm2", "prompt": "My favourite food is", "max_tokens": 12, "seed": 7}
    first = client.completions.create(**request, n=3, logprobs=2)
    second = client.completions.create(**request, n=3, logprobs=2)
    assert [choice.text for choice in first.choices] == [choice.text for choice in second.choices]
    assert len({choice.text for choice in first.choices}) > 1
    logprobs = first.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs)
    stopped = client.completions.create(
        model="smollm2", prompt="Count: 1, 2, 3,", temperature=0, max_tokens=40, stop=[" 6"]
    )
    assert stopped.choices[0].finish_reason == "stop" and " 6" not in stopped.choices[0].text


def test_too_long_a_prompt_is_refused_with_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"1024"):
        client.completions.create(model="smollm2", prompt="word " * 3000, max_tokens=1)


def test_a_megabyte_of_prompt_is_refused_and_disturbs_nobody(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="smollm2", prompt="x" * 1_000_000, max_tokens=1)
    assert client.completions.create(model="smollm2", prompt="Hi", max_tokens=1).choices


@pytest.mark.parametrize("prompt", ["\x00", "a\x00b", "\U0001f468‍\U0001f469‍\U0001f467", "<|im_end|>", " "])
def test_odd_prompts_are_answered(client: openai.OpenAI, prompt: str) -> None:
    answer = client.completions.create(model="smollm2", prompt=prompt, max_tokens=4)
    assert answer.usage is not None and answer.usage.prompt_tokens >= 1


def test_lone_surrogates_do_not_hurt(url: str) -> None:
    body = '{"model": "smollm2", "prompt": "a \\ud800 b", "max_tokens": 2}'
    answer = httpx.post(f"{url}/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=60)
    assert answer.status_code in (200, 400), answer.text


def test_cllm_endpoints_answer(url: str) -> None:
    body = {"prompt": "The sun is", "max_tokens": 8, "temperature": 0}
    data = httpx.post(f"{url}/generate", json=body, timeout=60).json()
    assert data["success"] and data["data"]["generated_tokens"] == 8 and data["data"]["text"]
    lines = httpx.post(f"{url}/generate_stream", json=body, timeout=60).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(event.get("text", "") for event in events if not event.get("done")) == data["data"]["text"]
    assert httpx.post(f"{url}/encode", json={"text": "hello world"}).json()["data"]["length"] == 2
    info = httpx.get(f"{url}/model/info").json()
    assert "llama" in json.dumps(info)
    assert httpx.get(f"{url}/health").status_code == 200 and httpx.get(f"{url}/ready").status_code == 200


def test_metrics_tell_of_the_cache(url: str) -> None:
    text = httpx.get(f"{url}/metrics").text
    for name in ("prefix_cache_hits", "kv_bytes", "time_to_first_token_seconds_count", "kv_cache_usage_perc"):
        assert f"cllm:{name}" in text


@pytest.mark.parametrize("when", ["queued or prefill", "decode"])
def test_a_client_that_leaves_frees_everything(url: str, when: str) -> None:
    body = {
        "model": "smollm2",
        "prompt": "Tell me a story. " * 100,
        "max_tokens": 500,
        "stream": True,
        "ignore_eos": True,
    }
    timeout = httpx.Timeout(60, read=0.05) if when != "decode" else httpx.Timeout(60)
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=timeout) as answer:
            next(answer.iter_lines())
    except httpx.ReadTimeout:
        assert when != "decode"
    wait_until(lambda: idle(url))


async def test_two_hundred_clients_that_come_go_and_cancel(url: str) -> None:
    rng = random.Random(3)
    limits = httpx.Limits(max_connections=64)
    outcomes: list[str] = []

    async def visit(http: httpx.AsyncClient, number: int) -> None:
        prompt = "A shared beginning of some length for everyone. " * rng.randint(0, 3) + f"Visitor {number}:"
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": rng.randint(1, 6), "stream": rng.random() < 0.5}
        patience = rng.choice([0.05, 0.5, 120.0])
        await asyncio.sleep(rng.random())
        try:
            answer = await asyncio.wait_for(http.post(f"{url}/v1/completions", json=body), patience)
            assert answer.status_code == 200, answer.text
            outcomes.append("answered")
        except asyncio.TimeoutError:
            outcomes.append("left")

    async with httpx.AsyncClient(timeout=180, limits=limits) as http:
        await asyncio.gather(*(visit(http, number) for number in range(200)))
    assert len(outcomes) == 200 and {"answered", "left"} == set(outcomes)
    await asyncio.to_thread(wait_until, lambda: idle(url))


def test_memory_and_latency_stay_where_they_are(url: str, client: openai.OpenAI) -> None:
    """Not a timing: the cache's own counters must not grow over many short requests."""
    for _ in range(30):
        client.completions.create(model="smollm2", prompt="One two three", max_tokens=1)
    before = httpx.get(f"{url}/kv").json()
    for _ in range(60):
        client.completions.create(model="smollm2", prompt="One two three", max_tokens=1)
    after = httpx.get(f"{url}/kv").json()
    assert after["evictable"] == before["evictable"] and after["sequences_held"] == before["sequences_held"]


def test_the_three_chat_apis_give_one_answer_and_share_its_prompt(url: str, client: openai.OpenAI) -> None:
    """Each finds in the cache what the one before it has computed; counted and charged tokens are the same."""
    words = "Tell me in one sentence what a prefix cache is good for, and why conversations profit from it."
    history: Any = [{"role": "user", "content": words}]
    chat = client.chat.completions.create(model="smollm2", messages=history, max_tokens=12, temperature=0)
    response = client.responses.create(model="smollm2", input=words, max_output_tokens=12, temperature=0)
    other = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
    asked: Any = {"model": "smollm2", "messages": history, "max_tokens": 12, "extra_body": {"temperature": 0}}
    message = other.messages.create(**asked)
    with other.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    text = chat.choices[0].message.content
    assert text and text == response.output_text == message.content[0].text == streamed.content[0].text
    assert chat.usage is not None and response.usage is not None
    tokens = chat.usage.prompt_tokens
    counted = other.messages.count_tokens(model="smollm2", messages=history)
    read = message.usage.cache_read_input_tokens or 0
    assert tokens == response.usage.input_tokens == counted.input_tokens == message.usage.input_tokens + read
    assert min(response.usage.input_tokens_details.cached_tokens, read) >= tokens - 1 - BLOCK_TOKENS

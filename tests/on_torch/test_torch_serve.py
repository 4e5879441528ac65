"""The whole server on torch: a small model in a Hugging Face directory, over real HTTP, and the commands beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from server_process import Served, serving, until
from torch_kit import build, save_whole

SETTINGS = (
    "backend.torch.device=cpu",
    "backend.threads=1",
    "resources.kv_type_k=f32",
    "resources.kv_type_v=f32",
    "resources.kv_cache_max_memory_mb=8",
)
MODEL = "tiny-llama"
LONG = "Water runs down the hill, and nobody has ever asked it why. " * 4
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whole(build("llama", max_position_embeddings=4096), tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Served]:
    with serving(f"model.name={directory}", *SETTINGS, backend="auto") as served:
        yield served
        assert served.idle()
        assert not served.logged("Traceback") and not served.logged("error")


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def complete(client: openai.OpenAI, prompt: str, **changes: Any) -> Any:
    return client.completions.create(**(GREEDY | {"prompt": prompt} | changes))


def test_it_says_what_runs(server: Served, client: openai.OpenAI) -> None:
    assert client.models.list().data[0].id == MODEL
    assert server.logged("torch ") and server.logged("weights f32, K/V f32, 1 thread")
    assert f"Loading {MODEL} ..." in "".join(server.lines)
    assert httpx.get(f"{server.url}/model/info").json()["data"]["backend"] == "torch"


def test_streamed_and_whole_answers_are_equal(client: openai.OpenAI) -> None:
    whole = complete(client, "once upon a time")
    stream = complete(client, "once upon a time", stream=True, stream_options={"include_usage": True})
    pieces, usage = [], None
    for event in stream:
        pieces += [choice.text for choice in event.choices]
        usage = event.usage or usage
    assert "".join(pieces) == whole.choices[0].text != "" and len(pieces) > 3
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens == 12


def test_chats(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": LONG}, {"role": "user", "content": "hello"}]
    first = client.chat.completions.create(messages=messages, **GREEDY)
    assert first.choices[0].finish_reason == "length" and first.usage is not None
    messages += [{"role": "assistant", "content": "hm"}, {"role": "user", "content": "again"}]
    stream = client.chat.completions.create(messages=messages, stream=True, **GREEDY)
    text = "".join(event.choices[0].delta.content or "" for event in stream)
    again = client.chat.completions.create(messages=messages, **GREEDY)
    assert again.choices[0].message.content == text
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == (again.usage.prompt_tokens - 1) // 16 * 16 > 200


def test_a_shared_beginning_is_computed_once(server: Served, client: openai.OpenAI) -> None:
    shared = "A beginning that many have in common. " * 6
    before = httpx.get(f"{server.url}/kv").json()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: complete(client, f"{shared}{number}"), range(8)))
    after = httpx.get(f"{server.url}/kv").json()
    computed = sum(answer.usage.prompt_tokens - answer.usage.prompt_tokens_details.cached_tokens for answer in answers)
    assert computed < 2 * answers[0].usage.prompt_tokens
    assert after["hit_tokens"] - before["hit_tokens"] > 7 * (len(shared) - 16)
    for number, answer in enumerate(answers):
        assert complete(client, f"{shared}{number}").choices[0].text == answer.choices[0].text


def test_seeds_and_several_answers(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 7}
    first, second = (complete(client, "a seed", n=3, **options) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices] and len(set(texts)) == 3


def test_log_probabilities_are_those_of_the_greedy_choice(client: openai.OpenAI) -> None:
    found = complete(client, "tell me", logprobs=3).choices[0].logprobs
    assert len(found.token_logprobs) == 12 and all(value <= 0 for value in found.token_logprobs)
    for value, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert value == pytest.approx(max(top.values()), abs=1e-6)


def test_penalties_biases_and_stops(client: openai.OpenAI) -> None:
    plain = complete(client, "hello").choices[0].text
    assert complete(client, "hello", presence_penalty=2.0, frequency_penalty=2.0).choices[0].text != plain
    only = complete(client, "hello", logit_bias={"100": 100}).choices[0].text
    assert len(set(only)) == 1
    stopped = complete(client, "hello", stop=[plain[2]]).choices[0]
    assert stopped.finish_reason == "stop" and stopped.text == plain[: plain.index(plain[2])]


def test_a_client_that_leaves_frees_everything(server: Served) -> None:
    body = {"model": MODEL, "prompt": LONG, "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ") and server.running() == 1
    until(server.idle)
    assert httpx.post(f"{server.url}/v1/completions", json=body | {"stream": False, "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/generate", {"prompt": "hello"}),
    ],
)
def test_a_rolling_window_is_refused_by_name(server: Served, path: str, body: dict[str, Any]) -> None:
    window = {"context_window": {"keep": 4, "recent": 64}}
    reply = httpx.post(f"{server.url}{path}", json=body | window, timeout=60)
    assert reply.status_code == 400 and "rolling windows are not available: torch cannot drop tokens" in reply.text
    assert "context_window" in reply.text


def test_a_prompt_that_is_too_long_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="4096"):
        complete(client, "x" * 5000)


def test_metrics_memory_and_the_page(server: Served, client: openai.OpenAI) -> None:
    complete(client, LONG)
    metrics = httpx.get(f"{server.url}/metrics").text
    for name in ("prefix_cache_hits_total", "kv_bytes", "time_to_first_token_seconds_count"):
        assert f'cllm:{name}{{model_name="{MODEL}"' in metrics
    kv = httpx.get(f"{server.url}/kv").json()
    assert kv["layout"] == "paged" and kv["unit_tokens"] == 16
    assert kv["free"] + kv["evictable"] + kv["referenced"] == kv["total"]
    assert kv["bytes"]["total"] <= 8 << 20 and kv["bytes_per_token"] == 3 * 2 * 2 * 16 * 4
    page = httpx.get(f"{server.url}/")
    assert page.status_code == 200 and "<html" in page.text
    with httpx.stream("GET", f"{server.url}/kv/stream", timeout=60) as response:
        assert next(line for line in response.iter_lines() if line) == "event: whole"


# -- commands ------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cllm", *arguments[:1]]
    for setting in SETTINGS[1:]:
        command += ["--set", setting]
    command += arguments[1:]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_generate(directory: Path, client: openai.OpenAI) -> None:
    ran = run(
        "generate", "once upon a time", "-m", str(directory), "-t", "0", "-n", "12", "--device", "cpu", "--json", "-"
    )
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    assert answer["backend"] == "torch" and answer["model"] == MODEL and answer["prompt_tokens"] == 16
    expected = complete(client, "once upon a time", extra_body={}).choices[0]
    assert (answer["text"], answer["finish_reason"]) == (expected.text, expected.finish_reason)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cuda"], "backend.torch.device is cuda, but "),
        (["--backend", "torch", "--device", "cuda:7"], "backend.torch.device is cuda:7, but "),
        (["--set", "kv.window.recent=64"], "kv.window: rolling windows are not available: torch cannot"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], said: str, directory: Path) -> None:
    ran = run("serve", str(directory), "--port", "0", *arguments)
    lines = [line for line in ran.stderr.splitlines() if not line.startswith(("info", "Loading"))]
    assert ran.returncode == 2 and said in lines[-1], ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_gguf_file_and_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    from native_kit import write_model

    ran = run("generate", "hello", "-m", str(write_model(tmp_path / "tiny.gguf")), "--device", "cuda")
    assert ran.returncode == 2 and "backend.torch.device is cuda, but " in ran.stderr

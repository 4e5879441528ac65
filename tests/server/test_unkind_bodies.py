"""Bodies that cost as much as a body may: others' streams go on, and what is too much is refused by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cllm.backends.base import Chunk, StepResult
from cllm.backends.fake import FakeBackend
from cllm.config import Config
from cllm.config.schema import ResourcesConfig
from cllm.llm import AsyncLLM
from cllm.loading.text_model import INLINE
from cllm.server.app import create_app
from cllm.server.schema.body import INLINE_BYTES, MAX_DEPTH, MAX_PARAMETERS
from cllm.text.detokenizer import MAX_STOP_CHARACTERS
from cllm.text.tokenizer import PIECE
from event_loop import LoopTimes, Reply, post
from thorough import sampled

pytestmark = pytest.mark.alone  # it measures how long the event loop is held up

T = TypeVar("T")

MOST_CPU_S = 0.020
CONTEXT = 4096
LIMITS = Config.model_validate(
    {
        "backend": {"type": "fake"},
        "resources": {"max_context_length": CONTEXT},
        # As many as make several slices; the default ones would take half a minute to compute.
        "server": {"max_logprobs": 20_000, "max_encode_tokens": 40_000},
        "log": {"level": "error"},
    }
)
SERVER = LIMITS.server
FITTING_MESSAGES = 145
"""Empty ones that the context holds: each takes 28 tokens in the fake model's template."""


class Served:
    """The app on a loop of its own, which runs only while a request is answered."""

    def __init__(self, config: Config = LIMITS) -> None:
        self._loop = asyncio.new_event_loop()
        self.llm = AsyncLLM(config)
        self.app: FastAPI = create_app(self.llm, config)
        self.run(self.llm.start())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        self.run(self.llm.shutdown(0))
        self._loop.close()


class LongContext(FakeBackend):
    """Computes nothing, so that a very long prompt is soon done."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**(settings | {"context_length": 300_000}))

    def collect(self, chunks: Sequence[Chunk]) -> StepResult:
        wanted = sum(chunk.wanted_logits for chunk in chunks)
        return StepResult(np.zeros((wanted, self.spec.n_vocab), np.float32))


@pytest.fixture
def long_served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """With a context that holds as many tokens as a body may."""
    monkeypatch.setattr("cllm.backends.fake.FakeBackend", LongContext)
    resources = {"max_context_length": 300_000, "kv_cache_max_memory_mb": 64}
    yield from serve(Served(LIMITS.model_copy(update={"resources": ResourcesConfig.model_validate(resources)})))


LONG = 8_000
"""Tokens of a prompt of which much is asked."""


class ScoringContext(FakeBackend):
    """With room for such a prompt."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**(settings | {"context_length": LONG + 500}))


@pytest.fixture
def scoring_served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """It may be asked for as many log probabilities as such a prompt can have."""
    monkeypatch.setattr("cllm.backends.fake.FakeBackend", ScoringContext)
    changes = {"resources": ResourcesConfig(), "server": SERVER.model_copy(update={"max_logprobs": 21 * LONG * 8})}
    yield from serve(Served(LIMITS.model_copy(update=changes)))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    yield from serve(Served())


def serve(server: Served) -> Iterator[Served]:
    for path in ("/v1/completions", "/generate", "/encode"):  # what the first request does once is done
        server.run(post(server.app, path, json.dumps({"prompt": "a", "text": "a"}).encode()))
    yield server
    server.close()


Body = tuple[str, bytes, bool]
"""Path, body, and whether it must be refused."""


def completion(refused: bool, **body: Any) -> Body:
    return "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 2, **body}).encode(), refused


def stop_token_ids(count: int, n: int) -> Body:
    return completion(count > SERVER.max_stop_token_ids, stop_token_ids=[7] * count, n=n)


def logit_bias(count: int, n: int) -> Body:
    # Ids are checked after their number, and this vocabulary has only 320.
    return completion(count > 320, logit_bias={str(token): 1 for token in range(count)}, n=n)


def prompts(count: int, n: int) -> Body:
    return completion(count * n > SERVER.max_prompts, prompt=["some words"] * count, n=n)


def lists_of_ids(count: int, n: int) -> Body:
    size = 2_000  # tokens in all lists together, so that the run is short; the JSON is what counts
    each = max(size // max(count, 1), 1)
    return completion(count * n > SERVER.max_prompts, prompt=[[65] * each] * count, n=n)


def token_ids(count: int, n: int) -> Body:
    ids = [number % 256 for number in range(count)]
    return completion(count >= CONTEXT, prompt=ids, n=n, echo=True, repetition_penalty=1.5, stream=n % 2 == 0)


def values(count: int, n: int) -> Body:
    return completion(count >= CONTEXT, prompt=[1] * count, n=n)


def text(count: int, n: int) -> Body:
    return completion(count >= CONTEXT, prompt="5" * count, n=n, echo=True)


def messages(count: int, n: int) -> Body:
    chat = {"messages": [{"role": "user", "content": ""}] * count, "max_tokens": 2, "n": n}
    return "/v1/chat/completions", json.dumps(chat).encode(), count > FITTING_MESSAGES


def unknown_keys(count: int, _n: int) -> Body:
    return completion(count > 0, **{f"key{number}": number for number in range(count)})


def nested_keys(count: int, n: int) -> Body:
    return completion(True, n=n, stream_options={f"key{number}": number for number in range(count)})


def depth(count: int, _n: int) -> Body:
    return "/v1/completions", b'{"prompt":' + b"[" * count + b"1" + b"]" * count + b"}", count > 2


def stop_strings(count: int, n: int) -> Body:
    return completion(count > SERVER.max_stop_strings, stop=[f"{number:05d}" for number in range(count)], n=n)


def stop_characters(count: int, n: int) -> Body:
    return completion(count > MAX_STOP_CHARACTERS, stop="".join(chr(97 + i * i % 26) for i in range(count)), n=n)


def logprobs(count: int, n: int) -> Body:
    """About `count` log probabilities in all."""
    tokens = max(count // (21 * n), 1)
    body = {"n": n, "max_tokens": tokens, "ignore_eos": True, "logprobs": 20, "stream": n % 2 == 0}
    return completion(n * tokens * 21 > SERVER.max_logprobs, **body)


def chat_logprobs(count: int, n: int) -> Body:
    tokens = max(count // (21 * n), 1)
    chat = {"messages": [{"role": "user", "content": "a"}], "n": n, "max_tokens": tokens, "ignore_eos": True}
    body = json.dumps({**chat, "logprobs": True, "top_logprobs": 20, "stream": n % 2 == 1}).encode()
    return "/v1/chat/completions", body, n * tokens * 21 > SERVER.max_logprobs


def encode(count: int, _n: int) -> Body:
    return "/encode", json.dumps({"text": "5" * count}).encode(), count > SERVER.max_encode_tokens


JUST_PARSED = SERVER.max_json_values - 20
"""Values that are not too many to be parsed, with what else the body holds."""

COSTLY: list[tuple[Callable[[int, int], Body], list[int]]] = [
    (stop_token_ids, [SERVER.max_stop_token_ids, INLINE_BYTES // 3, JUST_PARSED, SERVER.max_json_values]),
    (logit_bias, [320, SERVER.max_logit_bias, INLINE_BYTES // 8, SERVER.max_json_keys]),
    (prompts, [SERVER.max_prompts, INLINE_BYTES // 14, JUST_PARSED, SERVER.max_json_values]),
    (lists_of_ids, [SERVER.max_prompts, SERVER.max_json_values // 2]),
    (token_ids, [CONTEXT, INLINE_BYTES // 5]),
    (values, [CONTEXT, INLINE_BYTES // 3, JUST_PARSED, SERVER.max_json_values, SERVER.max_body_bytes // 3]),
    (text, [INLINE, CONTEXT, INLINE_BYTES, PIECE, CONTEXT * 5, SERVER.max_body_bytes - 100]),
    (messages, [FITTING_MESSAGES, SERVER.max_messages, SERVER.max_json_keys // 2]),
    (unknown_keys, [MAX_PARAMETERS, INLINE_BYTES // 14, SERVER.max_json_keys, 280_000]),
    (nested_keys, [INLINE_BYTES // 14, SERVER.max_json_keys, 280_000]),
    (depth, [3, MAX_DEPTH, 1000, SERVER.max_body_bytes // 2 - 100]),
    (stop_strings, [SERVER.max_stop_strings, INLINE_BYTES // 9, JUST_PARSED, SERVER.max_json_values]),
    (stop_characters, [MAX_STOP_CHARACTERS]),
    (logprobs, [SERVER.max_logprobs]),
    (chat_logprobs, [SERVER.max_logprobs]),
    (encode, [SERVER.max_encode_tokens, PIECE, SERVER.max_encode_tokens * 5]),
]
NAMED = {
    prompts: "prompt",
    lists_of_ids: "prompt",
    token_ids: "prompt",
    values: "prompt",
    text: "prompt",
    unknown_keys: "key0",
    nested_keys: "stream_options",
    stop_strings: "stop",
    stop_characters: "stop",
    chat_logprobs: "top_logprobs",
    encode: "text",
}
"""The parameter to blame, where it is not called as the function is."""
NEAR_A_LIMIT = st.sampled_from(COSTLY).flatmap(
    lambda costly: st.tuples(
        st.just(costly[0]),
        st.sampled_from(costly[1]).flatmap(lambda limit: st.integers(max(limit - 2, 1), limit + 2)),
        st.sampled_from([1, 2, 3, 64, 127, 128]),
    )
)


def answer(served: Served, path: str, body: bytes) -> Reply:
    """The answer, for which no callback may take long: at the third time at the latest, as a machine that is short of
    memory or cores makes any of them take longer now and then."""
    for _ in range(3):
        times = LoopTimes()
        with times.measured():
            reply = served.run(post(served.app, path, body))
        if times.worst <= MOST_CPU_S:
            break
    assert times.worst <= MOST_CPU_S, f"{times.worst * 1000:.0f} ms, three times in a row"
    return reply


def check(served: Served, make: Callable[[int, int], Body], count: int, n: int) -> None:
    path, body, refused = make(count, n)
    reply = answer(served, path, body)
    if len(body) > SERVER.max_body_bytes:
        assert reply.status == 413
    else:
        assert (reply.status == 400) is refused, reply.body[:300]
        assert reply.status in (200, 400)
    if reply.status == 400 and make is not depth and not (make is prompts and count == 1):
        param = json.loads(reply.body)["error"]["param"]
        assert param.partition(".")[0] == NAMED.get(make, make.__name__), reply.body[:300]


@pytest.mark.parametrize(("make", "limits"), COSTLY, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("n", [1, 128])
def test_at_and_above_every_limit_the_loop_is_free(
    served: Served, make: Callable[[int, int], Body], limits: list[int], n: int
) -> None:
    for limit in limits:
        for count in (limit, limit + 1):
            check(served, make, count, n)


@pytest.mark.parametrize("n", [1, 128])
def test_a_prompt_of_as_many_ids_as_a_body_may_hold_is_taken(long_served: Served, n: int) -> None:
    ids = [number % 320 for number in range(JUST_PARSED)]
    body = json.dumps({"prompt": ids, "max_tokens": 1, "n": n, "repetition_penalty": 1.5}).encode()
    reply = answer(long_served, "/v1/completions", body)
    assert reply.status == 200, reply.body[:300]


ASKED_OF_LONG = {
    "prompt_logprobs": {"prompt_logprobs": 20},
    "echo": {"echo": True, "logprobs": 20},
    "echo of few": {"echo": True, "logprobs": 0},
    "echoes": {"echo": True, "logprobs": 20, "n": 4},
    "answers": {"n": 128, "max_tokens": 4, "repetition_penalty": 1.5},
    "best answer": {"best_of": 128, "max_tokens": 4},
    "echoed answers": {"n": 128, "max_tokens": 4, "echo": True},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", ASKED_OF_LONG)
def test_whatever_is_asked_of_a_long_prompt_the_loop_is_free(scoring_served: Served, asked: str, stream: bool) -> None:
    if asked == "best answer" and stream:
        pytest.skip("only whole answers can be compared")
    ids = [number % 256 for number in range(LONG)]
    body = {"prompt": ids, "max_tokens": 1, "stream": stream, **ASKED_OF_LONG[asked]}
    reply = answer(scoring_served, "/v1/completions", json.dumps(body).encode())
    assert reply.status == 200, reply.body[:300]


@settings(max_examples=sampled(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(NEAR_A_LIMIT)
def test_near_any_limit_the_loop_is_free(served: Served, drawn: tuple[Callable[[int, int], Body], int, int]) -> None:
    check(served, *drawn)

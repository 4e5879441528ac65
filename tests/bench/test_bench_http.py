"""The load generator's client: bytes cut anywhere, answers as they should and should not be, servers that go away."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_kit import Events, TinyServer, make_answer, plain_answer, serving
from cllm_bench.client import Client, ServerGoneError
from cllm_bench.errors import BenchError
from cllm_bench.http import Address, EventReader, HttpError, ResponseReader

CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

cut_anywhere = st.lists(st.integers(1, 9), min_size=1, max_size=20)


def feed(reader: ResponseReader, raw: bytes, cuts: list[int]) -> bytes:
    """The body, out of bytes that come in pieces of these sizes, over and over."""
    body, position = b"", 0
    while position < len(raw):
        size = cuts[position % len(cuts)]
        body += reader.feed(raw[position : position + size])
        position += size
    return body


# -- responses -------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), cut_anywhere, st.booleans())
def test_chunks_survive_any_cut_of_the_bytes(chunks: list[bytes], cuts: list[int], extended: bool) -> None:
    extension = b";name=value" if extended else b""
    raw = CHUNKED + b"".join(b"%X%s\r\n%s\r\n" % (len(chunk), extension, chunk) for chunk in chunks) + b"0\r\n\r\n"
    reader = ResponseReader()
    assert feed(reader, raw, cuts) == b"".join(chunks)
    assert reader.done and reader.status == 200
    reader.close()


@given(st.binary(max_size=60), cut_anywhere)
def test_bodies_with_a_length_or_none_survive_any_cut(body: bytes, cuts: list[int]) -> None:
    reader = ResponseReader()
    assert feed(reader, b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body), cuts) == body
    assert reader.done and reader.status == 404
    until_close = ResponseReader()
    assert feed(until_close, b"HTTP/1.0 200 OK\r\nserver: x\r\n\r\n" + body, cuts) == body
    assert not until_close.done
    until_close.close()
    assert until_close.done


def test_an_interim_response_is_not_the_response() -> None:
    reader = ResponseReader()
    raw = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\nok"
    assert feed(reader, raw, [5]) == b"ok"
    assert reader.status == 201 and reader.done


@pytest.mark.parametrize(
    "raw",
    [
        CHUNKED + b"5\r\nab",
        CHUNKED + b"2\r\nab\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ncont",
        b"",
    ],
)
def test_an_answer_that_ends_too_soon_is_an_error(raw: bytes) -> None:
    reader = ResponseReader()
    reader.feed(raw)
    assert not reader.done
    with pytest.raises(HttpError, match="closed in the middle"):
        reader.close()


@pytest.mark.parametrize("raw", [CHUNKED + b"zz\r\n", b"SSH-2.0-OpenSSH_9.2\r\n\r\n", b"x" * 70_000])
def test_what_is_no_http_is_named(raw: bytes) -> None:
    with pytest.raises(HttpError, match="does not speak HTTP"):
        ResponseReader().feed(raw)


def test_ctrl_c_while_an_answer_is_parsed_is_not_an_error_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(reader: ResponseReader, body: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ResponseReader, "on_body", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ResponseReader().feed(CHUNKED + b"2\r\nab\r\n")


@pytest.mark.parametrize("url", ["localhost", "localhost:8000", "ftp://x", "http://", ""])
def test_an_address_must_be_one(url: str) -> None:
    with pytest.raises(BenchError, match="not the address of a server"):
        Address(url)


# -- events ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.text(alphabet="ab{}:é,", max_size=12), max_size=8), cut_anywhere)
def test_events_survive_any_cut_of_the_bytes(payloads: list[str], cuts: list[int]) -> None:
    expected = [payload.encode() for payload in payloads]
    raw = b": ping\n\n" + b"".join(b"event: x\r\ndata: " + payload + b"\r\n\r\n" for payload in expected)
    reader, found, position = EventReader(), [], 0
    while position < len(raw):
        size = cuts[position % len(cuts)]
        found += reader.feed(raw[position : position + size])
        position += size
    assert found == expected


def test_an_unfinished_line_is_not_an_event() -> None:
    reader = EventReader()
    assert reader.feed(b'data: {"a"') == []
    assert reader.feed(b": 1}\n") == [b'{"a": 1}']


def test_times_of_an_answer() -> None:
    answer = make_answer(10.0, 10.5, 10.8, tokens=4, finished=11.4)
    assert answer.ttft == pytest.approx(0.5)
    assert answer.gaps == pytest.approx([0.3])
    assert answer.seconds_per_token == pytest.approx(0.3)
    assert answer.longest_silence == pytest.approx(0.6)
    silent = make_answer(10.0, tokens=0, finished=12.0)
    assert silent.ttft == silent.longest_silence == 2.0 and silent.seconds_per_token == 0


# -- client ----------------------------------------------------------------------------------------------------------


async def test_client_asks_for_greedy_full_length_answers_with_usage() -> None:
    async with serving(TinyServer()) as server, Client(server.url + "/v1/", api_key="secret") as client:
        answer = await client.complete("a b c", 5)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (3, 5, 1)
    assert answer.text == "w0 w1 w2 w3 w4 " and answer.complete
    assert 0 < answer.ttft <= answer.seconds
    assert len(answer.gaps) == 4
    body = server.bodies[0]
    assert body["model"] == "tiny" and body["temperature"] == 0 and body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert all(b"authorization: Bearer secret" in head for head in server.heads)


async def test_tokens_come_from_usage_and_times_from_events_with_text() -> None:
    def packed(body: dict[str, Any], prompt_tokens: int) -> Events:
        yield {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        yield {"choices": [{"delta": {"content": "three tokens here"}}]}
        yield {"choices": [{"delta": {"content": ""}}]}
        yield {"choices": [{"delta": {"content": "!"}}]}
        yield {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}}

    async with serving(TinyServer(answer=packed)) as server, Client(server.url) as client:
        answer = await client.chat([{"role": "user", "content": "x"}], 4)
    assert (answer.text, len(answer.arrivals), answer.completion_tokens) == ("three tokens here!", 2, 4)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.error) == (5, 0, None)


async def test_a_server_without_usage_is_taken_at_its_finish_reason() -> None:
    def without(body: dict[str, Any], prompt_tokens: int) -> Events:
        yield from list(plain_answer(body, prompt_tokens))[:3]
        yield {"choices": [{"text": "", "finish_reason": "length" if prompt_tokens == 1 else "stop"}]}

    async with serving(TinyServer(answer=without)) as server, Client(server.url) as client:
        whole, stopped = await client.complete("a", 8), await client.complete("a b", 8)
    assert (whole.completion_tokens, whole.error) == (8, None)
    assert "got 3 tokens instead of 8" in (stopped.error or "")


async def test_failures_are_part_of_the_result() -> None:
    def broken(body: dict[str, Any], prompt_tokens: int) -> Events:
        yield {"error": {"message": "it fell over"}}

    def strange(body: dict[str, Any], prompt_tokens: int) -> Events:
        yield {"usage": {"tokens": 3}}

    def short(body: dict[str, Any], prompt_tokens: int) -> Events:
        yield from plain_answer(body | {"max_tokens": 2}, prompt_tokens)

    cases = {
        "it fell over": TinyServer(answer=broken),
        "not in OpenAI's format": TinyServer(answer=strange),
        "got 2 tokens instead of 4": TinyServer(answer=short),
        "429": TinyServer(status=429),
        "no room": TinyServer(status=429),
    }
    for said, tiny in cases.items():
        async with serving(tiny) as server, Client(server.url) as client:
            answer = await client.complete("a", 4)
        assert said in (answer.error or "") and not answer.complete
        assert client.answers == [answer]


async def test_a_client_leaves_when_it_has_read_enough() -> None:
    gone = asyncio.Event()

    def endless(body: dict[str, Any], prompt_tokens: int) -> Events:
        try:
            while True:
                yield {"choices": [{"text": "more "}]}
        finally:
            gone.set()

    async with serving(TinyServer(answer=endless)) as server, Client(server.url) as client:
        answer = await client.complete("a", 1000, leave_after=3)
        await asyncio.wait_for(gone.wait(), 30)
    assert answer.left and answer.error is None and not answer.complete
    assert len(answer.arrivals) == answer.completion_tokens == 3


async def test_a_server_that_dies_in_the_middle_is_told_from_an_answer_that_fails() -> None:
    async with serving(TinyServer(dies_at=2)) as server, Client(server.url) as client:
        assert (await client.complete("a", 3)).complete
        with pytest.raises(ServerGoneError, match="is gone"):
            await client.complete("b", 3)
    assert [answer.complete for answer in client.answers] == [True, False]


async def test_nobody_at_the_address() -> None:
    async with serving(TinyServer()) as server:
        url = server.url
    with pytest.raises(BenchError, match="no OpenAI-compatible server answers"):
        async with Client(url):
            pass

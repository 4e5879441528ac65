"""The benchmark tools: do they count, time and judge right? They drive a small server that speaks OpenAI's streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cllm.bench import peers
from cllm.bench.cli import app
from cllm.bench.client import Answer, BenchError, Client, at_most
from cllm.bench.figures import Figure, Run, own, summarise, times_the_peer
from cllm.bench.machine import describe_machine
from cllm.bench.peers import LLAMA_SERVER
from cllm.bench.prompts import Prompts
from cllm.bench.report import Report, Result, number, print_result
from cllm.bench.run import run_all
from cllm.bench.sse import EventReader
from cllm.bench.stats import last_fifth_over_first, percentile, slope
from cllm.bench.workloads import WORKLOADS
from cllm.bench.workloads.base import HttpWorkload, Setup
from cllm.bench.workloads.batch import Batch
from cllm.bench.workloads.chat import Chat
from cllm.bench.workloads.memory import trend
from cllm.bench.workloads.micro import Micro
from cllm.bench.workloads.prefix import Prefix
from cllm.bench.workloads.sequential import Sequential
from cllm.bench.workloads.stall import Stall
from cllm.cli import main

Events = Iterator[dict[str, Any]]


def words(text: str) -> list[int]:
    """A tokenizer for tests: one token per word."""
    return [len(word) for word in text.split()]


def plain_answer(body: dict[str, Any], prompt_tokens: int) -> Events:
    """One token per event; a role event first in chats; usage in an event of its own."""
    is_chat = "messages" in body
    if is_chat:
        yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    for number_of_token in range(body["max_tokens"]):
        text = f"w{number_of_token} "
        yield {"choices": [{"index": 0, "delta": {"content": text}} if is_chat else {"index": 0, "text": text}]}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": body["max_tokens"]}
    yield {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 1}}}


@dataclass
class TinyServer:
    """Just enough HTTP to be driven: a model list and streamed answers."""

    answer: Callable[[dict[str, Any], int], Events] = plain_answer
    status: int = 200
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    url: str = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    (
                        int(line.split(b":")[1])
                        for line in head.split(b"\r\n")
                        if line.lower().startswith(b"content-length")
                    ),
                    0,
                )
                body = await reader.readexactly(length)
                if head.startswith(b"GET"):
                    self._send(writer, 200, b'{"data": [{"id": "tiny"}]}')
                elif self.status != 200:
                    self._send(writer, self.status, b'{"error": {"message": "no room"}}')
                else:
                    await self._stream(writer, json.loads(body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.bodies.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        prompt = body.get("prompt") or " ".join(message["content"] for message in body["messages"])
        for event in self.answer(body, len(words(prompt))):
            self._chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")
            await writer.drain()
            await asyncio.sleep(0)
        self._chunk(writer, b"data: [DONE]\n\n")
        self.running -= 1
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    @staticmethod
    def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    @staticmethod
    def _send(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)


@asynccontextmanager
async def serving(server: TinyServer) -> AsyncIterator[TinyServer]:
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()


def setup_for(url: str, against: str | None = None, repeats: int = 1) -> Setup:
    return Setup(model="tiny", encode=words, threads=1, repeats=repeats, url=url, against=against)


# -- statistics ------------------------------------------------------------------------------------------------------


def test_percentiles_lie_between_the_nearest_values() -> None:
    assert percentile([1, 2, 3, 4, 5], 50) == 3
    assert percentile([10, 20], 95) == pytest.approx(19.5)
    assert percentile([7], 99) == 7


def test_fifths_compare_medians_so_one_outlier_does_not_count() -> None:
    assert last_fifth_over_first([1.0] * 100) == 1
    assert last_fifth_over_first([1.0] * 80 + [2.0] * 20) == 2
    assert last_fifth_over_first([1.0] * 99 + [500.0]) == 1
    assert last_fifth_over_first([2.0, 3.0]) == 1.5


def test_slope() -> None:
    assert slope([0, 1, 2, 3], [5, 7, 9, 11]) == pytest.approx(2)
    assert slope([0, 10, 20], [4, 4, 4]) == 0


def test_memory_trend_forgives_the_warm_up_and_sees_a_leak() -> None:
    warm_up = [(done, 300.0 + done) for done in range(1, 21)]
    flat = trend(warm_up + [(done, 320.0) for done in range(21, 101)])
    assert flat["growth_percent"] == 0 and flat["slope_bytes"] == 0 and flat["final_mb"] == 320
    leaking = trend(warm_up + [(done, 300.0 + done) for done in range(21, 101)])
    assert leaking["growth_percent"] > 10 and leaking["slope_bytes"] == pytest.approx(1e6)


# -- events ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.text(alphabet="ab{}:é,", max_size=12), max_size=8), st.lists(st.integers(1, 9), min_size=1))
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


def test_tokens_come_from_usage_and_times_from_events_with_text() -> None:
    answer = Answer()
    answer.started = 10.0
    assert not answer.add({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 10.1)
    assert answer.add({"choices": [{"delta": {"content": "three tokens here"}}]}, 10.5)
    assert not answer.add({"choices": [{"delta": {"content": ""}}]}, 10.6)
    assert answer.add({"choices": [{"delta": {"content": "!"}}]}, 10.8)
    assert not answer.add({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}}, 10.9)
    assert answer.ttft == pytest.approx(0.5)
    assert answer.gaps == pytest.approx([0.3])
    answer.finished = 11.4
    assert answer.seconds_per_token == pytest.approx(0.3)
    assert answer.longest_silence == pytest.approx(0.6)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (5, 4, 0)
    assert answer.text == "three tokens here!"


# -- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encode", [words, lambda text: text.encode()], ids=["words", "bytes"])
@pytest.mark.parametrize("tokens", [4, 60, 330, 2600])
def test_prompts_have_the_wanted_length_and_differ(encode: Callable[[str], Any], tokens: int) -> None:
    prompts = Prompts(encode, "seed")
    texts = [prompts.text(tokens) for _ in range(5)]
    assert all(abs(len(encode(text)) - tokens) <= 0.02 * tokens for text in texts)
    assert len(set(texts)) == 5
    again = Prompts(encode, "seed")
    assert [again.text(tokens) for _ in range(5)] == texts
    assert Prompts(encode, "other").text(tokens) != texts[0]


def test_a_prompt_is_never_empty() -> None:
    assert Prompts(lambda text: text.encode(), "seed").text(1)


# -- client ----------------------------------------------------------------------------------------------------------


async def test_client_asks_for_greedy_full_length_answers_with_usage() -> None:
    async with serving(TinyServer()) as server, Client(server.url + "/v1/") as client:
        answer = await client.complete("a b c", 5)
        assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (3, 5, 1)
        assert answer.text == "w0 w1 w2 w3 w4 "
        assert 0 < answer.ttft <= answer.seconds
        assert len(answer.gaps) == 4
    body = server.bodies[0]
    assert body["model"] == "tiny" and body["temperature"] == 0 and body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}


async def test_client_says_what_the_server_said() -> None:
    async with serving(TinyServer(status=429)) as server, Client(server.url) as client:
        with pytest.raises(BenchError, match=r"429.*no room"):
            await client.complete("a", 1)


async def test_client_refuses_errors_inside_the_stream_and_short_answers() -> None:
    def broken(body: dict[str, Any], prompt_tokens: int) -> Events:
        yield {"error": {"message": "it fell over"}}

    def short(body: dict[str, Any], prompt_tokens: int) -> Events:
        yield from plain_answer(body | {"max_tokens": 2}, prompt_tokens)

    async with serving(TinyServer(answer=broken)) as server, Client(server.url) as client:
        with pytest.raises(BenchError, match="it fell over"):
            await client.complete("a", 4)
    async with serving(TinyServer(answer=short)) as server, Client(server.url) as client:
        with pytest.raises(BenchError, match=r"2 tokens.*4 were asked for"):
            await client.complete("a", 4)


async def test_nobody_at_the_address() -> None:
    async with serving(TinyServer()) as server:
        url = server.url
    with pytest.raises(BenchError, match="no OpenAI-compatible server answers"):
        async with Client(url):
            pass


async def test_at_most_keeps_order_and_limit_and_ends_all_on_failure() -> None:
    running = most = 0

    async def job(index: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(3 * (5 - index)):
            await asyncio.sleep(0)
        running -= 1
        return index

    assert await at_most(2, [partial(job, index) for index in range(5)]) == list(range(5))
    assert most == 2

    never = asyncio.Event()
    cancelled = asyncio.Event()

    async def waits() -> None:
        try:
            await never.wait()
        finally:
            cancelled.set()

    async def fails() -> None:
        raise BenchError("no")

    with pytest.raises(BenchError):
        await at_most(2, [waits, fails])
    assert cancelled.is_set()


# -- workloads -------------------------------------------------------------------------------------------------------

SMALL: list[HttpWorkload] = [
    Sequential(answer_tokens=2, requests=5),
    Batch(clients=3, requests_each=2, prompt_tokens=20, answer_tokens=4),
    Prefix(users=4, at_a_time=2, system_tokens=40, question_tokens=5, answer_tokens=3),
    Chat(chats=3, turns=2, at_a_time=2, message_tokens=6, answer_tokens=4),
    Stall(streams=2, stream_tokens=30, head_start=5, long_prompt_tokens=100, prompt_tokens=5, answer_tokens=3),
]


@pytest.mark.parametrize("workload", SMALL, ids=lambda workload: workload.name)
async def test_every_figure_of_a_workload_is_measured(workload: HttpWorkload) -> None:
    async with serving(TinyServer()) as server:
        runs = await workload.measure(setup_for(server.url))
    assert [run.side for run in runs] == ["ours"]
    assert {figure.key for figure in workload.figures} <= runs[0].metrics.keys()
    assert runs[0].facts["busy_percent_before"] >= 0


async def drive(workload: HttpWorkload) -> TinyServer:
    async with serving(TinyServer()) as server, Client(server.url) as client:
        await workload.drive(client, Prompts(words, "seed"))
    return server


async def test_batch_sends_different_prompts_n_at_a_time() -> None:
    server = await drive(Batch(clients=3, requests_each=2, prompt_tokens=20, answer_tokens=8))
    assert len({body["prompt"] for body in server.bodies}) == 6
    assert {len(words(body["prompt"])) for body in server.bodies} == {20}
    assert server.most_running == 3


async def test_prefix_shares_the_system_prompt_and_nothing_else() -> None:
    server = await drive(Prefix(users=4, at_a_time=2, system_tokens=40, question_tokens=5, answer_tokens=3))
    assert len({body["messages"][0]["content"] for body in server.bodies}) == 1
    assert len({body["messages"][1]["content"] for body in server.bodies}) == 4


async def test_chat_takes_turns_and_carries_the_servers_own_answers() -> None:
    server = await drive(Chat(chats=3, turns=2, at_a_time=2, message_tokens=6, answer_tokens=2))
    lengths = [len(body["messages"]) for body in server.bodies]
    assert lengths == [1, 1, 1, 3, 3, 3]
    for body in server.bodies[3:]:
        assert body["messages"][1] == {"role": "assistant", "content": "w0 w1 "}
        assert body["messages"][:1] in [first["messages"] for first in server.bodies[:3]]


async def test_stall_sends_the_long_prompt_once_every_stream_runs() -> None:
    seen = []

    def watched(body: dict[str, Any], prompt_tokens: int) -> Events:
        for number_of_event, event in enumerate(plain_answer(body, prompt_tokens)):
            if number_of_event == 5:
                seen.append(prompt_tokens)
            yield event
        if prompt_tokens == 100:
            seen.append(100)

    workload = Stall(
        streams=2, stream_tokens=60, head_start=5, long_prompt_tokens=100, prompt_tokens=5, answer_tokens=3
    )
    async with serving(TinyServer(answer=watched)) as server, Client(server.url) as client:
        await workload.drive(client, Prompts(words, "seed"))
    assert seen == [5, 5, 100]
    assert len(words(server.bodies[-1]["prompt"])) == 100


async def test_both_sides_get_the_same_work_in_turn() -> None:
    workload = Sequential(answer_tokens=1, requests=3)
    async with serving(TinyServer()) as ours, serving(TinyServer()) as peer:
        runs = await workload.measure(setup_for(ours.url, against=peer.url, repeats=2))
    assert [(run.side, run.repeat) for run in runs] == [("ours", 0), ("peer", 0), ("peer", 1), ("ours", 1)]
    assert [body.get("prompt") for body in ours.bodies] == [body.get("prompt") for body in peer.bodies]


def test_commands_workloads_and_peer_settings_belong_together() -> None:
    assert {command.name for command in app.registered_commands} == {*WORKLOADS, "all"}
    for name, workloads in WORKLOADS.items():
        for workload in workloads:
            assert workload.name == name and name in workload.title
            assert workload.quick() != workload and workload.quick().name == name
            if isinstance(workload, HttpWorkload):
                assert LLAMA_SERVER[workload.peer_key]
                assert workload.quick().peer_key == workload.peer_key  # type: ignore[attr-defined]


# -- figures and report ----------------------------------------------------------------------------------------------


def test_ratios_are_in_our_favour_above_one_whichever_way_is_better() -> None:
    assert Figure("k", "seconds", "s", "lower").ratio(2.0, 8.0) == 4
    assert Figure("k", "speed", "tok/s", "higher").ratio(8.0, 2.0) == 4
    assert Figure("k", "seconds", "s", "lower").ratio(0.0, 8.0) is None
    assert Figure("k", "slope", "us", "lower").ratio(2.0, -8.0) is None


@pytest.mark.parametrize(
    ("figure", "ours", "peer", "met"),
    [
        (Figure("k", "", "ms", limit=own(400)), 399, None, True),
        (Figure("k", "", "ms", limit=own(400)), 401, 13_000, False),
        (Figure("k", "", "/s", "higher", own(20)), 21, None, True),
        (Figure("k", "", "/s", "higher", own(20)), 19, None, False),
        (Figure("k", "", "s", limit=times_the_peer(4)), 10, 40, True),
        (Figure("k", "", "s", limit=times_the_peer(4)), 10, 39, False),
        (Figure("k", "", "tok/s", "higher", times_the_peer(1)), 99, 100, False),
        (Figure("k", "", "s", limit=times_the_peer(4)), 10, None, None),
        (Figure("k", "", "s"), 10, 40, None),
    ],
)
def test_verdicts(figure: Figure, ours: float, peer: float | None, met: bool | None) -> None:
    runs = [Run("ours", 0, {"k": ours})] + ([] if peer is None else [Run("peer", 0, {"k": peer})])
    assert summarise([figure], runs)[0].met is met


def test_ratios_are_taken_within_a_repeat() -> None:
    runs = [
        Run(side, repeat, {"k": value})  # type: ignore[arg-type]
        for side, values in (("ours", (1, 10, 100)), ("peer", (2, 20, 200)))
        for repeat, value in enumerate(values)
    ]
    row = summarise([Figure("k", "", "s")], runs)[0]
    assert row.ratio is not None and (row.ratio.low, row.ratio.median, row.ratio.high) == (2, 2, 2)
    assert row.ours is not None and (row.ours.low, row.ours.median, row.ours.high) == (1, 10, 100)


def test_the_table_shows_values_ratio_requirement_verdict_and_notes() -> None:
    figures = [Figure("s", "total", "s", limit=times_the_peer(4.0)), Figure("gap", "worst gap", "ms", limit=own(400.0))]
    runs = [
        Run(
            "ours",
            0,
            {"s": 10.0, "gap": 500.0},
            {"built_for": "CPU : AVX2 = 1 | AVX512 = 1 | ", "busy_percent_before": 60.0},
        ),
        Run("peer", 0, {"s": 50.0, "gap": 13_430.0}, {"built_for": "CPU : AVX2 = 1 | ", "settings": "8 slots"}),
    ]
    console = Console(width=160, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as captured:
        print_result(console, Result("prefix", "prefix: 32 users", "cLLM", "llama-server", figures, runs))
    text = captured.get()
    for expected in ("10.0 s", "50.0 s", "5.00x", ">= 4x", "13,430 ms", "<= 400 ms", "8 slots", "60 % busy"):
        assert expected in text
    assert "built without AVX512," in text
    assert [line.split("│")[-2].strip() for line in text.splitlines() if "│" in line] == ["met", "not met"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (13_430.2, "13,430"),
        (123.4, "123"),
        (45.67, "45.7"),
        (1.049, "1.05"),
        (0.1234, "0.123"),
        (-2.5, "-2.50"),
        (0, "0.000"),
    ],
)
def test_numbers_show_what_matters(value: float, text: str) -> None:
    assert number(value) == text


async def test_a_failed_workload_is_kept_beside_the_others(tmp_path: Path) -> None:
    file = tmp_path / "results" / "bench.json"
    report = Report(describe_machine(), {"repeats": 1}, file)

    def no_usage_on_chat(body: dict[str, Any], prompt_tokens: int) -> Events:
        events = plain_answer(body, prompt_tokens)
        if len(body.get("messages", ())) == 2:
            return iter([event for event in events if "usage" not in event])
        return events

    async with serving(TinyServer(answer=no_usage_on_chat)) as server:
        workloads = [SMALL[2], SMALL[0]]  # prefix fails, sequential does not
        await run_all(workloads, setup_for(server.url), report, Console(quiet=True))
    content = json.loads(file.read_text())
    assert [workload["name"] for workload in content["workloads"]] == ["sequential"]
    assert "0 tokens in its usage" in content["failures"][SMALL[2].title]
    assert content["machine"]["cpu"] and content["machine"]["memory_bytes"] > 0
    row = content["workloads"][0]["rows"][0]
    assert row["required"] == "<= 1.05" and row["ours"]["median"] > 0 and row["peer"] is None


# -- command line ----------------------------------------------------------------------------------------------------


def bench(*args: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["bench", *args])
    assert isinstance(end.value.code, int)
    return end.value.code


def test_a_missing_peer_is_one_line_that_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert bench("batch") == 2
    message = capsys.readouterr().err
    assert "pip install 'cllm[bench]'" in message and "--against none" in message
    assert len(message.strip().splitlines()) == 1


def test_a_wrong_peer_and_a_useless_address_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("batch", "--against", "ollama") == 2
    assert "--against is 'ollama'" in capsys.readouterr().err
    assert bench("batch", "--against", "none", "--url", "localhost") == 2
    assert "--url is 'localhost'" in capsys.readouterr().err
    assert bench("overhead", "--url", "http://127.0.0.1:1") == 2
    assert "leave --url out" in capsys.readouterr().err


def test_every_workload_says_in_help_what_it_asks(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--help") == 0
    text = capsys.readouterr().out
    assert "does anything get slower?" in text and "is it computed once?" in text


def test_bench_starts_cllm_drives_it_and_writes_what_it_found(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    options = ["--backend", "fake", "--against", "none", "--quick", "--repeats", "1", "--json", str(file)]
    assert bench("stall", *options) == 0
    content = json.loads(file.read_text())
    assert content["failures"] == {} and content["settings"]["quick"] is True
    (stall,) = content["workloads"]
    assert stall["peer"] is None and stall["runs"][0]["facts"]["backend"] == "fake"
    measured = {row["key"]: row["ours"]["median"] for row in stall["rows"]}
    assert measured.keys() == {figure.key for figure in Stall.figures}
    assert measured["seconds"] > 0 and measured["long_ttft_ms"] > 0


def test_micro_measures_what_it_promises() -> None:
    workload = Micro(running=(2, 3), prompt_tokens=40, steps=3, pool_blocks=64, tree_sequences=40)
    (run,) = asyncio.run(workload.measure(replace(setup_for(""), url=None)))
    assert run.metrics.keys() == {figure.key for figure in workload.figures}
    assert all(value > 0 for value in run.metrics.values())

"""The benchmarks: do they send what they say, in turn, and keep what they measured whatever happens?"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, pstdev
from typing import Any

import pytest
from rich.console import Console

from bench_kit import Events, TinyServer, bench, measured, plain_answer, serving, setup_for, words
from cllm_bench import peers
from cllm_bench.cli import app
from cllm_bench.client import Client
from cllm_bench.errors import BenchError
from cllm_bench.figures import OURS, Run
from cllm_bench.load import at_most, at_times
from cllm_bench.machine import describe_machine
from cllm_bench.pages import extras
from cllm_bench.peers import llama_settings
from cllm_bench.prompts import Prompts
from cllm_bench.report import Report
from cllm_bench.run import make_result, run_all
from cllm_bench.sizes import resize
from cllm_bench.watch import Watcher
from cllm_bench.workloads import LONG, SHORT, WORKLOADS
from cllm_bench.workloads.aged import FRESH, Aged
from cllm_bench.workloads.batch import Batch
from cllm_bench.workloads.chat import Chat
from cllm_bench.workloads.micro import Micro
from cllm_bench.workloads.mixed import Mixed
from cllm_bench.workloads.over_http import HttpWorkload
from cllm_bench.workloads.prefix import Prefix
from cllm_bench.workloads.router import Router
from cllm_bench.workloads.sequential import Sequential
from cllm_bench.workloads.stall import Stall
from thorough import slow

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


def test_a_prompt_is_never_empty_and_a_rough_one_about_as_long_as_wanted() -> None:
    prompts = Prompts(str.encode, "seed")
    assert prompts.text(1) and prompts.rough(1)
    assert mean(len(prompts.rough(500)) for _ in range(20)) == pytest.approx(500, rel=0.1)


# -- how requests are sent -------------------------------------------------------------------------------------------


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


async def test_at_times_waits_for_nobody_and_ends_all_on_failure() -> None:
    started: list[str] = []
    let_go = asyncio.Event()

    async def first() -> None:
        started.append("first")
        await let_go.wait()

    async def second() -> None:
        started.append("second")
        let_go.set()

    # The first one only ends because the second starts beside it.
    await asyncio.wait_for(at_times([(0.0, first), (0.01, second)]), 30)
    assert started == ["first", "second"]

    cancelled = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def fails() -> None:
        raise BenchError("no")

    with pytest.raises(BenchError):
        await asyncio.wait_for(at_times([(0.0, waits), (0.0, fails), (3600.0, waits)]), 30)
    assert cancelled.is_set()


# -- workloads -------------------------------------------------------------------------------------------------------

SMALL: list[HttpWorkload] = [
    Sequential(answer_tokens=2, requests=5),
    Batch(clients=3, requests_each=2, prompt_tokens=20, answer_tokens=4),
    Prefix(users=4, at_a_time=2, system_tokens=40, question_tokens=5, answer_tokens=3),
    Chat(chats=3, turns=2, at_a_time=2, message_tokens=6, answer_tokens=4),
    Stall(streams=2, stream_tokens=30, head_start=5, long_prompt_tokens=100, prompt_tokens=5, answer_tokens=3),
    Mixed(rate=200, duration=0.2, prompt_most=30, answer_most=8),
]


@pytest.mark.parametrize("workload", SMALL, ids=lambda workload: workload.name)
async def test_every_figure_of_a_workload_is_measured(workload: HttpWorkload) -> None:
    kv = {"total": 8, "free": 4, "evictable": 2, "referenced": 2, "bytes_per_unit": 1e6, "bytes_per_token": 7}
    kv |= {"layout": "paged", "largest_free_span": 3, "free_segments": 2}
    pages = {"/kv": json.dumps(kv).encode()}
    async with serving(TinyServer(pages=pages)) as server:
        runs = await measured(workload, setup_for(server.url))
    assert [run.side for run in runs] == [OURS]
    metrics = runs[0].metrics
    wanted = {figure.key for figure in workload.figures}
    assert wanted <= metrics.keys()
    assert runs[0].facts["busy_percent_before"] >= 0 and runs[0].partial is None
    assert metrics["fragmentation_percent"] == 25 and metrics["errors"] == 0
    assert all(answer.complete or answer.left for answer in runs[0].answers)


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


async def test_several_long_prompts_come_at_once() -> None:
    workload = Stall(
        streams=2, stream_tokens=60, head_start=5, long_prompts=3, long_prompt_tokens=40, prompt_tokens=5,
        answer_tokens=3,
    )  # fmt: skip
    server = await drive(workload)
    assert [len(words(body["prompt"])) for body in server.bodies] == [5] * 2 + [40] * 3
    assert [body["max_tokens"] for body in server.bodies] == [60, 60, 3, 3, 3]


def test_people_come_like_a_poisson_process_ask_log_normal_things_and_some_leave() -> None:
    workload = Mixed(rate=5.0, duration=800.0)
    people = list(workload.arrivals(Prompts(words, "seed")))
    assert people == list(workload.arrivals(Prompts(words, "seed")))
    assert len(people) == pytest.approx(4000, rel=0.05)
    gaps = [later.at - sooner.at for sooner, later in pairwise(people)]
    # Exponential gaps: the spread is as large as the mean, and a share of 1 - 1/e is shorter than it.
    assert mean(gaps) == pytest.approx(0.2, rel=0.05) and pstdev(gaps) == pytest.approx(0.2, rel=0.1)
    assert sum(gap < 0.2 for gap in gaps) / len(gaps) == pytest.approx(1 - 1 / math.e, abs=0.03)
    lengths = [len(words(person.messages[-1]["content"])) for person in people]
    assert median(lengths) == pytest.approx(workload.prompt_tokens, rel=0.1)
    assert mean(lengths) > 1.3 * median(lengths) and max(lengths) <= workload.prompt_most
    assert sum(len(person.messages) == 2 for person in people) / len(people) == pytest.approx(0.5, abs=0.03)
    leaving = [person for person in people if person.leave_after is not None]
    assert len(leaving) / len(people) == pytest.approx(workload.leave_share, abs=0.02)
    assert all(0 < (person.leave_after or 0) < person.answer_tokens for person in leaving)


async def test_mixed_sends_what_was_drawn_and_leaves_as_planned() -> None:
    workload = Mixed(rate=300, duration=0.2, prompt_most=30, answer_most=20, leave_share=0.5)
    async with serving(TinyServer()) as server, Client(server.url) as client:
        metrics = await workload.drive(client, Prompts(words, "seed"))
    people = list(workload.arrivals(Prompts(words, "seed")))
    assert [body["messages"] for body in server.bodies] == [person.messages for person in people]
    leaving = sum(person.leave_after is not None for person in people)
    assert metrics["left"] == sum(answer.left for answer in client.answers) == leaving > 0


@slow
async def test_an_old_server_and_a_fresh_one_answer_the_same_questions_in_turn() -> None:
    workload = Aged(requests=20, at_a_time=4, rounds=3, prompt_tokens=5, answer_tokens=3)
    setup = replace(setup_for(""), encode=str.encode, backend="fake", model="smollm2")
    old, fresh = await measured(workload, setup)
    assert (old.side, fresh.side) == (OURS, FRESH)
    assert {figure.key for figure in workload.figures} <= old.metrics.keys()
    assert old.metrics["slower_percent_low"] <= old.metrics["slower_percent"] <= old.metrics["slower_percent_high"]
    assert len(old.answers) == len(fresh.answers) == workload.rounds
    assert [answer.texts for answer in old.answers] == [answer.texts for answer in fresh.answers]
    # The twenty that came before left something in the old server's cache.
    assert old.samples[-1].kv_cached_mb


def test_micro_and_router_measure_what_they_promise() -> None:
    for workload in (
        Micro(running=(2, 3), prompt_tokens=40, steps=3, pool_blocks=64, tree_sequences=40, cache_blocks=(90, 120)),
        Router(replicas=3, blocks=2_000, prompt_blocks=40, system_blocks=8, systems=4, decisions=40),
    ):
        (run,) = asyncio.run(measured(workload, setup_for("")))
        assert run.metrics.keys() == {figure.key for figure in workload.figures}


# -- sides -----------------------------------------------------------------------------------------------------------


async def test_all_sides_get_the_same_work_in_turn() -> None:
    workload = Sequential(answer_tokens=1, requests=3)
    async with serving(TinyServer()) as ours, serving(TinyServer()) as one, serving(TinyServer()) as two:
        runs = await measured(workload, setup_for(ours.url, one.url, two.url, repeats=2))
    assert [(run.side, run.repeat) for run in runs] == [
        *((OURS, 0), (one.url, 0), (two.url, 0)),
        *((two.url, 1), (one.url, 1), (OURS, 1)),
    ]
    texts = [[body.get("prompt") for body in server.bodies] for server in (ours, one, two)]
    assert texts[0] == texts[1] == texts[2]
    measured_texts = [text for text in texts[0] if len(words(text or "")) == 4]
    assert len(measured_texts) == len(set(measured_texts)) == 6


async def test_the_watcher_sees_the_process_and_the_cache() -> None:
    kv = {"layout": "paged", "total": 100, "free": 50, "evictable": 30, "referenced": 20, "bytes_per_unit": 2e6}
    kv |= {"largest_free_span": 40, "free_segments": 3, "bytes_per_token": 9}
    pages = {"/kv": json.dumps(kv).encode()}
    async with (
        serving(TinyServer(pages=pages)) as server,
        Client(server.url) as client,
        Watcher(client, os.getpid()) as watcher,
    ):
        pass
    (sample,) = watcher.samples
    assert (sample.kv_running_mb, sample.kv_cached_mb, sample.free_segments) == (40, 60, 3)
    assert sample.fragmentation_percent == pytest.approx(20)
    assert sample.resident_mb is not None and sample.resident_mb > 10 and sample.cpu_percent is not None
    async with serving(TinyServer()) as server, Client(server.url) as client, Watcher(client, None) as other:
        pass
    assert other.samples[0][1:] == (None,) * 6


def test_commands_workloads_and_peers_belong_together() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert names == {*WORKLOADS, "all", "kernels", "kv_types", "truth"}
    assert {workload.name for workload in SHORT} == set(WORKLOADS) - set(LONG)
    for name, workloads in WORKLOADS.items():
        for workload in workloads:
            assert workload.name == name and workload.title.startswith(name)
            assert workload.quick() != workload and workload.quick().name == name
            assert len({figure.key for figure in workload.all_figures}) == len(workload.all_figures)
            if isinstance(workload, HttpWorkload):
                assert workload.needs.room >= workload.needs.tokens
                assert llama_settings(workload.needs)["slots"] == workload.needs.at_once


def test_requirements_follow_clients_and_backend() -> None:
    def required(workload: HttpWorkload, backend: str, peer: str | None) -> str:
        run = Run(OURS, 0, {}, {"backend": backend})
        return make_result(workload, setup_for(""), [run]).figures[0].required(peer)

    assert required(Batch(clients=8), "native", "llama-server") == ">= 1x"
    assert required(Batch(clients=32), "native", "llama-server") == ">= 3x"
    assert required(Prefix(), "fake", "llama-server") == ">= 8x"
    assert required(Stall(), "native", None) == "<= 200 ms"
    assert required(Batch(clients=32), "llama_cpp", "llama-server") == required(Stall(), "llama_cpp", None) == ""


# -- sizes -----------------------------------------------------------------------------------------------------------


def test_sizes_are_swept_in_every_combination_and_none_twice() -> None:
    swept = resize(WORKLOADS["batch"], ["clients=1,8", "prompt_tokens=100,200"])
    assert {(work.clients, work.prompt_tokens) for work in swept if isinstance(work, Batch)} == {
        *((1, 100), (1, 200), (8, 100), (8, 200))
    }
    assert len(swept) == 4
    same = resize(WORKLOADS["batch"], ["answer_tokens=16"])
    assert [(work.clients, work.answer_tokens) for work in same if isinstance(work, Batch)] == [
        *((1, 16), (8, 16), (32, 16))
    ]


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ("client=3", "batch has no size 'client'; it has clients (1)"),
        ("clients=two", "--size clients is 'two'; it must be a whole number"),
        ("clients=-1", "--size clients is '-1'"),
        ("clients", "--size clients is ''"),
        ("clients=0", "--size clients is '0'; it must be a whole number, 1 or more"),
    ],
)
def test_wrong_sizes_are_named(size: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("batch", "--against", "none", "--size", size) == 2
    assert said in capsys.readouterr().err


def test_only_what_can_be_nothing_may_be_zero(capsys: pytest.CaptureFixture[str]) -> None:
    (mixed,) = resize(WORKLOADS["mixed"], ["leave_share=0", "prompt_spread=0"])
    assert isinstance(mixed, Mixed) and mixed.leave_share == mixed.prompt_spread == 0
    (batch, *_) = resize(WORKLOADS["batch"], ["requests_each=0"])
    assert isinstance(batch, Batch) and batch.requests_each == 0
    for workload, size, least in (("prefix", "users", "1 or more"), ("mixed", "rate", "more than 0")):
        assert bench(workload, "--against", "none", "--size", f"{size}=0") == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith(f"cllm: --size {size} is '0'; it must be a ") and line.endswith(f"number, {least}")


# -- what survives ---------------------------------------------------------------------------------------------------


async def test_what_was_measured_before_a_server_died_is_kept_and_marked(tmp_path: Path) -> None:
    warm_up = 3
    report = Report(describe_machine(), {}, tmp_path / "bench.json", tmp_path / "page")
    workload = Sequential(answer_tokens=2, requests=10)
    async with serving(TinyServer(dies_at=warm_up + 5)) as dying, serving(TinyServer()) as peer:
        await run_all([workload], setup_for(dying.url, peer.url, repeats=2), report, Console(quiet=True))
    assert not report.ok
    content = json.loads((tmp_path / "bench.json").read_text())
    runs = {(run["side"], run["repeat"]): run for run in content["workloads"][0]["runs"]}
    died = runs[OURS, 0]
    assert "is gone" in died["partial"]
    assert [request["error"] is None for request in died["requests"]] == [True] * 4 + [False]
    assert died["metrics"]["request_p50_ms"] > 0 and died["metrics"]["errors"] == 1
    assert "no OpenAI-compatible server answers" in runs[OURS, 1]["partial"] and runs[OURS, 1]["requests"] == []
    assert all(runs[peer.url, repeat]["partial"] is None for repeat in (0, 1))
    rows = {row["key"]: row for row in content["workloads"][0]["rows"]}
    assert rows["request_p50_ms"]["ours"]["median"] == died["metrics"]["request_p50_ms"]
    assert rows["request_p50_ms"]["peers"][peer.url]["ratio"] is None
    assert "partial: " in (tmp_path / "page" / "index.html").read_text()


async def test_a_server_that_fails_every_request_does_not_end_the_others() -> None:
    async with serving(TinyServer(status=500)) as broken, serving(TinyServer()) as ours:
        runs = await measured(SMALL[1], setup_for(ours.url, broken.url, repeats=2))
    # It is left out of the second repeat: it would only fail again.
    assert [(run.side, run.repeat) for run in runs] == [(OURS, 0), (broken.url, 0), (OURS, 1)]
    assert "fails at the first requests: it answered 500" in (runs[1].partial or "")
    assert runs[0].partial is None and runs[2].partial is None


async def test_some_failed_requests_are_counted_and_named() -> None:
    def sometimes(body: dict[str, Any], prompt_tokens: int) -> Events:
        if len(server.bodies) % 4 == 0:
            return iter([{"error": {"message": "now and then"}}])
        return plain_answer(body, prompt_tokens)

    server = TinyServer(answer=sometimes)
    async with serving(server):
        (run,) = await measured(Sequential(answer_tokens=2, requests=9), setup_for(server.url))
    # The warm-up takes three, so that the first of ours fails, then every fourth.
    assert run.metrics["errors"] == 3 and run.partial is None
    assert "now and then" in run.facts["first_error"] and run.metrics["goodput_percent"] == pytest.approx(100 * 6 / 9)


async def test_a_failed_workload_is_kept_beside_the_others(tmp_path: Path) -> None:
    file = tmp_path / "results" / "bench.json"
    report = Report(describe_machine(), {"repeats": 1}, file)

    class Broken(Micro):
        def step_ms(self, running: int) -> float:
            raise BenchError("no room for it")

    async with serving(TinyServer()) as server:
        await run_all([Broken(), SMALL[0]], setup_for(server.url), report, Console(quiet=True))
    content = json.loads(file.read_text())
    assert [workload["name"] for workload in content["workloads"]] == ["sequential"]
    assert content["failures"] == {Broken().title: "no room for it"}
    assert content["machine"]["cpu"] and content["machine"]["memory_bytes"] > 0
    row = content["workloads"][0]["rows"][0]
    assert row["required"] == "<= 1.05" and row["ours"]["median"] > 0 and row["peers"] == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@slow
async def test_ctrl_c_writes_what_was_measured_and_exits_with_130(tmp_path: Path, number: signal.Signals) -> None:
    file, page = tmp_path / "bench.json", tmp_path / "page"
    hold = asyncio.Event()
    server = TinyServer()

    def until_the_tenth(body: dict[str, Any], prompt_tokens: int) -> Events:
        if len(server.bodies) == 10:
            hold.set()
            while True:
                yield {"choices": [{"text": "on and on "}]}
        yield from plain_answer(body, prompt_tokens)

    server.answer = until_the_tenth
    async with serving(server):
        command = [sys.executable, "-m", "cllm", "bench", "sequential", "--url", server.url, "--against", "none"]
        process = await asyncio.create_subprocess_exec(
            *(*command, "--backend", "fake", "--json", str(file), "--report", str(page)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        await asyncio.wait_for(hold.wait(), 120)
        process.send_signal(number)
        out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 128 + number, err.decode()
    content = json.loads(file.read_text())
    (run,) = content["workloads"][0]["runs"]
    assert [request["seconds"] is not None for request in run["requests"]] == [True] * 6 + [False]
    if number == signal.SIGINT:
        assert content["interrupted"] and run["partial"] == "it was interrupted"
        assert b"interrupted" in err and str(file).encode() in out
        assert b"Traceback" not in err, err.decode()
        assert "interrupted" in (page / "index.html").read_text()


# -- command line ----------------------------------------------------------------------------------------------------


def test_a_missing_peer_is_one_line_that_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert bench("batch", "--against", "llama-server") == 2
    message = capsys.readouterr().err
    assert "pip install 'xllamacpp>=" in message and "--against none" in message
    assert len(message.strip().splitlines()) == 1


@pytest.mark.parametrize("command", [["micro", "--quick"], ["kernels", "--quick"], ["kv-types", "--quick"]])
def test_what_a_default_install_lacks_is_said_before_the_work(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    assert bench(*command) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.strip().splitlines()
    assert "cllm bench needs scipy; install it with: " in line and line.endswith("scripts/install.py bench")
    assert not captured.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["batch", "--against", "ollama"], "--against is 'ollama'"),
        (["batch", "--against", "none", "--url", "localhost"], "'localhost' is not the address"),
        (["batch", "--against", "ftp://x"], "'ftp://x' is not the address"),
        (["micro", "--url", "http://127.0.0.1:1"], "omit --url"),
        (["batch", "--url", "http://127.0.0.1:1", "--against", "none"], "server answers at http://127.0.0.1:1 (no"),
        (["batch", "--backend", "fake", "--against", "http://127.0.0.1:1"], "server answers at http://127.0.0.1:1"),
        (["kernels", "--instruction-set", "sse9"], "--instruction-set is sse9; this CPU has"),
        (["kv-types", "--instruction-set", "sse9"], "--instruction-set is sse9; this CPU has"),
        (["batch", "--against", "none", "--set", "no.such=1"], "no.such"),
        (["batch", "--against", "none", "--set", "server.port=-3"], "server.port"),
        (["batch", "--against", "none", "--backend", "fake", "--json", "/proc/no/file"], "cannot write"),
        (["batch", "--against", "none", "--backend", "fake", "--report", "/proc/no"], "cannot write"),
    ],
)
def test_wrong_options_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*arguments) == 2
    message = capsys.readouterr().err
    assert said in message and len(message.strip().splitlines()) == 1


def test_every_workload_says_in_help_what_it_asks_and_its_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("-h") == 0
    short = capsys.readouterr().out
    assert bench("--help") == 0
    text = capsys.readouterr().out
    assert short == text
    assert "does anything get slower?" in text and "is it computed once?" in text
    assert bench("batch", "--help") == 0
    assert "clients (1), prompt_tokens (330)" in " ".join(capsys.readouterr().out.split())


def test_bench_starts_cllm_drives_it_and_writes_what_it_found(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    options = ["--backend", "fake", "--against", "none", "--quick", "--repeats", "1", "--json", str(file)]
    assert bench("stall", *options, "--set", "backend.fake.latency_ms=1", "--size", "streams=2") == 0
    content = json.loads(file.read_text())
    assert content["failures"] == {} and content["settings"]["quick"] is True and not content["interrupted"]
    (stall,) = content["workloads"]
    (run,) = stall["runs"]
    assert stall["peers"] == [] and run["facts"]["backend"] == "fake" and len(run["requests"]) == 3
    assert "backend.fake.latency_ms 1" in run["facts"]["settings"]
    found = {row["key"]: row["ours"]["median"] for row in stall["rows"] if row["ours"]}
    assert {figure.key for figure in Stall.figures} <= found.keys()
    assert found["seconds"] > 0 and found["long_ttft_ms"] > 0
    # What cLLM says of itself is in there, too.
    assert {"resident_mb", "cpu_percent", "fragmentation_percent"} <= found.keys()
    assert run["samples"][-1]["resident_mb"] > 10


def test_the_peer_may_be_any_server(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(TinyServer()) as ours, serving(TinyServer()) as peer:
            report = Report(describe_machine(), {}, tmp_path / "bench.json")
            setup = replace(setup_for(ours.url, peer.url), encode=words)
            await run_all([SMALL[1]], setup, report, Console(quiet=True))
            assert report.ok and report.results[0].peers == [peer.url]
            assert report.results[0].driven == ours.url

    asyncio.run(run())

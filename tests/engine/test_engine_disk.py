"""The engine with a disk: who waits for it holds up nobody, ends once whatever happens, and is woken in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cllm import LLM, SamplingParams
from cllm.engine.loop import Engine
from cllm.engine.request import FinishReason, Request
from cllm.kv.block_names import fingerprint
from cllm.kv.disk.files import Files
from cllm.kv.disk.store import DiskStore
from cllm.kv.ops import BlockBytes
from cllm.kv.paged.manager import PagedKVManager
from cllm.kv.tiers.disk_tier import DiskTier
from engine_kit import LIMIT_S, Collector, assert_nothing_left, make_engine, make_request, reference

PROMPT = [i % 250 for i in range(100)]


class HeldFiles(Files):
    """Payloads are read when the test says so."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.reading = threading.Event()
        self.held = False

    def sync(self, file: int) -> None:
        """Nobody cuts the power here."""

    def read(self, file: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.held:
            self.reading.set()
            assert self.go.wait(LIMIT_S)
        return super().read(file, buffers, offset)


class Server:
    def __init__(self, directory: Path) -> None:
        self.files = HeldFiles()
        self.engine, self.backend, self.collector = make_engine()
        kv, ops = self.engine.scheduler.kv, self.backend.ops
        assert isinstance(kv, PagedKVManager) and isinstance(ops, BlockBytes)
        self.kv = kv
        self.store = DiskStore(directory, limit=1 << 20, linger_s=0.0, files=self.files)
        size = {"block_tokens": 4, "block_bytes": ops.block_bytes}
        tier = DiskTier(self.store, **size, least_tokens=8, worth_tokens=12)
        kv.use_disk(tier)
        model_store = self.store.open_model(fingerprint(b"fake", {}), **size, about={"model": "fake"})
        assert model_store.ready(LIMIT_S)
        tier.attach(model_store)

    def ask(self, prompt: list[int], **options: Any) -> Request:
        # Its time counts from now, by the engine's clock.
        request = make_request(prompt, arrival=time.monotonic(), **options)
        self.engine.submit(request)
        return request

    def answer(self, request: Request) -> list[int]:
        end = self.collector.wait_end(request)
        assert end.error is None
        return self.collector.tokens[request.id, 0]


@contextmanager
def serving(directory: Path) -> Iterator[Server]:
    server = Server(directory)
    server.engine.start()
    try:
        yield server
    finally:
        server.files.go.set()
        server.engine.stop(LIMIT_S)
        server.store.close()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A directory with the K/V of PROMPT."""
    with serving(tmp_path) as server:
        server.answer(server.ask(PROMPT))
    return tmp_path


@contextmanager
def waiting(directory: Path, **options: float) -> Iterator[tuple[Server, Request]]:
    """A server with one request that waits for the disk."""
    with serving(directory) as server:
        server.files.held = True
        request = server.ask(PROMPT, **options)
        assert server.files.reading.wait(LIMIT_S)
        yield server, request


def until(condition: object) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_others_are_served_while_one_waits(written: Path) -> None:
    with waiting(written) as (server, request):
        other = server.ask([1, 2, 3])
        assert server.answer(other) == reference(other)
        assert server.kv.loading == 1
        server.files.go.set()
        assert server.answer(request) == reference(request)
        assert server.collector.ends[request.id, 0].hit.tokens == 96
        until(lambda: server.engine.snapshot.kv.referenced == 0)


def test_an_answer_that_is_resumed_finds_its_own_tokens_there(tmp_path: Path) -> None:
    params = SamplingParams(seed=1, max_tokens=60, ignore_eos=True)
    with serving(tmp_path) as server:
        answer = server.answer(server.ask(PROMPT, params=params))
    with serving(tmp_path) as server:
        resumed = server.ask(PROMPT, params=params, generated=[answer[:50]])
        assert server.answer(resumed) == answer[50:]
        assert server.backend.computed_tokens <= 10 + 4
        assert server.collector.ends[resumed.id, 0].hit.tokens == len(PROMPT)


def test_the_engine_rests_while_it_waits(written: Path) -> None:
    with waiting(written) as (server, request):
        turns = count_turns(server.engine)
        time.sleep(0.3)
        assert len(turns) < 10
        server.files.go.set()
        assert server.answer(request) == reference(request)


def count_turns(engine: Engine) -> list[None]:
    turns: list[None] = []
    turn = engine.turn

    def counted() -> bool:
        turns.append(None)
        return turn()

    engine.turn = counted  # type: ignore[method-assign]
    return turns


@pytest.mark.parametrize("way", ["cancelled", "timeout"])
def test_whoever_leaves_meanwhile_ends_once(written: Path, way: str) -> None:
    with waiting(written, timeout_s=0.3 if way == "timeout" else 1e6) as (server, request):
        if way == "cancelled":
            server.engine.cancel(request.id)
        assert server.collector.wait_end(request).reason is FinishReason(way)
        assert server.kv.loading == 1, "the reader still has the blocks"
        server.files.go.set()
        until(lambda: server.kv.loading == 0 and server.engine.snapshot.kv.referenced == 0)
        again = server.ask(PROMPT)
        assert server.answer(again) == reference(again)
        server.engine.stop(LIMIT_S)
        assert_nothing_left(server.engine)


def test_a_stop_does_not_wait_for_the_disk(written: Path) -> None:
    with waiting(written) as (server, request):
        threading.Timer(0.2, server.files.go.set).start()
        server.engine.stop(0.0)
        assert server.collector.wait_end(request).reason is FinishReason.CANCELLED
        assert_nothing_left(server.engine)


def test_memory_that_is_lost_meanwhile_is_no_matter(written: Path) -> None:
    with waiting(written) as (server, request):
        server.backend.faults.steps_to_fail, server.backend.faults.fatal = 1, True
        other = server.ask([1, 2, 3])
        assert server.answer(other) == reference(other)
        assert server.engine.rebuilds == 1
        server.files.go.set()
        assert server.answer(request) == reference(request)
        until(lambda: server.engine.snapshot.kv.referenced == 0)


def test_what_cannot_be_read_is_computed(written: Path) -> None:
    for path in written.glob("*/*.kv"):
        content = bytearray(path.read_bytes())
        content[-4096 + 400] ^= 1  # its payload takes one page, from the first block on
        path.write_bytes(content)
    with serving(written) as server:
        request = server.ask(PROMPT)
        assert server.answer(request) == reference(request)
        assert 0 < server.collector.ends[request.id, 0].hit.tokens < 96
        assert server.engine.snapshot.kv.disk.failed_loads == 1


def test_ends_are_counted(written: Path) -> None:
    with serving(written) as server:
        for _ in range(3):
            request = server.ask(PROMPT)
            assert server.answer(request) == reference(request)
        disk = server.engine.snapshot.kv.disk
        assert (disk.loads, disk.loaded_tokens) == (1, 96)
        assert isinstance(server.collector, Collector) and len(server.collector.ends) == 3


@pytest.mark.parametrize("layout", ["paged", "slots"])
def test_the_fake_backend_keeps_what_it_is_asked_to(tmp_path: Path, layout: str) -> None:
    keys = {"backend.fake.layout": layout, "kv.disk.directory": str(tmp_path)}
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    prompt = [number % 250 for number in range(700)]
    answers = []
    for enabled in ({}, {"kv.disk.enabled": True}, {"kv.disk.enabled": True}):
        with LLM("fake", backend="fake", settings={**keys, **enabled}) as llm:
            answers.append(llm.generate([prompt], greedy)[0])
            assert (llm.kv()["details"]["disk"] is None) == (not enabled)
    assert [answer.cached_tokens for answer in answers[:2]] == [0, 0] and answers[2].cached_tokens >= 688
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids

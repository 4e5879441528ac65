"""`cllm bench turns`: are the turns what they are called, and is what they cost counted right?"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench_kit import Events, TinyServer, bench, measured, serving
from cllm_bench.errors import BenchError
from cllm_bench.figures import OURS
from cllm_bench.kernels.shapes import MIXES
from cllm_bench.random_model import write
from cllm_bench.servers import Server
from cllm_bench.workloads import turns as turns_module
from cllm_bench.workloads.base import Setup
from cllm_bench.workloads.turns import CHAT, TURNS, USERS, Turns, chat_counter
from layered_kit import TINY_SHAPES
from thorough import slow

SMALL = Turns(chat_tokens=400, message_tokens=40, answer_tokens=6, users=4, system_tokens=100, checks=len(CHAT) + 1)
SETUP = Setup(model="fake", encode=str.encode, threads=1, repeats=1, backend="fake")


class CachingServer:
    """Computes what follows the last message that it has seen; a directory is what it knows after a restart."""

    def __init__(self) -> None:
        self.known: dict[str | None, list[list[Any]]] = {}
        self.place: str | None = None
        self.asked: list[tuple[str | None, list[dict[str, str]]]] = []
        self.count = chat_counter(SETUP)
        self.differs = False
        """Whether the cache changes answers."""

    def answer(self, body: dict[str, Any], prompt_tokens: int) -> Events:
        messages = body.get("messages", [{"role": "user", "content": body.get("prompt", "")}])
        known = self.known.setdefault(self.place, [])
        same = max((_same(messages, chat) for chat in known), default=0)
        text = f"{'cached' if same and self.differs else 'answer'} to {len(messages)} words that follow more "
        if "messages" in body:
            self.asked.append((self.place, messages))
            known.append([*messages, {"role": "assistant", "content": text}])
        for _ in range(body["max_tokens"] - 1):
            yield {"choices": [{"index": 0, "delta": {"content": ""}, "text": ""}]}
        yield {"choices": [{"index": 0, "delta": {"content": text}, "text": text}]}
        usage = {"prompt_tokens": self.count(messages, True), "completion_tokens": body["max_tokens"]}
        cached = self.count(messages[:same], False) if same else 0
        yield {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": cached}}}


def _same(messages: list[Any], others: list[Any]) -> int:
    """Messages at the beginning that are the same."""
    for number, (one, other) in enumerate(zip(messages, others, strict=False)):
        if one != other:
            return number
    return min(len(messages), len(others))


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[CachingServer]:
    monkeypatch.setenv("CLLM_CACHE_DIR", str(tmp_path))
    caching = CachingServer()
    async with serving(TinyServer(answer=caching.answer)) as tiny:

        @asynccontextmanager
        async def start(
            model: str, threads: int, backend: str, settings: Mapping[str, Any], *, stop_s: float
        ) -> AsyncIterator[Server]:
            caching.place = settings.get("kv.disk.directory")
            if caching.place is None:
                caching.known.pop(None, None)
            yield Server(tiny.url)

        monkeypatch.setattr(turns_module, "start_cllm", start)
        yield caching


async def test_every_turn_is_what_it_is_called(server: CachingServer) -> None:
    (run,) = await measured(SMALL, SETUP)
    assert run.partial is None
    chat = [messages for place, messages in server.asked if place and place.endswith("chat") and len(messages) > 1]
    first, following, stripped, edited, back, restarted = chat
    answer = {"role": "assistant", "content": f"answer to {len(first)} words that follow more "}
    assert following[:-1] == [*first, answer] and following[-1]["role"] == "user"
    half = "words that follow more"
    assert stripped[: len(following)] == following and stripped[-2] == {"role": "assistant", "content": half}
    assert [one == other for one, other in zip(edited, stripped, strict=False)].count(False) == 1
    assert _same(edited, stripped) == len(edited) - 3 and edited[-1]["role"] == "user"
    assert back[: len(stripped)] == stripped and len(back) == len(edited) and back[-2] == edited[-2]
    assert restarted[: len(back)] == back and len(restarted) == len(back) + 2
    users = [messages for place, messages in server.asked if place and place.endswith("users") and len(messages) > 1]
    assert len(users) == SMALL.users and len({messages[0]["content"] for messages in users}) == 1
    assert len({messages[1]["content"] for messages in users}) == SMALL.users


async def test_a_cache_that_computes_only_what_is_new_computes_one_token_for_each(server: CachingServer) -> None:
    (run,) = await measured(SMALL, SETUP)
    over = {turn.key: run.metrics.get(f"{turn.key}_over_new") for turn in TURNS[1:]}
    assert all(value == pytest.approx(1.0) for value in over.values()), over
    assert run.metrics["users_computed"] == sum(one["new"] for one in run.facts["turns"][USERS.key])
    assert run.metrics["first_computed"] >= SMALL.chat_tokens
    assert set(run.metrics) == {figure.key for figure in SMALL.all_figures}


async def test_answers_are_compared_with_those_of_servers_that_know_nothing(server: CachingServer) -> None:
    (run,) = await measured(SMALL, SETUP)
    assert (run.metrics["checked"], run.metrics["unequal"]) == (6, 0)
    alone = [messages for place, messages in server.asked if place is None and len(messages) > 1]
    of_cache = [messages for place, messages in server.asked if place is not None and len(messages) > 1]
    assert len(alone) == 6 and all(messages in of_cache for messages in alone)
    server.differs = True
    (run,) = await measured(SMALL, SETUP)
    assert run.metrics["unequal"] == 6
    assert list(run.facts["computed_alone_s"]) == [turn.key for turn in (*CHAT, USERS)]


async def test_servers_that_it_could_not_restart_are_refused() -> None:
    for setup in (
        Setup(model="fake", encode=str.encode, threads=1, repeats=1, url="http://127.0.0.1:1"),
        Setup(model="fake", encode=str.encode, threads=1, repeats=1, against=("http://127.0.0.1:1",)),
    ):
        with pytest.raises(BenchError, match="restarts the servers"):
            await SMALL.measure(setup, lambda run: None)


async def test_a_server_that_cannot_start_ends_its_side_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def start(*args: Any, **settings: Any) -> AsyncIterator[Server]:
        raise BenchError("no memory")
        yield Server("")

    monkeypatch.setattr(turns_module, "start_cllm", start)
    (run,) = await measured(SMALL, SETUP)
    assert (run.side, run.metrics, run.partial) == (OURS, {}, "no memory")


@slow
def test_the_command_drives_cllm_through_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "turns.json"
    assert bench("turns", "--backend", "fake", "--model", "fake", "--quick", "--json", str(file)) == 0
    rows = {row["key"]: row["ours"]["median"] for row in json.loads(file.read_text())["workloads"][0]["rows"]}
    assert rows["unequal"] == 0 and rows["checked"] == 6
    assert rows["restarted_computed"] < rows["first_computed"] / 2


@slow
def test_a_model_with_windows_computes_what_is_new_and_answers_as_without_a_cache(tmp_path: Path) -> None:
    pytest.importorskip("cllm._native", reason="the extension is not built")
    model = write(tmp_path / "tiny.gguf", TINY_SHAPES["gemma3"], MIXES["q8_0"], "tiny")
    file = tmp_path / "turns.json"
    sizes = ("--size", "message_tokens=200", "--size", "chat_tokens=1000", "--size", "users=3")
    assert bench("turns", "--model", str(model), "--quick", *sizes, "--json", str(file)) == 0
    (run,) = json.loads(file.read_text())["workloads"][0]["runs"]
    metrics = run["metrics"]
    assert metrics["unequal"] == 0 and metrics["checked"] == 6
    assert all(0.9 < metrics[f"{turn.key}_over_new"] < 1.2 for turn in (*CHAT, USERS))

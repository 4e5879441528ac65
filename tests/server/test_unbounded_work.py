"""Work that a few bytes can make endless: whatever comes, the event loop stays free, memory is bounded and given back,
and nothing goes on once nobody waits for it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cllm.config import load_config
from cllm.llm import AsyncLLM
from cllm.server.app import create_app
from event_loop import LoopTimes, Reply, post
from thorough import sampled

pytestmark = pytest.mark.slow

MOST_CPU_S = 0.020
AFTER_S = 1.0
"""Nothing runs this long after the client has left, on an idle machine."""
GUARD_S = 60.0
WORK_CPU_S, WORK_MB, CACHED_MB = 1.0, 96, 64
SLACK_MB = 64
"""What a test's process may grow beside the budgets: it imports, and Python keeps some."""


class Served:
    """The app on a loop of its own."""

    def __init__(self, directory: Path, template: str | None = None) -> None:
        keys: dict[str, Any] = {
            "backend.type": "fake",
            "resources.max_context_length": 4_096,
            "work.max_cpu_s": WORK_CPU_S,
            "work.max_memory_mb": WORK_MB,
            "structured.max_cached_mb": CACHED_MB,
            "structured.max_compile_mb": WORK_MB,
            "log.level": "error",
        }
        if template is not None:
            (directory / "template.jinja").write_text(template)
            keys["model.chat_template"] = str(directory / "template.jinja")
        config = load_config(overrides=keys).config
        self._loop = asyncio.new_event_loop()
        self.llm = AsyncLLM(config)
        self.app = create_app(self.llm, config)
        self._loop.run_until_complete(self.llm.start())
        self.answer("/v1/chat/completions", chat("warm"))

    def answer(self, path: str, body: Any) -> Reply:
        """For which no callback may take long; the third time at the latest, as machines have hiccups."""
        for _ in range(3):
            times = LoopTimes()
            with times.measured():
                reply = self._loop.run_until_complete(post(self.app, path, json.dumps(body).encode()))
            if times.worst <= MOST_CPU_S:
                return reply
        raise AssertionError(f"{times.worst * 1000:.0f} ms, three times in a row")

    def leave(self, path: str, body: Any, after_s: float) -> None:
        """Ask, and go away."""

        async def ask() -> None:
            gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            asked = asyncio.ensure_future(post(self.app, path, json.dumps(body).encode(), gone))
            await asyncio.wait([asked], timeout=after_s)
            gone.set_result(None)
            await asyncio.wait_for(asyncio.wait([asked]), GUARD_S)
            await asyncio.sleep(AFTER_S)

        self._loop.run_until_complete(ask())

    @property
    def works(self) -> bool:
        assert self.llm.workers is not None
        compiler = self.llm.text.compiler
        return bool(self.llm.workers.running or self.llm.workers.waiting or compiler._shared or compiler._turns.running)

    def close(self) -> None:
        self._loop.run_until_complete(self.llm.shutdown(0))
        self._loop.close()


def chat(content: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **more}


def resident_mb() -> float:
    return float(psutil.Process().memory_info().rss) / 1e6


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("served"))
    yield server
    server.close()


# -- templates ---------------------------------------------------------------------------------------------------------

START = "{% if messages[0].content == 'go' %}"
DOUBLINGS = {
    "+": "{% set x.y = x.y + x.y %}",
    "~": "{% set x.y = x.y ~ x.y %}",
    "list": "{% set x.y = [x.y, x.y] | join %}",
    "replace": "{% set x.y = x.y | replace('a', 'aa') %}",
    "join": "{% set x.y = ('' + x.y).join(['', x.y, '']) %}",
    "tojson": "{% set x.y = {'a': x.y} | tojson(indent=99999) ~ x.y %}",
    "batch": "{% set x.y = [x.y] | batch(2, x.y) | first | join %}",
    "bytes": "{% set x.y = (2 ** 60000).to_bytes(999999999, 'big') | string %}",
    "expandtabs": "{% set x.y = (x.y ~ x.y ~ '\\t').expandtabs(99999) %}",
    "indent": "{% set x.y = (x.y ~ '\n' ~ x.y) | indent(99999) %}",
    "slice": "{% set x.y = x.y ~ x.y | slice(99999) | list | string %}",
    "lipsum": "{% set x.y = lipsum(n=99999) %}",
    "encode": "{% set x.y = (x.y.encode('utf-32') | string) ~ x.y %}",
}
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def doubling(step: str) -> str:
    return (
        START
        + "{% set x = namespace(y='aaaaaaaa') %}{% for i in range(60) %}"
        + step
        + "{% endfor %}{{ x.y }}{% endif %}x"
    )


@pytest.mark.parametrize("name", [*DOUBLINGS, "loops"])
def test_a_template_that_never_ends_or_takes_all_memory_is_ended(name: str, tmp_path: Path) -> None:
    server = Served(tmp_path, START + LOOPS + "{% endif %}x" if name == "loops" else doubling(DOUBLINGS[name]))
    try:
        before, began = resident_mb(), time.monotonic()
        reply = server.answer("/v1/chat/completions", chat("go"))
        assert reply.status == 400 and b"template" in reply.body, reply.body
        assert time.monotonic() - began < GUARD_S
        assert resident_mb() - before < SLACK_MB
        assert server.answer("/v1/chat/completions", chat("again")).status == 200
        server.leave("/v1/chat/completions", chat("go"), 0.1)
        assert not server.works
    finally:
        server.close()


def test_what_a_template_writes_does_not_come_into_the_server(tmp_path: Path) -> None:
    """Within the worker's limits."""
    large = (
        "{% set x = namespace(y='a' * 1000) %}{% for i in range(14) %}{% set x.y = x.y ~ x.y %}{% endfor %}{{ x.y }}"
    )
    server = Served(tmp_path, START + large + "{% endif %}x")
    try:
        before = resident_mb()
        reply = server.answer("/v1/chat/completions", chat("go"))
        assert reply.status == 400 and b"context" in reply.body, reply.body
        assert resident_mb() - before < 16
    finally:
        server.close()


# -- grammars ----------------------------------------------------------------------------------------------------------

NUMBERS = st.integers(30_000, 49_999).map(lambda n: {"type": "integer", "multipleOf": 2 * n + 1})
PATTERNS = st.builds(
    lambda head, low, high: {"type": "string", "pattern": f"^({head}{{{low},{low + high}}}){{1,{high}}}$"},
    st.sampled_from(["[a-z]", ".", "(a|b)*a", "\\w+\\s?"]),
    st.integers(1, 400),
    st.integers(1, 400),
)
OBJECTS = st.builds(
    lambda count, kind: {"type": "object", "properties": {f"p{n}": {"type": kind} for n in range(count)}},
    st.integers(1, 900),
    st.sampled_from(["string", "integer", "boolean"]),
)
ENUMS = st.integers(1, 3000).map(lambda count: {"enum": [f"value {n * 7919 % 3001}" for n in range(count)]})
SCHEMAS = st.one_of(NUMBERS, PATTERNS, OBJECTS, ENUMS)


def by_schema(schema: Any) -> dict[str, Any]:
    return chat("x", response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


@settings(max_examples=sampled(15), deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS)
def test_whatever_the_schema_the_loop_is_free_and_memory_bounded(served: Served, schema: Any) -> None:
    before = resident_mb()
    assert served.answer("/v1/chat/completions", by_schema(schema)).status in (200, 400, 429)
    assert resident_mb() - before < CACHED_MB + SLACK_MB
    assert served.llm.text.compiler.cache.size <= CACHED_MB << 20


@settings(max_examples=sampled(4), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(SCHEMAS, min_size=1, max_size=8, unique_by=repr), st.floats(0.0, 0.3))
def test_nothing_is_compiled_for_clients_that_have_left(served: Served, schemas: list[Any], after_s: float) -> None:
    for schema in schemas:
        served.leave("/v1/chat/completions", by_schema(schema), after_s)
        assert not served.works


def test_many_large_schemas_take_no_more_memory_than_they_may(served: Served) -> None:
    before = resident_mb()
    for number in range(12):
        reply = served.answer("/v1/chat/completions", by_schema({"type": "integer", "multipleOf": 98_001 + 2 * number}))
        assert reply.status in (200, 400), reply.body
    assert resident_mb() - before < CACHED_MB + SLACK_MB


# -- texts -------------------------------------------------------------------------------------------------------------

TEXTS = st.builds(
    lambda piece, count: piece * count,
    st.sampled_from(["<bos>", "<eos>", "\u2003", "\u00a0", "5", "é", " a", "\n", "<|im_start|>", "\ue000"]),
    st.sampled_from([1, 400, 2_001, 30_000, 80_000, 140_000]),
)
ROUTES = st.sampled_from(["content", "reasoning_content", "thinking", "reasoning", "prompt", "tool"])


def with_text(route: str, text: str) -> tuple[str, Any]:
    user = {"role": "user", "content": "x"}
    if route == "prompt":
        return "/v1/completions", {"prompt": text, "max_tokens": 2}
    if route == "content":
        return "/v1/chat/completions", chat(text)
    if route == "reasoning_content":
        said = {"role": "assistant", "content": "y", "reasoning_content": text}
        return "/v1/chat/completions", {"messages": [user, said, user], "max_tokens": 2}
    if route == "thinking":
        said = {"role": "assistant", "content": [{"type": "thinking", "thinking": text, "signature": "s"}]}
        return "/v1/messages", {"model": "fake", "messages": [user, said, user], "max_tokens": 2}
    if route == "reasoning":
        item = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}
        said = {"role": "assistant", "content": "y"}
        return "/v1/responses", {"input": [user, item, said, user], "max_output_tokens": 16}
    function = {"name": "f", "description": text, "parameters": {"type": "object", "properties": {}}}
    return "/v1/chat/completions", chat("x", tools=[{"type": "function", "function": function}])


@settings(max_examples=sampled(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(ROUTES, TEXTS)
def test_wherever_a_large_text_is_the_loop_is_free(served: Served, route: str, text: str) -> None:
    assert served.answer(*with_text(route, text)).status in (200, 400)


@settings(max_examples=sampled(4), deadline=None, suppress_health_check=list(HealthCheck))
@given(ROUTES, TEXTS, st.floats(0.0, 0.2))
def test_no_text_is_worked_on_for_clients_that_have_left(served: Served, route: str, text: str, after_s: float) -> None:
    served.leave(*with_text(route, text), after_s)
    assert not served.works

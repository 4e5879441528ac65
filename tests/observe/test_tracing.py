"""OpenTelemetry traces: a span per HTTP request, the engine's below it; off and free by default; never in the way."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from cllm.config import Config, ObserveConfig, load_config
from cllm.errors import ConfigError
from cllm.llm import AsyncLLM
from cllm.observe import tracing as tracing_module
from cllm.observe.otlp import open_tracing, traces_endpoint
from cllm.observe.tracing import Tracing
from cllm.server.app import create_app
from collector_kit import attributes, collecting
from http_kit import client_for, served
from metrics_kit import record
from scripted_llm import ScriptedLLM
from served_models import complete
from served_models import serving as serving_models
from server_process import LIMIT_S, serving, until
from thorough import slow

CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ENGINE = ["queue", "prefill", "decode"]


class Traced:
    """Spans as they are exported; `tracing` is what the app was made with."""

    def __init__(self, tracing: Tracing, exporter: InMemorySpanExporter) -> None:
        self.tracing = tracing
        self._exporter = exporter

    def end(self) -> list[ReadableSpan]:
        """Everything that was traced."""
        self.tracing.close()
        return list(self._exporter.get_finished_spans())


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Traced:
    """Apps that the test makes are traced in memory."""
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)
    monkeypatch.setattr("cllm.server.app.open_tracing", lambda _: tracing)
    return Traced(tracing, exporter)


def one(spans: list[ReadableSpan], name: str) -> ReadableSpan:
    (found,) = [span for span in spans if span.name == name]
    return found


def values(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def of_engine(spans: list[ReadableSpan]) -> list[ReadableSpan]:
    return [span for span in spans if span.name in ENGINE]


# -- what a trace has ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_is_a_span_with_queue_prefill_and_decode_below_it(traced: Traced, stream: bool) -> None:
    async with client_for(ScriptedLLM()) as client:
        response = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        assert response.status_code == 200
    spans = traced.end()
    assert sorted(span.name for span in spans) == sorted(["POST /v1/chat/completions", *ENGINE])
    server = one(spans, "POST /v1/chat/completions")
    assert server.kind is SpanKind.SERVER and server.parent is None
    assert values(server) == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "url.scheme": "http",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "cllm.request_id": response.headers["x-request-id"],
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
    }
    queue, prefill, decode = (one(spans, name) for name in ENGINE)
    for span in (queue, prefill, decode):
        assert span.parent is not None and span.parent.span_id == server.context.span_id
        assert span.context.trace_id == server.context.trace_id
        assert span.kind is SpanKind.INTERNAL
        assert values(span)["gen_ai.request.model"] == "tiny" and values(span)["gen_ai.operation.name"] == "chat"
        assert values(span)["gen_ai.response.id"].startswith("chatcmpl-")
    assert queue.start_time <= queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time < decode.end_time
    assert server.start_time <= queue.start_time + 1_000_000 and decode.end_time <= server.end_time
    if not stream:
        usage = response.json()["usage"]
        assert values(queue)["gen_ai.response.id"] == response.json()["id"]
        assert values(prefill)["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert values(decode)["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert values(prefill)["gen_ai.usage.cache_read.input_tokens"] == 0
    assert values(prefill)["gen_ai.response.time_to_first_chunk"] > 0
    assert values(decode)["gen_ai.response.finish_reasons"] == ("stop",)
    assert all(span.status.status_code is StatusCode.UNSET for span in spans)


async def test_cached_tokens_are_in_the_trace(traced: Traced) -> None:
    prompt = "a prompt that is longer than a block of sixteen tokens"
    async with client_for(ScriptedLLM(max_context=200)) as client:
        for _ in range(2):
            reply = (await client.post("/v1/completions", json={"prompt": prompt, "temperature": 0})).json()
    cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 32
    spans = [values(span) for span in traced.end() if span.name == "prefill"]
    assert [span["gen_ai.usage.cache_read.input_tokens"] for span in spans] == [0, cached]
    assert [span["cllm.cache.known_tokens"] for span in spans] == [0, cached]


async def test_the_trace_of_the_client_goes_on(traced: Traced) -> None:
    async with client_for(ScriptedLLM()) as client:
        await client.post("/v1/chat/completions", json=CHAT, headers={"traceparent": PARENT, "tracestate": "a=b"})
    spans = traced.end()
    server = one(spans, "POST /v1/chat/completions")
    assert {f"{span.context.trace_id:032x}" for span in spans} == {PARENT.split("-")[1]}
    assert server.parent is not None and f"{server.parent.span_id:016x}" == PARENT.split("-")[2]
    assert server.context.trace_state.get("a") == "b"


@pytest.mark.parametrize(
    "parent", ["", "nonsense", "00-" + "0" * 32 + "-b7ad6b7169203331-01", PARENT[:-3], "ff" + PARENT]
)
async def test_a_broken_traceparent_begins_a_new_trace(traced: Traced, parent: str) -> None:
    async with client_for(ScriptedLLM()) as client:
        response = await client.post("/v1/chat/completions", json=CHAT, headers={"traceparent": parent})
        assert response.status_code == 200
    assert one(traced.end(), "POST /v1/chat/completions").parent is None


async def test_what_the_client_does_not_sample_is_not_traced(traced: Traced) -> None:
    async with client_for(ScriptedLLM()) as client:
        await client.post("/v1/chat/completions", json=CHAT, headers={"traceparent": PARENT[:-1] + "0"})
        assert not traced.tracing._requests
    assert traced.end() == []


async def test_monitoring_is_not_traced(traced: Traced) -> None:
    async with client_for(ScriptedLLM()) as client:
        for path in ("/health", "/ready", "/metrics"):
            assert (await client.get(path)).status_code == 200
    assert traced.end() == []


async def test_each_of_several_prompts_has_its_spans(traced: Traced) -> None:
    async with client_for(ScriptedLLM()) as client:
        body = {"prompt": ["one", "two", "three"], "temperature": 0}
        response = await client.post("/v1/completions", json=body, headers={"x-request-id": "my-own-7"})
        assert response.status_code == 200
    spans = traced.end()
    server = one(spans, "POST /v1/completions")
    assert values(server)["cllm.request_id"] == "my-own-7"
    assert values(server)["gen_ai.operation.name"] == "text_completion"
    children = of_engine(spans)
    assert sorted(span.name for span in children) == sorted(ENGINE * 3)
    assert all(span.parent is not None and span.parent.span_id == server.context.span_id for span in children)
    assert len({values(span)["gen_ai.response.id"] for span in children}) == 3


async def test_requests_with_the_same_id_do_not_mix(traced: Traced) -> None:
    async with client_for(ScriptedLLM()) as client:
        for _ in range(2):
            await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "again"})
    spans = traced.end()
    servers = [span for span in spans if span.kind is SpanKind.SERVER]
    assert len(servers) == 2
    for server in servers:
        below = [span.name for span in spans if span.parent and span.parent.span_id == server.context.span_id]
        assert sorted(below) == sorted(ENGINE)


@pytest.mark.parametrize(
    ("method", "path", "body", "name", "status"),
    [
        ("GET", "/nothing/here", None, "GET", 404),
        ("POST", "/v1/chat/completions", {"messages": []}, "POST /v1/chat/completions", 400),
        ("GET", "/v1/responses/resp-1", None, "GET /v1/responses/{response_id}", 404),
        ("BREW", "/v1/models", None, "HTTP /v1/models", 405),
    ],
)
async def test_refusals_have_their_status(
    traced: Traced, method: str, path: str, body: Any, name: str, status: int
) -> None:
    async with client_for(ScriptedLLM()) as client:
        assert (await client.request(method, path, json=body)).status_code == status
    (span,) = traced.end()
    found = values(span)
    assert found["http.response.status_code"] == status and span.status.status_code is StatusCode.UNSET
    assert "error.type" not in found
    assert found["http.request.method"] == (method if method != "BREW" else "_OTHER")
    assert (span.name, found.get("http.route")) == (name, name.partition(" ")[2] or None)


async def test_a_crash_is_an_error(traced: Traced) -> None:
    async with client_for(ScriptedLLM(failure=RuntimeError("boom"))) as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 500
    (span,) = traced.end()
    assert span.status.status_code is StatusCode.ERROR
    assert values(span)["http.response.status_code"] == 500 and values(span)["error.type"] == "500"


async def test_a_client_that_leaves_is_in_the_trace_though_the_engine_ends_later(traced: Traced) -> None:
    llm = ScriptedLLM(steps=3)
    async with served(llm) as app, httpx.AsyncClient(base_url=app.url) as client:
        body = {**CHAT, "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_lines():
                break
        await app.idle.wait()
        llm.release()
        await llm.idle()
    spans = traced.end()
    assert values(one(spans, "decode"))["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert one(spans, "decode").parent is not None
    assert values(one(spans, "POST /v1/chat/completions"))["http.response.status_code"] == 200


async def test_a_client_that_leaves_before_the_answer_has_no_status(traced: Traced) -> None:
    llm = ScriptedLLM(steps=0)
    async with served(llm) as app, httpx.AsyncClient(base_url=app.url) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/chat/completions", json={**CHAT, "stream": True}, timeout=0.5)
        await app.idle.wait()
        llm.release()
        await llm.idle()
    server = one(traced.end(), "POST /v1/chat/completions")
    assert values(server)["error.type"] == "client_gone" and "http.response.status_code" not in values(server)


async def test_embedded_texts_are_counted_and_have_no_spans(traced: Traced) -> None:
    config = load_config(overrides={"backend.type": "fake"}).config
    async with AsyncLLM(config) as llm, _client(llm, config) as client:
        reply = await client.post("/v1/embeddings", json={"input": ["the cat", "sat"]})
        assert reply.status_code == 200
    (span,) = traced.end()
    found = values(span)
    assert found["gen_ai.operation.name"] == "embeddings"
    assert found["gen_ai.usage.input_tokens"] == reply.json()["usage"]["prompt_tokens"] > 0


@asynccontextmanager
async def _client(llm: AsyncLLM, config: Config) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(llm, config))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def test_each_of_several_models_is_named(traced: Traced) -> None:
    async with serving_models("first", "second") as (client, _):
        for name in ("second", "first"):
            assert (await complete(client, name)).status_code == 200
    found = [values(span)["gen_ai.request.model"] for span in traced.end() if span.name == "queue"]
    assert found == ["second", "first"]


# -- what is kept --------------------------------------------------------------------------------------------------


def begin(tracing: Tracing, number: int) -> Any:
    return tracing.begin(f"id{number}", f"id{number}", method="POST", scheme="http", path="/x", headers={})


def test_answered_requests_are_forgotten_in_time(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing_module, "LATE_REQUESTS", 3)
    tracing = traced.tracing
    running = begin(tracing, 0)
    for number in range(1, 6):
        tracing.end(begin(tracing, number), None, 200)
    assert set(tracing._requests) == {"id0", "id3", "id4", "id5"}, "and one that runs is not"
    tracing.end(running, None, 200)
    assert set(tracing._requests) == {"id4", "id5", "id0"}


def test_requests_that_came_from_elsewhere_are_not_traced(traced: Traced) -> None:
    traced.tracing.finished("tiny", record(request_id="req-123"))
    assert traced.end() == []


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ENGINE),
        ({"ttft_s": None, "queued_s": 0.39, "prefill_s": 0.0, "decode_s": 0.0}, ["queue"]),
        ({"ttft_s": None, "queued_s": 0.1, "prefill_s": 0.29, "decode_s": 0.0}, ["queue", "prefill"]),
    ],
)
def test_a_request_has_the_spans_that_it_came_to(traced: Traced, changes: dict[str, Any], names: list[str]) -> None:
    request = begin(traced.tracing, 1)
    failed = {"reason": "timeout", "error": "too late"} if changes else {}
    traced.tracing.finished("tiny", record(request_id="chatcmpl-id1", preemptions=2, **changes, **failed))
    traced.tracing.end(request, None, 200)
    spans = of_engine(traced.end())
    assert [span.name for span in spans] == names
    assert spans[-1].end_time - spans[0].start_time == pytest.approx(0.39e9)
    assert values(spans[-1])["cllm.preemptions"] == 2
    last, before = spans[-1], spans[:-1]
    assert values(last).get("error.type") == failed.get("reason") and last.status.description == failed.get("error")
    assert last.status.status_code is (StatusCode.ERROR if failed else StatusCode.UNSET)
    assert all(span.status.status_code is StatusCode.UNSET for span in before)


def test_an_error_in_the_tracing_thread_is_logged_and_the_next_request_is_traced(
    traced: Traced, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = begin(traced.tracing, 1)
    traced.tracing.finished("tiny", record(request_id="chatcmpl-id1", total_s="broken"))
    traced.tracing.finished("tiny", record(request_id="chatcmpl-id1"))
    traced.tracing.end(request, None, 200)
    assert [span.name for span in of_engine(traced.end())] == ENGINE
    assert "a request has no trace" in caplog.text


# -- when it is on ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "environ", "endpoint"),
    [
        (None, {}, None),
        ("http://c:4318", {}, "http://c:4318/v1/traces"),
        ("http://c:4318/", {}, "http://c:4318/v1/traces"),
        ("https://c/otlp", {}, "https://c/otlp/v1/traces"),
        ("http://c:4318/v1/traces", {}, "http://c:4318/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://e:4318/"}, "http://e:4318/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://e/in"}, "http://e/in"),
        ("http://c:4318", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://e:4318"}, "http://c:4318/v1/traces"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://e:4318", "OTEL_SDK_DISABLED": "true"}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://e:4318", "OTEL_TRACES_EXPORTER": "none"}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://e:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, None),
    ],
)
def test_where_traces_go(setting: str | None, environ: dict[str, str], endpoint: str | None) -> None:
    assert traces_endpoint(ObserveConfig(otlp_endpoint=setting), environ) == endpoint


def test_a_protocol_that_cllm_does_not_have_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://e:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert open_tracing(ObserveConfig(), environ) is None
    (line,) = caplog.messages
    assert "the protocol is grpc" in line


@pytest.mark.parametrize("value", ["localhost:4318", "grpc://host:4317", "", "http://", "http://a b", "http://h/?q=1"])
def test_an_endpoint_that_is_no_url_is_one_clear_line(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides={"observe.otlp_endpoint": value})
    message = str(caught.value)
    assert "observe.otlp_endpoint" in message and "a URL such as http://127.0.0.1:4318" in message
    assert "\n" not in message


def test_nothing_of_the_sdk_is_imported_when_it_is_off() -> None:
    code = (
        "import sys\n"
        "from cllm.config import load_config\n"
        "from cllm.llm import AsyncLLM\n"
        "from cllm.server.app import create_app\n"
        "config = load_config(overrides={'backend.type': 'fake'}, environ={}).config\n"
        "app = create_app(AsyncLLM(config), config)\n"
        "assert app.state.cllm.tracing is None\n"
        "names = [each.cls.__name__ for each in app.user_middleware]\n"
        "assert 'RequestContext' in names and 'Traces' not in names\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'cllm.observe.tracing'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)


@pytest.mark.usefixtures("without_packages")
def test_without_the_packages_the_setting_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^observe.otlp_endpoint is set, .*scripts/install\.py otel$"):
        open_tracing(ObserveConfig(otlp_endpoint="http://127.0.0.1:4318"), {})


@pytest.mark.usefixtures("without_packages")
def test_without_the_packages_the_variable_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert open_tracing(ObserveConfig(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}) is None
    (line,) = caplog.messages
    assert "scripts/install.py otel" in line


# -- a real server and a real collector ------------------------------------------------------------------------------


def ask(url: str, **headers: str) -> httpx.Response:
    return httpx.post(
        f"{url}/v1/chat/completions",
        json={**CHAT, "max_tokens": 4, "ignore_eos": True},
        headers=headers,
        timeout=LIMIT_S,
    )


@slow
def test_spans_reach_a_collector_before_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")  # only what the end sends
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=kv")
    with collecting() as collector:
        with serving(f"observe.otlp_endpoint={collector.url}", "model.alias=tiny") as server:
            reply = ask(server.url, traceparent=PARENT).json()
            assert not collector.requests
            server.process.terminate()
            assert server.end() == 0
            assert server.logged(f"traces are sent to {collector.url}/v1/traces")
        assert set(collector.paths) == {"/v1/traces"} and collector.headers[0]["x-team"] == "kv"
        span, decode = collector.span("POST /v1/chat/completions"), collector.span("decode")
        assert span.trace_id == decode.trace_id == bytes.fromhex(PARENT.split("-")[1])
        assert decode.parent_span_id == span.span_id
        assert attributes(decode)["gen_ai.usage.output_tokens"] == reply["usage"]["completion_tokens"]
        assert attributes(decode)["gen_ai.request.model"] == "tiny"
        assert attributes(decode)["gen_ai.response.finish_reasons"] == ["length"]
        resource = {
            each.key: each.value.string_value for each in collector.requests[0].resource_spans[0].resource.attributes
        }
        assert resource["service.name"] == "cllm" and resource["service.version"]


def test_the_standard_variables_switch_it_on_and_name_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-eu")
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        with serving() as server:
            ask(server.url)
            until(lambda: len(collector.spans) == 4)
        resource = collector.requests[0].resource_spans[0].resource.attributes
        assert "chat-eu" in {each.value.string_value for each in resource}


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@slow
def test_a_collector_that_is_not_there_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    url = f"http://127.0.0.1:{closed_port()}"
    with serving(f"observe.otlp_endpoint={url}") as server:
        for _ in range(3):
            assert ask(server.url).status_code == 200
        until(lambda: server.logged(f"traces cannot be sent to {url}/v1/traces and are lost: "))
        for _ in range(3):
            assert ask(server.url).status_code == 200
        server.process.terminate()
        assert server.end() == 0
        unusual = [line for line in server.lines if " info " not in line]
        assert len(unusual) == 1 and " warning " in unusual[0], unusual


@slow
def test_a_collector_that_never_answers_delays_nothing() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with serving(f"observe.otlp_endpoint=http://127.0.0.1:{listener.getsockname()[1]}") as server:
            for _ in range(3):
                assert ask(server.url).status_code == 200
            server.process.terminate()
            assert server.end() == 0, "and the server ends without it"


class Unreliable(InMemorySpanExporter):
    """Fails when the test says so, as the real one does: with lines in the SDK's log."""

    def __init__(self) -> None:
        super().__init__()
        self.fail: Callable[[], Any] | None = None

    def export(self, spans: Any) -> Any:
        return super().export(spans) if self.fail is None else self.fail()


def test_one_warning_until_it_works_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    exporter = Unreliable()
    sender = tracing_module.OneWarning(exporter, "http://c/v1/traces")

    def refused() -> Any:
        tracing_module._ATTEMPTS.error("connection refused")
        tracing_module._DROPS.warning("Queue full")
        return tracing_module.SpanExportResult.FAILURE

    def crashes() -> Any:
        raise OSError("no route")

    for fail in (None, refused, refused, crashes, None, None, crashes):
        exporter.fail = fail
        sender.export([])
    sender.shutdown()
    tracing_module._ATTEMPTS.error("of somebody else")
    assert caplog.messages == [
        "Queue full",  # the first time it was not known yet that nothing can be sent
        "traces cannot be sent to http://c/v1/traces and are lost: connection refused",
        "traces are sent to http://c/v1/traces again",
        "traces cannot be sent to http://c/v1/traces and are lost: no route",
        "of somebody else",
    ]


async def test_the_lifespan_sends_the_rest(traced: Traced) -> None:
    """As for apps that are served by others."""
    config = load_config(overrides={"backend.type": "fake"}).config
    app = create_app(AsyncLLM(config), config)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})).status_code == 200
    assert len(traced._exporter.get_finished_spans()) == 4
    await asyncio.to_thread(traced.tracing.close)  # a second time does no harm

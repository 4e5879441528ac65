"""OpenTelemetry traces: a span for each HTTP request, and below it one each for the engine's queue, prefill and decode.

Only imported if traces are wanted; so the SDK, an extra, is not needed otherwise. The event loop starts and ends the
span of a request. The engine's thread only puts a record into a queue; another thread makes spans of it, and the SDK's
own thread sends them.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cllm import __version__

if TYPE_CHECKING:
    from cllm.engine.observer import Observers, RequestRecord

log = logging.getLogger("cllm.tracing")

CLOSE_S = 3.0
"""How long the last spans may take to be sent when the server ends."""
LATE_REQUESTS = 1024
"""How many answered requests are remembered. The engine ends a cancelled one after its client is gone."""

_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE"})
_OPERATIONS = {
    "cmpl": "text_completion",
    "gen": "text_completion",
    "warm": "text_completion",
    "bench": "text_completion",
    "embd": "embeddings",
    "rerank": "embeddings",
}
"""By what the ids of requests begin with. All others are chats."""
_SEPARATOR = re.compile("[-_]")
"""Behind that."""
_PARENT = TraceContextTextMapPropagator()
_ATTEMPTS = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
"""Gets a line for every failed attempt to send spans."""
_DROPS = logging.getLogger("opentelemetry.sdk._shared_internal")
"""Gets lines while there are more spans than can be sent."""


class RequestSpan:
    """The span of an HTTP request."""

    def __init__(self, span: Span, word: str, unique_id: str) -> None:
        """`word`: what its name begins with."""
        self.span = span
        self.word = word
        self.unique_id = unique_id
        self.model: str | None = None
        """Set by the engine's thread, with the operation, before the answer is complete."""
        self.operation = ""
        self.embedded_tokens = 0


class _Finished(NamedTuple):
    at_ns: int
    model: str
    parent: Span
    record: RequestRecord


class Tracing:
    """The spans of one server. Its tracer provider is not the global one, so other instrumentation is unaffected."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._provider = TracerProvider(resource=_resource(os.environ), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("cllm", __version__)
        self._requests: dict[str, RequestSpan] = {}
        self._answered: deque[str] = deque()
        self._finished: SimpleQueue[_Finished | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="cllm-tracing", daemon=True)
        self._thread.start()

    def watch(self, observers: Observers, model: Callable[[], str]) -> None:
        """Trace the requests of an engine; clients know its model by that name."""
        observers.append(EngineSpans(self, model))

    def begin(
        self, unique_id: str, request_id: str, method: str, scheme: str, path: str, headers: Mapping[str, str]
    ) -> RequestSpan:
        """Start the span of a request, as part of the client's trace if its `traceparent` header names one."""
        known = method in _METHODS
        word = method if known else "HTTP"
        span = self._tracer.start_span(
            word,
            context=_PARENT.extract(headers),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": method if known else "_OTHER",
                "url.scheme": scheme,
                "url.path": path,
                "cllm.request_id": request_id,
            },
        )
        request = RequestSpan(span, word, unique_id)
        if span.is_recording():
            self._requests[unique_id] = request
        return request

    def end(self, request: RequestSpan, route: str | None, status: int | None) -> None:
        """End it. No `status`: the client was gone before there was an answer."""
        span = request.span
        if not span.is_recording():
            return
        if route is not None:
            span.update_name(f"{request.word} {route}")
            span.set_attribute("http.route", route)
        if status is None:
            span.set_attribute("error.type", "client_gone")
        else:
            span.set_attribute("http.response.status_code", status)
            if status >= 500:
                span.set_attribute("error.type", str(status))
                span.set_status(StatusCode.ERROR)
        if request.model is not None:
            span.set_attribute("gen_ai.operation.name", request.operation)
            span.set_attribute("gen_ai.request.model", request.model)
        if request.embedded_tokens:
            span.set_attribute("gen_ai.usage.input_tokens", request.embedded_tokens)
        span.end()
        self._answered.append(request.unique_id)
        if len(self._answered) > LATE_REQUESTS:
            del self._requests[self._answered.popleft()]

    def finished(self, model: str, record: RequestRecord) -> None:
        """On the engine's thread: a prompt of some request has been answered."""
        prefix, rest = _SEPARATOR.split(record.request_id, maxsplit=1)
        # One of several prompts has its number at the end.
        request = self._requests.get(rest) or self._requests.get(rest.rpartition("-")[0])
        if request is None:
            return
        request.model, request.operation = model, _OPERATIONS.get(prefix, "chat")
        if record.embeds:  # by the hundred: no spans of their own
            request.embedded_tokens += record.prompt_tokens
        else:
            self._finished.put(_Finished(time.time_ns(), model, request.span, record))

    def close(self) -> None:
        """Send what is left, for at most about `CLOSE_S`."""
        self._finished.put(None)
        self._thread.join(CLOSE_S)
        # The SDK would wait for 30 s if the collector does not answer.
        last = threading.Thread(target=self._provider.shutdown, name="cllm-tracing-end", daemon=True)
        last.start()
        last.join(CLOSE_S)

    def _run(self) -> None:
        while (finished := self._finished.get()) is not None:
            self._trace(finished)

    def _trace(self, finished: _Finished) -> None:
        try:
            self._add_spans(finished)
        except Exception:
            log.exception("a request has no trace; it is otherwise unaffected")

    def _add_spans(self, finished: _Finished) -> None:
        """Queue, prefill and decode follow each other; a request that failed early has only the first of them."""
        record = finished.record
        arrival = finished.at_ns - _ns(record.total_s)
        admitted = arrival + _ns(record.queued_s)
        spans = [("queue", arrival, admitted)]
        if record.ttft_s is not None:
            first = arrival + _ns(record.ttft_s)
            spans += [("prefill", admitted, first), ("decode", first, finished.at_ns)]
        elif record.prefill_s > 0:
            spans.append(("prefill", admitted, finished.at_ns))
        context = set_span_in_context(finished.parent)
        common = {
            "gen_ai.operation.name": _OPERATIONS.get(_SEPARATOR.split(record.request_id, maxsplit=1)[0], "chat"),
            "gen_ai.provider.name": "cllm",
            "gen_ai.request.model": finished.model,
            "gen_ai.response.id": record.request_id,
        }
        for name, begin_ns, end_ns in spans:
            span = self._tracer.start_span(name, context, attributes=common, start_time=begin_ns)
            if name == "prefill":
                span.set_attribute("gen_ai.usage.input_tokens", record.prompt_tokens)
                span.set_attribute("gen_ai.usage.cache_read.input_tokens", record.cached_tokens)
                span.set_attribute("cllm.cache.known_tokens", record.known_tokens)
                if record.ttft_s is not None:
                    span.set_attribute("gen_ai.response.time_to_first_chunk", record.ttft_s)
            elif name == "decode":
                span.set_attribute("gen_ai.usage.output_tokens", record.generated_tokens)
            if name == spans[-1][0]:
                self._add_outcome(span, record)
            span.end(end_ns)

    def _add_outcome(self, span: Span, record: RequestRecord) -> None:
        span.set_attribute("gen_ai.response.finish_reasons", [record.reason])
        if record.preemptions:
            span.set_attribute("cllm.preemptions", record.preemptions)
        if record.error is not None:
            span.set_attribute("error.type", record.reason)
            span.set_status(StatusCode.ERROR, record.error)


class OneWarning(SpanExporter):
    """Sends spans; if that fails, it warns once until it works again, instead of the SDK, which does so every time."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._failing = False
        self._reason = "no answer"
        _ATTEMPTS.addFilter(self._take_reason)
        _DROPS.addFilter(self._is_news)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            result, self._reason = SpanExportResult.FAILURE, str(error)
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._failing:
            log.warning("traces cannot be sent to %s and are lost: %s", self._endpoint, self._reason)
        elif self._failing and not failed:
            log.info("traces are sent to %s again", self._endpoint)
        self._failing = failed
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
        _ATTEMPTS.removeFilter(self._take_reason)
        _DROPS.removeFilter(self._is_news)

    def _take_reason(self, record: logging.LogRecord) -> bool:
        """Keep what the SDK would log, to give it as the reason."""
        self._reason = record.getMessage()
        return False

    def _is_news(self, _record: logging.LogRecord) -> bool:
        return not self._failing


class EngineSpans:
    """An engine observer that passes finished requests on."""

    def __init__(self, tracing: Tracing, model: Callable[[], str]) -> None:
        self._tracing = tracing
        self._model = model

    def on_step(self, seconds: float, prompt_tokens: int, decode_tokens: int) -> None:
        """Steps belong to no single request."""

    def on_eviction(self, count: int, seconds: float) -> None:
        """Nor do evictions."""

    def on_finished(self, record: RequestRecord) -> None:
        self._tracing.finished(self._model(), record)


def _resource(environ: Mapping[str, str]) -> Resource:
    """What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say goes first."""
    named = "OTEL_SERVICE_NAME" in environ or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return Resource.create({"service.version": __version__, **({} if named else {"service.name": "cllm"})})


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)

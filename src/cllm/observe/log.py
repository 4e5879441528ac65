"""Logs to stderr as text or JSON: one line per request, and a line about the cache at an interval."""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import re
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from cllm.observe.log_writer import LogWriter

if TYPE_CHECKING:
    from cllm.config import LogConfig
    from cllm.engine.observer import RequestRecord
    from cllm.engine.stats import EngineSnapshot

logger = logging.getLogger("cllm")

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_active: tuple[logging.Handler, LogWriter] | None = None


class TextFormatter(logging.Formatter):
    """`time level message` on one line, whatever the message contains; only tracebacks add lines."""

    def format(self, record: logging.LogRecord) -> str:
        message = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", record.getMessage())
        time = datetime.fromtimestamp(record.created).isoformat(" ", "milliseconds")
        line = f"{time} {record.levelname.lower():7} {message}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object per line; `extra={"fields": {...}}` adds to it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _QueueHandler(logging.Handler):
    """Formats records in the calling thread and queues them; it never waits for the output."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.put(self.format(record))
        except Exception:  # a logging failure must not affect the caller
            self.handleError(record)


def setup_logging(config: LogConfig) -> None:
    """Log to stderr: cLLM's records from `config.level` on, and warnings of other libraries.

    A separate thread writes, so that a blocked terminal or pipe does not block the engine.
    """
    global _active
    stop_logging()
    formatter = JsonFormatter() if config.format == "json" else TextFormatter()
    writer = LogWriter(sys.stderr, lambda count: formatter.format(_lost_lines(count)))
    handler = _QueueHandler(writer)
    handler.setFormatter(formatter)
    logging.getLogger().addHandler(handler)
    logger.setLevel(config.level.upper())
    writer.start()
    _active = (handler, writer)
    atexit.register(stop_logging)


def stop_logging() -> None:
    """Write the queued lines and release stderr; does nothing without `setup_logging` before it.

    If nobody reads stderr, this gives up after a moment, so that the program can end.
    """
    global _active
    if _active is None:
        return
    handler, writer = _active
    _active = None
    logging.getLogger().removeHandler(handler)
    writer.stop()
    atexit.unregister(stop_logging)


def _lost_lines(count: int) -> logging.LogRecord:
    message = f"{count} log lines were dropped here: stderr was blocked"
    record = logging.LogRecord(logger.name, logging.WARNING, __file__, 0, message, None, None)
    record.fields = {"lost_lines": count}
    return record


def tokens_per_second(generated: int, decode_s: float) -> float | None:
    """Decoding speed after the first token, which counts as prefill; None without a second token."""
    return (generated - 1) / decode_s if generated > 1 and decode_s > 0 else None


class RequestLog:
    """An engine observer that logs one line per finished request; `model` is the name of one of several models.

    Texts to embed come by the hundred and are logged at debug level; the server logs one line for all of them.
    """

    def __init__(self, model: str | None = None) -> None:
        self._model = model

    def on_step(self, seconds: float, prompt_tokens: int, decode_tokens: int) -> None:
        """Steps are not logged."""

    def on_eviction(self, count: int, seconds: float) -> None:
        """The cache-efficiency line counts evictions."""

    def on_finished(self, record: RequestRecord) -> None:
        rate = tokens_per_second(record.generated_tokens, record.decode_s)
        parts = [
            f"{record.request_id} {record.reason}: prompt {record.prompt_tokens} ({_cached(record)})",
            f"generated {record.generated_tokens}",
            f"queue {record.queued_s:.3f} s",
        ]
        if record.ttft_s is not None:
            parts.append(f"first token {record.ttft_s:.3f} s")
        if rate is not None:
            parts.append(f"{rate:.1f} tok/s")
        if self._model:
            parts.append(f"model {self._model}")
        if record.tenant:
            parts.append(f"key {record.tenant}")
        if record.preemptions:
            parts.append(f"preempted {record.preemptions}x")
        if record.error:
            parts.append(record.error)
        fields = {
            "request_id": record.request_id,
            "reason": record.reason,
            "error": record.error,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "known_tokens": record.known_tokens,
            "generated_tokens": record.generated_tokens,
            "queue_s": _rounded(record.queued_s),
            "ttft_s": _rounded(record.ttft_s),
            "total_s": _rounded(record.total_s),
            "tokens_per_second": _rounded(rate),
            "preemptions": record.preemptions,
            **({"model": self._model} if self._model else {}),
            **({"key": record.tenant} if record.tenant else {}),
        }
        level = logging.WARNING if record.error else logging.DEBUG if record.embeds else logging.INFO
        logger.log(level, ", ".join(parts), extra={"fields": fields})


class EfficiencyLog:
    """Logs how much the cache saved since the last line; nothing while idle."""

    def __init__(
        self, snapshot: Callable[[], EngineSnapshot | None], interval_s: float, model: str | None = None
    ) -> None:
        """`model`: the name of one of several models. A model that is not loaded has no snapshot."""
        self._model = model
        self._snapshot = snapshot
        self._interval_s = interval_s
        self._last: EngineSnapshot | None = None

    async def run(self) -> None:
        """Run until cancelled. An interval of 0 means never."""
        while self._interval_s > 0:
            await asyncio.sleep(self._interval_s)
            self.tick()

    def tick(self) -> None:
        now, last = self._snapshot(), self._last
        if now is None or _events(now) == _events(last):
            return
        if last is not None and _events(now) < _events(last):  # the model was reloaded
            last = None
        self._last = now
        queries = now.kv.query_tokens - (last.kv.query_tokens if last else 0)
        hits = now.kv.hit_tokens - (last.kv.hit_tokens if last else 0)
        evicted = now.kv.evictions - (last.kv.evictions if last else 0)
        used, cached, free = (
            units * now.kv.bytes_per_unit for units in (now.kv.referenced, now.kv.evictable, now.kv.free)
        )
        saved = f"saved {hits / queries:.0%} of {queries} prompt tokens" if queries else "no new prompts"
        fields = {
            "query_tokens": queries,
            "hit_tokens": hits,
            "hit_rate": _rounded(hits / queries) if queries else None,
            "used_bytes": used,
            "cached_bytes": cached,
            "free_bytes": free,
            "evictions": evicted,
            "running": now.running,
            "waiting": now.waiting,
            **({"model": self._model} if self._model else {}),
        }
        whose = f"cache of {self._model}" if self._model else "cache"
        logger.info(
            f"{whose}: {saved}; {_mib(used)} used, {_mib(cached)} cached, {_mib(free)} free; "
            f"{evicted} evicted; {now.running} running, {now.waiting} waiting",
            extra={"fields": fields},
        )


def _events(snapshot: EngineSnapshot | None) -> tuple[int, int]:
    return (snapshot.steps, sum(snapshot.finished.values())) if snapshot else (0, 0)


def _cached(record: RequestRecord) -> str:
    known = f" of {record.known_tokens} known" if record.known_tokens > record.cached_tokens else ""
    return f"{record.cached_tokens} cached{known}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"

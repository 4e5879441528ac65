"""The processes that run the engines, from the side of the one who asks."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from threading import Timer
from types import TracebackType
from typing import Any

from cllm.bench.http import BenchError

_ANSWER_LIMIT_S = 900.0
_STOP_LIMIT_S = 15.0
_LOG_TAIL = 400


class EngineProcess:
    """One engine of `worker.py`. Raises `BenchError` if it cannot start, does not answer or reports a failure."""

    def __init__(self, engine: str, settings: Mapping[str, Any]) -> None:
        self._name = engine
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed in `close`)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cllm.bench.kernels.worker", engine, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            self.facts = self._read()
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended: reading then says so
            self._process.stdin.write(json.dumps({"do": do, "with": arguments}) + "\n")
            self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        self._log.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        watch = Timer(_ANSWER_LIMIT_S, self._process.kill)
        watch.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        if not line:
            raise BenchError(f"the engine {self._name} ended without an answer; the end of its log: {self._log_tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchError(f"the engine {self._name} failed: {answer['error']}")
        return answer

    def _log_tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-_LOG_TAIL:].decode(errors="replace").strip() or "(empty)"

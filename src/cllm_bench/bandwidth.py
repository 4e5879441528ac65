"""Memory bandwidth: what the work must have read, and what the processor counted where it lets us."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType

from cllm_bench.response import TimedResponse

CACHE_LINE = 64
_EVENTS = ("LLC-load-misses", "LLC-store-misses")
_STOP_LIMIT_S = 5.0


def bytes_read(answers: Iterable[TimedResponse], steps: float, weight_bytes: float, kv_bytes_per_token: float) -> float:
    """The least that was read: all weights once a step, and for every generated token the K/V of its context.

    What prompts read of their own K/V is left out: a chunk reads it once, however many tokens are in it.
    """
    attended = 0.0
    for answer in answers:
        later = max(0, answer.completion_tokens - 1)
        attended += later * answer.prompt_tokens + later * (later + 1) / 2
    return steps * weight_bytes + attended * kv_bytes_per_token


class PerfCounter:
    """Counts the last-level cache misses of a process with `perf stat` while its block runs.

    `bytes` is None afterwards where there is no perf, no permission or no such counter (many virtual machines);
    `why_not` says which.
    """

    def __init__(self, pid: int | None) -> None:
        self.bytes: float | None = None
        self.why_not: str | None = None
        self._pid = pid
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> PerfCounter:
        perf = shutil.which("perf")
        if self._pid is None:
            self.why_not = "the server's process is not known"
        elif perf is None:
            self.why_not = "perf is not installed"
        else:
            self._process = await asyncio.create_subprocess_exec(
                *(perf, "stat", "--field-separator", ",", "--event", ",".join(_EVENTS), "--pid", str(self._pid)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        try:
            _, text = await asyncio.wait_for(self._process.communicate(), _STOP_LIMIT_S)
            self.bytes, self.why_not = parse(text.decode(errors="replace"))
        except asyncio.TimeoutError:
            self._process.kill()
            self.why_not = "perf did not end"


def parse(text: str) -> tuple[float | None, str | None]:
    """Bytes of all misses in the output of `perf stat --field-separator ,`, or why there are none."""
    total = 0.0
    seen = False
    for line in text.splitlines():
        value, *rest = line.split(",")
        event = next((field for field in rest if field.partition(":")[0] in _EVENTS), None)
        if event is None:
            continue
        if not value.isdigit():
            return None, f"perf cannot count {event} here ({value.strip('<>')})"
        seen = True
        total += int(value) * CACHE_LINE
    return (total, None) if seen else (None, "perf is not permitted to count here")

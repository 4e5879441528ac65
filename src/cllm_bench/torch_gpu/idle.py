"""How long the GPU waits between two steps, from a trace of everything that runs on it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .work import Bench, Measures, Place

STEPS = 80
ENDS = 0.2
"""The share of a trace that is left out at either end: to begin and to end it holds everybody up."""
IN_STEP_US = 5.0
"""Gaps up to this are those between two kernels of a step, of which there are hundreds; longer ones are waiting."""
Span = tuple[float, float]
"""Start and end in microseconds."""
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


async def idle_share(bench: Bench, place: Place) -> Measures:
    sizes = place.sizes
    prompts = bench.prompts(sizes.some, sizes.stream_in, "idle")
    with profile(activities=[ProfilerActivity.CUDA]):
        torch.cuda.synchronize()  # the first trace of a process takes a while to begin
    answers = asyncio.ensure_future(bench.ask_alike(prompts, sizes.idle_out))
    try:
        usual_s = await _mean_step(bench, sizes.some)
        trace = profile(activities=[ProfilerActivity.CUDA])
        trace.start()
        traced_s = await _mean_step(bench, sizes.some)
        trace.stop()
    finally:
        await answers
    path = place.directory / "trace.json"
    trace.export_chrome_trace(str(path))
    return {"step_s": usual_s, "traced_step_s": traced_s} | gaps_of(without_ends(read_spans(path)), traced_s)


async def _mean_step(bench: Bench, rows: int) -> float:
    """The mean time of the next steps, in which all decode."""
    log, begin = bench.log, time.perf_counter()
    deadline = begin + 20
    while time.perf_counter() < deadline:
        await asyncio.sleep(0.005)
        seen = [s.seconds for s in list(log.steps) if s.ended > begin and s.rows == rows and not s.prompt_tokens]
        if len(seen) >= STEPS:
            return sum(seen) / len(seen)
    raise RuntimeError(f"there were no {STEPS} steps of {rows} rows within 20 s")


def read_spans(path: Path) -> list[Span]:
    """Reads the spans of whatever ran on the GPU, in order."""
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in _ON_DEVICE and "dur" in e)


def without_ends(spans: Sequence[Span]) -> list[Span]:
    if not spans:
        raise RuntimeError("the trace holds nothing that ran on the GPU")
    begin, end = spans[0][0], spans[-1][0]
    cut = ENDS * (end - begin)
    return [span for span in spans if begin + cut <= span[0] <= end - cut]


def gaps_of(spans: Sequence[Span], step_s: float) -> Measures:
    begin = end = spans[0][0]
    gaps: list[float] = []
    for start, stop in spans:
        if start > end:
            gaps.append(start - end)
        end = max(end, stop)
    length = end - begin
    waits = [gap for gap in gaps if gap > IN_STEP_US]
    steps = max(1.0, length / 1e6 / step_s)
    return {
        "idle_percent": 100 * sum(waits) / length,
        "idle_percent_with_gaps_in_steps": 100 * sum(gaps) / length,
        "waits_per_step": len(waits) / steps,
        "longest_wait_us": max(gaps, default=0.0),
        "kernels_per_step": len(spans) / steps,
        "traced_steps": steps,
    }

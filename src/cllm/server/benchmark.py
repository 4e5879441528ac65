"""A small, bounded load on the engine behind this server, measured from the inside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cllm.engine.params import SamplingParams
from cllm.errors import CLLMError, InvalidRequestError, ShuttingDownError
from cllm.server.answers import Answers
from cllm.server.generate_schema import BenchmarkData, BenchmarkRequest, BenchmarkRow, Percentiles

if TYPE_CHECKING:
    from cllm.llm import AsyncLLM


async def run_benchmark(llm: AsyncLLM, prompt: Sequence[int], request: BenchmarkRequest, run_id: str) -> BenchmarkData:
    """`request.requests` requests, `request.concurrency` at a time."""
    params = SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True)
    rows: dict[int, BenchmarkRow] = {}
    numbers = iter(range(request.requests))

    async def worker() -> None:
        for number in numbers:
            rows[number] = await _measure(llm, prompt, params, f"{run_id}-{number}")

    started = time.perf_counter()
    workers = [asyncio.ensure_future(worker()) for _ in range(min(request.concurrency, request.requests))]
    try:
        await asyncio.gather(*workers)
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return _summary(request, [rows[number] for number in sorted(rows)], time.perf_counter() - started)


async def _measure(llm: AsyncLLM, prompt: Sequence[int], params: SamplingParams, request_id: str) -> BenchmarkRow:
    """One request. What would fail every request ends the benchmark; other errors are part of the result."""
    started = time.perf_counter()
    ttft: float | None = None
    error: str | None = None
    answers = Answers(llm, [prompt], params, request_id=request_id)
    try:
        async with answers:
            async for _ in answers:
                ttft = ttft or time.perf_counter() - started
    except (InvalidRequestError, ShuttingDownError):
        raise
    except CLLMError as failure:
        error = str(failure)
    return BenchmarkRow(
        id=request_id,
        latency=time.perf_counter() - started,
        ttft=ttft,
        generated_tokens=answers.completion_tokens,
        cached_tokens=answers.cached_tokens,
        error=error,
    )


def _summary(request: BenchmarkRequest, rows: list[BenchmarkRow], duration: float) -> BenchmarkData:
    good = [row for row in rows if row.error is None]
    return BenchmarkData(
        requests=len(rows),
        concurrency=request.concurrency,
        failed=len(rows) - len(good),
        duration=duration,
        tokens_per_second=sum(row.generated_tokens for row in rows) / duration,
        requests_per_second=len(good) / duration,
        latency=_percentiles([row.latency for row in good]),
        ttft=_percentiles([row.ttft for row in good if row.ttft is not None]),
        rows=rows,
    )


def _percentiles(values: Sequence[float]) -> Percentiles | None:
    if not values:
        return None
    p50, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
    return Percentiles(p50=p50, p95=p95, p99=p99)

"""`/benchmark`: a small load on this server's engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from cllm.engine.params import SamplingParams
from cllm.engine.submission import Submission
from cllm.engine.tenant import Tenant
from cllm.errors import CLLMError, InvalidRequestError, ShuttingDownError
from cllm.server.cllm.generate_schema import BenchmarkData, BenchmarkRequest, BenchmarkRow, Percentiles
from cllm.server.inference.streams import CompletionStream

if TYPE_CHECKING:
    from cllm.llm import AsyncLLM


async def run_benchmark(
    llm: AsyncLLM, prompt: Sequence[int], request: BenchmarkRequest, run_id: str, tenant: Tenant
) -> BenchmarkData:
    """`request.requests` requests, `request.concurrency` at a time."""
    params = SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True)
    rows: dict[int, BenchmarkRow] = {}
    numbers = iter(range(request.requests))

    async def client() -> None:
        for number in numbers:
            asked = Submission(prompt, params, f"{run_id}-{number}", tenant=tenant)
            rows[number] = await _measure(llm, asked)

    started = perf_counter()
    clients = [asyncio.ensure_future(client()) for _ in range(request.concurrency)]
    try:
        await asyncio.gather(*clients)
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return _summary(request, [rows[number] for number in sorted(rows)], perf_counter() - started)


async def _measure(llm: AsyncLLM, submission: Submission) -> BenchmarkRow:
    """One request. Errors that would fail every request end the benchmark; others are part of the result."""
    started = perf_counter()
    first: float | None = None
    error: str | None = None
    completions = CompletionStream(llm, [submission])
    try:
        async with completions:
            async for _ in completions:
                first = first or perf_counter()
    except (InvalidRequestError, ShuttingDownError):
        raise
    except CLLMError as failure:
        error = str(failure)
    return BenchmarkRow(
        id=submission.request_id,
        latency=perf_counter() - started,
        ttft=None if first is None else first - started,
        generated_tokens=completions.completion_tokens,
        cached_tokens=completions.cached_tokens,
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
    p50, p95, p99 = (float(value) for value in np.percentile(values, (50, 95, 99)))
    return Percentiles(p50=p50, p95=p95, p99=p99)

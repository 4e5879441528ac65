"""`/benchmark`: a small load on this server's engine, measured with the tools of `cllm bench`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from cllm.bench.load import at_most
from cllm.bench.measures import PERCENTS
from cllm.bench.response import TimedResponse
from cllm.bench.stats import percentile
from cllm.engine.params import SamplingParams
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
    ids = [f"{run_id}-{number}" for number in range(request.requests)]
    started = perf_counter()
    measured = await at_most(request.concurrency, [partial(_measure, llm, prompt, params, one, tenant) for one in ids])
    return _summary(request, dict(zip(ids, measured, strict=True)), perf_counter() - started)


async def _measure(
    llm: AsyncLLM, prompt: Sequence[int], params: SamplingParams, request_id: str, tenant: Tenant
) -> TimedResponse:
    """One request. Errors that would fail every request end the benchmark; others are part of the result."""
    answer = TimedResponse()
    completions = CompletionStream(llm, [prompt], params, request_id=request_id, tenant=tenant)
    try:
        async with completions:
            async for _ in completions:
                answer.arrivals.append(perf_counter())
    except (InvalidRequestError, ShuttingDownError):
        raise
    except CLLMError as failure:
        answer.error = str(failure)
    answer.finished = perf_counter()
    answer.completion_tokens, answer.cached_tokens = completions.completion_tokens, completions.cached_tokens
    return answer


def _summary(request: BenchmarkRequest, measured: dict[str, TimedResponse], duration: float) -> BenchmarkData:
    good = [answer for answer in measured.values() if answer.complete]
    return BenchmarkData(
        requests=len(measured),
        concurrency=request.concurrency,
        failed=len(measured) - len(good),
        duration=duration,
        tokens_per_second=sum(answer.completion_tokens for answer in measured.values()) / duration,
        requests_per_second=len(good) / duration,
        latency=_percentiles([answer.seconds for answer in good]),
        ttft=_percentiles([answer.ttft for answer in good if answer.arrivals]),
        rows=[_row(request_id, answer) for request_id, answer in measured.items()],
    )


def _row(request_id: str, answer: TimedResponse) -> BenchmarkRow:
    return BenchmarkRow(
        id=request_id,
        latency=answer.seconds,
        ttft=answer.ttft if answer.arrivals else None,
        generated_tokens=answer.completion_tokens,
        cached_tokens=answer.cached_tokens,
        error=answer.error,
    )


def _percentiles(values: Sequence[float]) -> Percentiles | None:
    if not values:
        return None
    p50, p95, p99 = (percentile(values, percent) for percent in PERCENTS)
    return Percentiles(p50=p50, p95=p95, p99=p99)

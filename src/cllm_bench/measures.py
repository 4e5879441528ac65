"""From answers and samples to the figures that every work over HTTP has."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from cllm_bench.figures import Figure, Metrics
from cllm_bench.response import TimedResponse
from cllm_bench.stats import percentile, slope_interval
from cllm_bench.watch import Sample

PERCENTS = (50, 95, 99)


GOOD_TTFT_MS = 1000.0
GOOD_INTER_TOKEN_MS = 100.0
"""An answer is good if it begins and, on average, flows within these."""


COMMON: tuple[Figure, ...] = (
    *(Figure(f"ttft_p{p}_ms", f"first token, P{p}", "ms") for p in PERCENTS),
    *(Figure(f"inter_token_p{p}_ms", f"between tokens, P{p}", "ms") for p in PERCENTS),
    *(Figure(f"request_p{p}_ms", f"whole request, P{p}", "ms") for p in PERCENTS),
    Figure("slope_ms", "slope per request", "ms", compared=False),
    Figure("seconds", "total", "s"),
    Figure("tokens_per_s", "tokens out", "tok/s", "higher"),
    Figure("prompt_tokens_per_s", "prompt tokens in", "tok/s", "higher"),
    Figure("goodput_per_s", "goodput", "answers/s", "higher"),
    Figure("goodput_percent", "good answers", "%", "higher"),
    Figure("cached_percent", "prompt from cache", "%", "higher"),
    Figure("errors", "failed", ""),
    Figure("cpu_percent", "CPU, 100 is a core", "%"),
    Figure("resident_mb", "resident, most", "MB"),
    Figure("fragmentation_percent", "fragmented, most", "%"),
)


def with_common(own: Sequence[Figure]) -> list[Figure]:
    """A workload's own figures first, then what all have."""
    named = {figure.key for figure in own}
    return [*own, *(figure for figure in COMMON if figure.key not in named)]


def measure(answers: Sequence[TimedResponse], samples: Sequence[Sample]) -> Metrics:
    """All that can be said of what was answered; nothing is said of what was not."""
    complete = [answer for answer in answers if answer.complete]
    metrics: Metrics = {"errors": sum(answer.error is not None for answer in answers)}
    if complete:
        metrics |= latencies(complete) | degradation(complete)
        metrics |= totals([answer for answer in answers if answer.finished and answer.error is None])
        good = sum(map(is_good, complete))
        metrics["goodput_per_s"] = good / metrics["seconds"]
        metrics["goodput_percent"] = 100 * good / sum(not answer.left for answer in answers)
    return metrics | resources(samples)


def is_good(answer: TimedResponse) -> bool:
    return answer.ttft * 1e3 <= GOOD_TTFT_MS and answer.seconds_per_token * 1e3 <= GOOD_INTER_TOKEN_MS


def latencies(answers: Sequence[TimedResponse]) -> Metrics:
    """Percentiles over all answers, in milliseconds."""
    values = {
        "ttft": [answer.ttft for answer in answers],
        "inter_token": [gap for answer in answers for gap in answer.gaps],
        "request": [answer.seconds for answer in answers],
    }
    return {
        f"{name}_p{percent}_ms": percentile(seconds, percent) * 1e3
        for name, seconds in values.items()
        if seconds
        for percent in PERCENTS
    }


def totals(answers: Sequence[TimedResponse]) -> Metrics:
    """What all answers took together, and how much of the prompts the server had in its cache."""
    seconds = max(answer.started + answer.seconds for answer in answers) - min(answer.started for answer in answers)
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    metrics: Metrics = {
        "seconds": seconds,
        "tokens_per_s": sum(answer.completion_tokens for answer in answers) / seconds,
    }
    if prompt_tokens:  # servers without usage in their streams do not tell
        metrics |= {
            "prompt_tokens": prompt_tokens,
            "prompt_tokens_per_s": prompt_tokens / seconds,
            "cached_percent": 100 * sum(answer.cached_tokens for answer in answers) / prompt_tokens,
        }
    return metrics


def degradation(answers: Sequence[TimedResponse]) -> Metrics:
    """How much longer each request takes than the one before, with its interval."""
    if len(answers) < 2:
        return {}
    found = slope_interval(range(len(answers)), [answer.seconds * 1e3 for answer in answers])
    return {"slope_ms": found.estimate, "slope_ms_low": found.low, "slope_ms_high": found.high}


def resources(samples: Sequence[Sample]) -> Metrics:
    cpu = [sample.cpu_percent for sample in samples if sample.cpu_percent is not None]
    resident = [sample.resident_mb for sample in samples if sample.resident_mb is not None]
    scattered = [sample.fragmentation_percent for sample in samples if sample.fragmentation_percent is not None]
    metrics: Metrics = {}
    if cpu:
        metrics["cpu_percent"] = mean(cpu)
    if resident:
        metrics["resident_mb"] = max(resident)
    if scattered:
        metrics["fragmentation_percent"] = max(scattered)
    return metrics

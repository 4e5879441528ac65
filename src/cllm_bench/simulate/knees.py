"""A sweep as lines over its first setting, and the knee of each line: where it bends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile

from cllm_bench.simulate.results import Result

RATE = "rate"

WITHIN = 0.10
"""A setting is good enough if its figure is so close to the best one."""
RISE = 2.0
"""A rate is too high if its figure is this many times that of the lowest one."""


def lines(results: Sequence[Result]) -> dict[str, list[Result]]:
    """One for each policy and each value of the other settings, by the name that tells it from the rest."""
    key, *others = results[0].varied
    several = key != "policy" and len({result.label for result in results}) > 1
    found: dict[str, list[Result]] = {}
    for result in results:
        names = [result.label] * several + [_name(other, result.varied[other]) for other in others]
        found.setdefault(", ".join(names) or ("" if key == "policy" else result.label), []).append(result)
    return found


def _name(key: str, value: object) -> str:
    return value if isinstance(value, str) else f"{key}={value}"


def knee_figure(key: str) -> str:
    """What bends: with more load the wait for the first token, with more of anything else the time of a request."""
    return "ttft_p99_s" if key == RATE else "total_p95_s"


def knee(line: Sequence[Result], key: str) -> Result | None:
    """The smallest setting that is as good as any; of rates, the highest one that is not much worse than the lowest.
    None if the line does not bend, or if there is nothing to compare because the load was scaled with the setting."""
    if key != RATE and len({result.trace for result in line}) > 1:
        return None
    figure = knee_figure(key)
    known = [
        each for each in line if isinstance(each.varied[key], (int, float)) and not math.isnan(each.figures[figure])
    ]
    if len(known) < 3:
        return None
    known.sort(key=lambda result: float(result.varied[key]))
    if key == RATE:
        most = RISE * known[0].figures[figure]
        fine = list(takewhile(lambda result: result.figures[figure] <= most, known))
        return fine[-1] if len(fine) < len(known) else None
    best = min(result.figures[figure] for result in known)
    found = next(result for result in known if result.figures[figure] <= best * (1 + WITHIN))
    return found if found is not known[0] else None


def describe_knees(results: Sequence[Result]) -> list[str]:
    """A sentence for each line that bends."""
    key = next(iter(results[0].varied), None) if results else None
    if key is None:
        return []
    sentences = []
    for name, line in lines(results).items():
        found = knee(line, key)
        if found is None:
            continue
        value = found.varied[key]
        if key == RATE:
            lowest = min(float(result.varied[key]) for result in line)
            bend = f"up to rate={value:g}, P99 of the first token is at most {RISE:g} times that at rate={lowest:g}"
        else:
            bend = f"from {key}={value:,} on, P95 of a request is within {100 * WITHIN:.0f} % of the best"
        sentences.append(f"{name}: {bend}")
    return sentences

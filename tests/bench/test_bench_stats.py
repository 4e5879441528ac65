"""The benchmarks' statistics: percentiles, slopes and ratios with their intervals, verdicts."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_kit import make_answer
from cllm_bench.figures import OURS, Figure, Limit, Run, own, summarise, times_the_peer
from cllm_bench.measures import measure
from cllm_bench.stats import last_fifth_over_first, percentile, ratio_interval, slope, slope_interval
from cllm_bench.workloads.aged import slower

PEER = "llama-server"


def test_percentiles_lie_between_the_nearest_values() -> None:
    assert percentile([1, 2, 3, 4, 5], 50) == 3
    assert percentile([10, 20], 95) == pytest.approx(19.5)
    assert percentile([7], 99) == 7


def test_fifths_compare_medians_so_one_outlier_does_not_count() -> None:
    assert last_fifth_over_first([1.0] * 100) == 1
    assert last_fifth_over_first([1.0] * 80 + [2.0] * 20) == 2
    assert last_fifth_over_first([1.0] * 99 + [500.0]) == 1
    assert last_fifth_over_first([2.0, 3.0]) == 1.5


# -- slopes ----------------------------------------------------------------------------------------------------------


def test_slope() -> None:
    assert slope([0, 1, 2, 3], [5, 7, 9, 11]) == pytest.approx(2)
    assert slope([0, 10, 20], [4, 4, 4]) == 0


def test_a_straight_line_leaves_no_doubt() -> None:
    found = slope_interval(range(50), [3 + 2 * x for x in range(50)])
    assert (found.estimate, found.low, found.high) == pytest.approx((2, 2, 2))
    assert slope_interval([1, 2], [5, 6]).is_point


def test_noise_is_no_trend_and_a_trend_is_found_under_noise() -> None:
    draw = np.random.default_rng(1)
    noise = draw.normal(100, 10, 200)
    flat = slope_interval(range(200), noise.tolist())
    assert flat.low < 0 < flat.high
    growing = slope_interval(range(200), (noise + 0.2 * np.arange(200)).tolist())
    assert growing.low > 0 and growing.low < 0.2 < growing.high


def test_intervals_of_slopes_hold_the_truth_although_neighbours_are_alike() -> None:
    """A machine has slow spells. Drawing single values would find a trend in two of five such runs."""
    draw = np.random.default_rng(2)
    held = 0
    for _ in range(60):
        spells = np.repeat(draw.normal(0, 1, 25), 4)
        held += slope_interval(range(100), (spells + draw.normal(0, 0.2, 100)).tolist()).holds(0)
    assert held >= 50


@given(st.lists(st.floats(-100, 100), min_size=4, max_size=40), st.floats(-1e3, 1e3))
def test_a_slope_does_not_depend_on_the_level(ys: list[float], level: float) -> None:
    plain = slope_interval(range(len(ys)), ys)
    lifted = slope_interval(range(len(ys)), [y + level for y in ys])
    assert plain.low <= plain.high
    assert lifted == pytest.approx(plain, abs=1e-9)


# -- ratios ----------------------------------------------------------------------------------------------------------


def test_one_ratio_has_no_interval_and_few_have_a_wide_one() -> None:
    assert ratio_interval([1.5]).is_point
    found = ratio_interval([2.0, 2.0, 4.0])
    assert found.estimate == pytest.approx(2 ** (4 / 3))
    assert found.low < 2.0 and found.high > 4.0
    many = ratio_interval([2.0, 2.0, 4.0] * 10)
    assert 2.0 < many.low < many.estimate < many.high < 4.0


@given(st.lists(st.floats(0.1, 50), min_size=2, max_size=12), st.floats(0.1, 10))
def test_intervals_hold_the_estimate_and_scale(ratios: list[float], factor: float) -> None:
    found = ratio_interval(ratios)
    assert found.low <= found.estimate * 1.001 and found.estimate * 0.999 <= found.high
    assert min(ratios) * 0.999 <= found.estimate <= max(ratios) * 1.001
    assert ratio_interval([factor * ratio for ratio in ratios]) == pytest.approx([factor * end for end in found])


@pytest.mark.parametrize("repeats", [3, 5, 10])
def test_intervals_of_ratios_hold_the_truth_about_as_often_as_they_say(repeats: int) -> None:
    """Few repeats are the rule. A plain percentile bootstrap of three holds the truth in 74 of 100 runs."""
    draw = np.random.default_rng(3)
    runs = np.exp(draw.normal(np.log(2.0), 0.2, (300, repeats)))
    held = sum(ratio_interval(run.tolist()).holds(2.0) for run in runs)
    assert held >= 0.9 * 300


# -- figures ---------------------------------------------------------------------------------------------------------


def test_ratios_are_in_our_favour_above_one_whichever_way_is_better() -> None:
    assert Figure("k", "seconds", "s", "lower").ratio(2.0, 8.0) == 4
    assert Figure("k", "speed", "tok/s", "higher").ratio(8.0, 2.0) == 4
    assert Figure("k", "seconds", "s", "lower").ratio(0.0, 8.0) is None
    assert Figure("k", "slope", "us", "lower").ratio(2.0, -8.0) is None


@pytest.mark.parametrize(
    ("figure", "ours", "peer", "against", "met"),
    [
        (Figure("k", "", "ms", limit=own(400)), 399, None, None, True),
        (Figure("k", "", "ms", limit=own(400)), 401, 13_000, None, False),
        (Figure("k", "", "/s", "higher", own(20)), 21, None, None, True),
        (Figure("k", "", "/s", "higher", own(20)), 19, None, None, False),
        (Figure("k", "", "s", limit=times_the_peer(4)), 10, 40, PEER, True),
        (Figure("k", "", "s", limit=times_the_peer(4)), 10, 39, PEER, False),
        (Figure("k", "", "tok/s", "higher", times_the_peer(1)), 99, 100, PEER, False),
        (Figure("k", "", "s", limit=times_the_peer(4)), 10, None, None, None),
        (Figure("k", "", "s", limit=Limit("ratio", 4, {"other": 1.3})), 10, 39, PEER, None),
        (Figure("k", "", "s", limit=Limit("ratio", 4, {"other": 1.3})), 10, 14, "other", True),
        (Figure("k", "", "s", limit=Limit("ratio", 4, {"other": 1.3})), 10, 12, "other", False),
        (Figure("k", "", "s"), 10, 40, PEER, None),
    ],
)
def test_verdicts(figure: Figure, ours: float, peer: float | None, against: str | None, met: bool | None) -> None:
    runs = [Run(OURS, 0, {"k": ours})] + ([] if peer is None else [Run(against or PEER, 0, {"k": peer})])
    verdict = summarise([figure], runs)[0].verdict(against)
    assert (verdict.met if verdict else None) is met
    assert verdict is None or verdict.clear


def test_a_figure_is_met_only_if_its_whole_interval_is() -> None:
    def judged(ours: list[float], peer: list[float]) -> str:
        runs = [Run(OURS, repeat, {"k": value}) for repeat, value in enumerate(ours)]
        runs += [Run(PEER, repeat, {"k": value}) for repeat, value in enumerate(peer)]
        return str(summarise([Figure("k", "", "s", limit=times_the_peer(2))], runs)[0].verdict(PEER))

    assert judged([1, 1, 1], [2.5, 2.6, 2.4]) == "met"
    assert judged([1, 1, 1], [1.9, 3.0, 2.4]) == "uncertain"
    assert judged([1, 1, 1], [1.8, 2.1, 1.5]) == "uncertain"
    assert judged([1, 1, 1], [0.5, 9.0, 200.0]) == "uncertain", "8.8 times better on average means nothing here"
    assert judged([1, 1, 1], [1.2, 1.1, 1.2]) == "not met"


@pytest.mark.parametrize(
    ("better", "values", "verdict"),
    [
        ("lower", (380, 390, 400), "met"),
        ("lower", (380, 390, 401), "uncertain"),
        ("lower", (399, 410, 420), "uncertain"),
        ("lower", (401, 410, 420), "not met"),
        ("higher", (400, 410, 420), "met"),
        ("higher", (399, 410, 420), "uncertain"),
        ("higher", (380, 390, 399), "not met"),
    ],
)
def test_our_own_value_is_judged_by_the_worst_and_the_best_repeat(
    better: Literal["lower", "higher"], values: tuple[float, ...], verdict: str
) -> None:
    runs = [Run(OURS, repeat, {"k": float(value)}) for repeat, value in enumerate(values)]
    assert str(summarise([Figure("k", "", "ms", better, own(400))], runs)[0].verdict()) == verdict


def test_ratios_are_taken_within_a_repeat() -> None:
    runs = [
        Run(side, repeat, {"k": value})
        for side, values in ((OURS, (1, 10, 100)), (PEER, (2, 20, 200)))
        for repeat, value in enumerate(values)
    ]
    row = summarise([Figure("k", "", "s")], runs)[0]
    assert row.peers[PEER].ratio == pytest.approx((2, 2, 2))
    assert row.ours is not None and (row.ours.low, row.ours.median, row.ours.high) == (1, 10, 100)


def test_a_pass_that_was_broken_off_counts_only_where_there_is_no_other() -> None:
    whole, broken = Run(OURS, 0, {"k": 10}), Run(OURS, 1, {"k": 3}, partial="it died")
    peer = Run(PEER, 1, {"k": 6}, partial="it died")
    row = summarise([Figure("k", "", "s")], [whole, broken, peer])[0]
    assert row.ours is not None and (row.ours.low, row.ours.high) == (10, 10)
    beside = row.peers[PEER]
    assert beside.value is not None and beside.value.median == 6 and beside.ratio is None


def test_a_figure_may_bring_its_own_interval() -> None:
    runs = [Run(OURS, repeat, {"k": 5, "k_low": 1 + repeat, "k_high": 9}) for repeat in range(3)]
    spread = summarise([Figure("k", "", "ms")], runs)[0].ours
    assert spread is not None and (spread.median, spread.low, spread.high) == (5, 2, 9)


# -- measures --------------------------------------------------------------------------------------------------------


def test_answers_become_latencies_totals_and_goodput() -> None:
    quick = make_answer(0.0, 0.5, 0.6, 0.68)
    late = make_answer(0.0, 1.5, 1.6)
    slow = make_answer(1.0, 1.2, 1.6, 2.0)
    quick.prompt_tokens, quick.cached_tokens, late.prompt_tokens = 30, 10, 10
    failed, left = make_answer(0.0), make_answer(0.5, 0.6)
    failed.error, left.left = "no", True
    metrics = measure([quick, late, slow, failed, left], [])
    assert metrics["ttft_p50_ms"] == pytest.approx(500)
    assert metrics["inter_token_p95_ms"] == pytest.approx(400)
    assert metrics["request_p50_ms"] == pytest.approx(1000)
    assert metrics["seconds"] == 2.0
    assert metrics["tokens_per_s"] == (3 + 2 + 3 + 1) / 2
    assert metrics["prompt_tokens_per_s"] == 20 and metrics["cached_percent"] == 25
    assert metrics["errors"] == 1
    # Only the quick one is good; whoever left on purpose is not counted, but who got an error is.
    assert metrics["goodput_per_s"] == 0.5 and metrics["goodput_percent"] == 25


def test_nothing_is_said_of_what_was_not_measured() -> None:
    assert measure([], []) == {"errors": 0}
    no_usage = measure([make_answer(0.0, 0.1, 0.2)], [])
    assert "cached_percent" not in no_usage and "cpu_percent" not in no_usage


# -- trends ----------------------------------------------------------------------------------------------------------


def test_age_shows_however_much_the_machine_swings() -> None:
    draw = np.random.default_rng(9)
    swings = draw.lognormal(0, 0.3, 100)

    def compare(age: float) -> dict[str, float]:
        """Both servers see each round's machine; requests scatter by 2 %."""
        takes = [[swing * noise for swing, noise in zip(swings, draw.normal(1, 0.02, 100), strict=True)] for _ in "of"]
        old = [make_answer(0.0, 0.4 * age * seconds, age * seconds) for seconds in takes[0]]
        return slower(old, [make_answer(0.0, 0.4 * seconds, seconds) for seconds in takes[1]])

    same, aged = compare(1.0), compare(1.03)
    assert same["slower_percent_low"] <= 0 <= same["slower_percent_high"]
    assert same["slower_percent_high"] < 1.5
    assert aged["slower_percent_low"] > 1.5 and aged["slower_percent"] == pytest.approx(3, abs=1)
    assert aged["first_slower_percent"] == pytest.approx(aged["slower_percent"])

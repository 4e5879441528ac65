"""`cllm simulate validate`: may the simulation be trusted?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cllm.config import load_config
from cllm.loading.parts import load_model
from cllm.loading.text_model import PRELOADED
from cllm.observe.json_option import check_writable, write_json
from cllm.work.pool import blocking_workers
from cllm_bench.pages.extras import check_extra
from cllm_bench.simulate.cost import CostModel
from cllm_bench.simulate.fit import median_error
from cllm_bench.simulate.live import Measured
from cllm_bench.simulate.report import print_table, short
from cllm_bench.simulate.validate import (
    TOLERANCE,
    WORKLOADS,
    Comparison,
    RandomTokens,
    Validation,
    calibrations,
    settings_of,
)


def run_validation(
    model: str,
    backend: str,
    kv_mb: float,
    size: float,
    repeats: int,
    save_cost: Path | None,
    json_file: Path | None,
    seed: int,
) -> bool:
    """Whether every simulated figure is close enough to the measured one.

    Machines are faster at one moment than at the next, so calibration and workloads take turns: both see the same.
    """
    check_extra("scipy", "cllm simulate validate")
    check_writable("--save-cost", save_cost)
    console = Console()
    config = load_config(
        None,
        {
            "model.name": model,
            "backend.type": backend,
            "resources.kv_cache_max_memory_mb": kv_mb,
            "resources.max_context_length": 1024,
            "log.level": "warning",
            "kv.disk.enabled": False,
        },
    ).config
    with blocking_workers(config.work, PRELOADED) as workers:
        parts = load_model(config, workers)
    with parts.backend:
        validation = Validation(parts.backend, parts.scheduler.kv, settings_of(parts, config))
        words = RandomTokens(parts.backend.shape.n_vocab, seed)
        with console.status("calibration") as status:

            def measure(workload: Any) -> Measured:
                status.update(
                    f"{workload.name}: {len(workload.conversations)} conversations on {parts.backend.traits.name}"
                )
                return validation.measure(workload)

            calibrated: list[Measured] = []
            passes: list[list[Measured]] = []
            for _ in range(repeats):
                calibrated += [measure(workload) for workload in calibrations(words, size)]
                passes.append([measure(make(words, size)) for make in WORKLOADS])
            description = f"{parts.text.facts.name} on {parts.backend.describe()}, fitted from measured steps"
            cost = validation.fit(parts.text.facts.name, description, calibrated, parts.text.facts.bytes_per_token)
            comparisons = [validation.compare(_median(runs), cost) for runs in zip(*passes, strict=True)]
    _print_fit(console, cost, calibrated)
    _print_comparisons(console, comparisons)
    if save_cost is not None:
        cost.save(save_cost)
        console.print(f"written: {save_cost}")
    if json_file is not None:
        write_json(json_file, [_comparison_json(comparison) for comparison in comparisons])
    return all(comparison.holds for comparison in comparisons)


def _median(runs: Sequence[Measured]) -> Measured:
    return sorted(runs, key=lambda run: run.tokens_per_s)[len(runs) // 2]


def _print_fit(console: Console, cost: CostModel, calibrated: Sequence[Measured]) -> None:
    steps = [step for run in calibrated for step in run.steps]
    error = f"{100 * median_error(cost, steps):.1f} %"
    console.print(f"{cost.description}: {len(steps)} steps, half of them predicted within {error}", highlight=False)


def _print_comparisons(console: Console, comparisons: Sequence[Comparison]) -> None:
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("\nworkload")
    for label in ("answer tokens/s\nmeasured", "\nsimulated", "\noff by", "cache hits %\nmeasured", "\nsimulated"):
        table.add_column(label, justify="right")
    for label in ("first token (s)\nmeasured", "\nsimulated", f"within\n{100 * TOLERANCE:.0f} %"):
        table.add_column(label, justify="right")
    for each in comparisons:
        table.add_row(
            each.measured.workload,
            short(each.measured.tokens_per_s),
            short(each.tokens_per_s),
            f"{100 * each.speed_error:+.1f} %",
            short(100 * each.measured.hit_rate),
            short(100 * each.hit_rate),
            short(each.measured.ttft_p50_s),
            short(each.ttft_p50_s),
            "yes" if each.holds else "no",
        )
    print_table(console, table)


def _comparison_json(comparison: Comparison) -> dict[str, Any]:
    measured = comparison.measured
    return {
        "workload": measured.workload,
        "measured": {
            "tokens_per_s": measured.tokens_per_s,
            "hit_rate": measured.hit_rate,
            "ttft_p50_s": measured.ttft_p50_s,
            "steps": len(measured.steps),
        },
        "simulated": {
            "tokens_per_s": comparison.tokens_per_s,
            "hit_rate": comparison.hit_rate,
            "ttft_p50_s": comparison.ttft_p50_s,
        },
        "holds": comparison.holds,
    }

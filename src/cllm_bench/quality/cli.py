"""`cllm bench kv-types` and `cllm bench truth`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cllm.machine import default_threads, read_cpus
from cllm.models.gguf import GGUFModel
from cllm.models.registry import resolve
from cllm.observe.json_option import JsonOption, only_json
from cllm_bench.machine import describe_machine
from cllm_bench.options import InstructionSet, Model, Quick, ReportDir, Threads, check_instruction_sets
from cllm_bench.pages.extras import check_extra
from cllm_bench.quality.reference import check_installed
from cllm_bench.quality.texts import TEXT, read_texts
from cllm_bench.report import Report
from cllm_bench.run import run_and_report
from cllm_bench.workloads.base import Setup, Workload

SLOW = "generic"

Text = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The text to predict, in UTF-8. [default: a built-in one, 17 kB]")
]
Parts = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Use only this many parts of the text, of 1,024 tokens each. [default: all]"),
]
Repeats = Annotated[int, typer.Option(metavar="N", min=1, help="Speed measurements per pair, in turn.")]
InstructionSets = Annotated[
    list[str] | None,
    typer.Option(
        "--instruction-set",
        metavar="NAME",
        help=f"Of cLLM; may be repeated. [default: all that this CPU has except {SLOW}, which is slow]",
    ),
]


@only_json
def kv_types(
    model: Model = "smollm2",
    text: Text = None,
    repeats: Repeats = 3,
    threads: Threads = None,
    instruction_set: InstructionSet = "auto",
    json: JsonOption = None,
    report: ReportDir = None,
    quick: Quick = False,
) -> None:
    """What do K and V as q8_0 or q4_0 cost and save? Quality, speed and bytes of all nine pairs, native engine only."""
    from cllm_bench.workloads.kv_types import JUDGED, KvTypes  # needs the extension

    check_instruction_sets([instruction_set])
    check_extra("scipy", "cllm bench")
    opened = GGUFModel.open(resolve(model))
    setup = _setup(opened, threads, repeats=1 if quick else repeats, ours=str(JUDGED))
    texts = read_texts(opened, text or TEXT, quick)
    settings = {"model": model, "text": str(text) if text else "ours", "repeats": repeats, "threads": setup.threads}
    settings |= {"instruction_set": instruction_set, "quick": quick}
    raise typer.Exit(_run(KvTypes(opened, texts, instruction_set, small=quick), setup, settings, json, report))


@only_json
def truth(
    model: Model = "smollm2",
    text: Text = None,
    parts: Parts = None,
    threads: Threads = None,
    instruction_set: InstructionSets = None,
    json: JsonOption = None,
    quick: Quick = False,
) -> None:
    """How close do cLLM and llama.cpp come to exact results?

    Both compute with rounded numbers. The reference is the same weights in float32, by Hugging Face transformers:
    perplexity on a text, and the mean KL divergence from the reference. Needs torch and transformers.
    """
    from cllm._native import instruction_sets  # these need the extension
    from cllm_bench.workloads.truth import Truth

    sets = instruction_set or [name for name in instruction_sets() if name != SLOW] or [SLOW]
    check_instruction_sets(sets)
    check_extra("scipy", "cllm bench")
    check_installed()
    opened = GGUFModel.open(resolve(model))
    setup = _setup(opened, threads)
    texts = read_texts(opened, text or TEXT, quick)[:parts]
    settings = {"model": model, "text": str(text) if text else "ours", "parts": len(texts), "threads": setup.threads}
    settings |= {"instruction_sets": list(sets), "quick": quick}
    raise typer.Exit(_run(Truth(opened, texts, sets), setup, settings, json))


def _setup(model: GGUFModel, threads: int | None, *, repeats: int = 1, ours: str = "cLLM") -> Setup:
    return Setup(
        model=str(model.path),
        encode=str.encode,
        threads=threads or default_threads(read_cpus()).count,
        repeats=repeats,
        ours=ours,
    )


def _run(
    workload: Workload, setup: Setup, settings: dict[str, Any], json: Path | None, directory: Path | None = None
) -> int:
    return run_and_report([workload], setup, Report(describe_machine(), settings, json, directory))

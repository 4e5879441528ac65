"""`cllm bench truth`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cllm.bench.http import BenchError
from cllm.bench.json_file import check_writable
from cllm.bench.kv_types.cli import TEXT, read_texts
from cllm.bench.machine import describe_machine
from cllm.machine import default_threads, read_cpus
from cllm.models.gguf import GGUFModel
from cllm.models.registry import resolve
from cllm.only_json import only_json

INTERRUPTED = 130
SLOW = "generic"

Model = Annotated[str, typer.Option(help="A known name, a .gguf file or hf:org/repo/file.gguf.")]
Text = Annotated[Path | None, typer.Option(help="A text file in UTF-8. [default: one of ours, 17 kB]")]
Parts = Annotated[
    int | None, typer.Option(min=1, help="Only so many parts of the text, of 1,024 tokens each. [default: all]")
]
Threads = Annotated[int | None, typer.Option(min=1, help="[default: those that `cllm serve` takes]")]
InstructionSet = Annotated[
    list[str] | None,
    typer.Option(help=f"cLLM's; may be repeated. [default: all that this CPU has but {SLOW}, which is slow]"),
]
Json = Annotated[Path | None, typer.Option("--json", help="Write all that was measured to this file (- is stdout).")]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes: to see that it runs, not for figures.")]


@only_json
def truth(
    model: Model = "smollm2",
    text: Text = None,
    parts: Parts = None,
    threads: Threads = None,
    instruction_set: InstructionSet = None,
    json: Json = None,
    quick: Quick = False,
) -> None:
    """How far are we from the truth, and how far is llama.cpp?

    Both compute with rounded numbers. The truth is the same weights in float32, by Hugging Face transformers: its
    perplexity on a text, and the mean KL divergence of every other way to compute from it. Needs torch and
    transformers.
    """
    from cllm._native import instruction_sets  # these need the extension
    from cllm.bench.truth import results
    from cllm.bench.truth.measure import measure

    sets = instruction_set or [name for name in instruction_sets() if name != SLOW] or [SLOW]
    if unknown := set(sets) - set(instruction_sets()):
        raise BenchError(
            f"--instruction-set is {', '.join(sorted(unknown))}; this CPU has {', '.join(instruction_sets())}"
        )
    if json is not None:
        check_writable(json)
    opened = GGUFModel.open(resolve(model))
    count = threads or default_threads(read_cpus()).count
    texts = read_texts(opened, text or TEXT, quick)[:parts]
    found = measure(opened, texts, threads=count, instruction_sets=sets, say=_say)
    print(results.table(found), flush=True)
    if quick:
        print("small sizes: the figures above do not count")
    if json is not None:
        settings = {"model": model, "text": str(text) if text else "ours", "parts": len(texts), "threads": count}
        results.save(json, settings | {"instruction_sets": list(sets), "quick": quick}, describe_machine(), found)
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

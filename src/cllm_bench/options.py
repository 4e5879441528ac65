"""Options that several commands of `cllm bench` have."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from cllm_bench.errors import BenchError
from cllm_bench.pages.extras import check_report

Model = Annotated[str, typer.Option(metavar="MODEL", help="A known name, a .gguf file or hf:org/repo/file.gguf.")]
Threads = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Threads per side. [default: as many as `cllm serve` uses]")
]
InstructionSet = Annotated[
    str, typer.Option(metavar="NAME", help="Of cLLM: auto, amx, avx512, avxvnni, avx2 or generic.")
]
ReportDir = Annotated[
    Path | None,
    typer.Option("--report", metavar="DIR", callback=check_report, help="Write a page with plots into this directory."),
]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes, one pass: a smoke test, not for figures.")]


def check_instruction_sets(names: Iterable[str]) -> None:
    from cllm._native import instruction_sets  # needs the extension

    if unknown := set(names) - {"auto", *instruction_sets()}:
        raise BenchError(
            f"--instruction-set is {', '.join(sorted(unknown))}; this CPU has {', '.join(instruction_sets())}"
        )

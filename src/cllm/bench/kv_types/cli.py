"""`cllm bench kv-types`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cllm.bench.http import BenchError
from cllm.bench.machine import describe_machine
from cllm.machine import default_threads, read_cpus
from cllm.models.gguf import GGUFModel
from cllm.models.registry import resolve
from cllm.only_json import only_json

if TYPE_CHECKING:
    from cllm.bench.kv_types.measure import Subject

INTERRUPTED = 130
TEXT = Path(__file__).with_name("text.txt")
LONGEST = 1024
"""Tokens of a text that are read as one context."""
FEWEST = 64
QUICK_TOKENS = 128

Model = Annotated[str, typer.Option(help="A known name, a .gguf file or hf:org/repo/file.gguf.")]
Text = Annotated[Path | None, typer.Option(help="A text file for quality, in UTF-8. [default: one of ours, 17 kB]")]
Repeats = Annotated[int, typer.Option(min=1, help="How often the speed of each pair is measured, in turn.")]
Threads = Annotated[int | None, typer.Option(min=1, help="[default: those that `cllm serve` takes]")]
InstructionSet = Annotated[str, typer.Option(help="auto, amx, avx512, avxvnni, avx2 or generic.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write all that was measured to this file (- is stdout).")]
ReportDir = Annotated[Path | None, typer.Option("--report", help="Write a page with plots into this directory.")]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes: to see that it runs, not for figures.")]


@only_json
def kv_types(
    model: Model = "smollm2",
    text: Text = None,
    repeats: Repeats = 3,
    threads: Threads = None,
    instruction_set: InstructionSet = "auto",
    json: Json = None,
    report: ReportDir = None,
    quick: Quick = False,
) -> None:
    """What do K and V as q8_0 or q4_0 cost and give? Quality, speed and bytes of all nine pairs, native engine only."""
    from cllm.bench.kv_types import page, results  # these need the extension
    from cllm.bench.kv_types.measure import QUICK_WORKS, WORKS, measure

    machine = describe_machine()
    count = threads or default_threads(read_cpus()).count
    subject = _subject(model, text or TEXT, count, instruction_set, quick)
    found = measure(subject, QUICK_WORKS if quick else WORKS, repeats=1 if quick else repeats, progress=_say)
    print(results.table(found), flush=True)
    if quick:
        print("small sizes: the figures above do not count")
    settings = {"model": model, "text": str(text) if text else "ours", "repeats": repeats, "threads": count}
    settings |= {"instruction_set": instruction_set, "quick": quick}
    if json is not None:
        results.save(json, settings, machine, found)
    if report is not None:
        print(f"written: {page.write(report, settings, machine, found)}")
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)


def _subject(model: str, text: Path, threads: int, instruction_set: str, quick: bool) -> Subject:
    from cllm.backends.native.loader import load_engine
    from cllm.bench.kv_types.measure import Subject

    file = resolve(model)
    opened = GGUFModel.open(file)
    texts = read_texts(opened, text, quick)
    engine = load_engine(opened, threads=threads, instruction_set=instruction_set)
    return Subject(file.stem, engine, opened.shape, texts)


def read_texts(model: GGUFModel, text: Path, quick: bool) -> list[Sequence[int]]:
    """The text in tokens of the model, in parts that are read as one context each."""
    from cllm.text.tokenizer import load_tokenizer

    tokens = load_tokenizer(model).encode(_content(text))
    return _texts(tokens, text, model.shape.context_length, quick)


def _content(text: Path) -> str:
    try:
        return text.read_text(encoding="utf-8")
    except OSError as error:
        raise BenchError(f"cannot read {text}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BenchError(f"{text} is not UTF-8: {error}") from error


def _texts(tokens: Sequence[int], text: Path, context: int, quick: bool) -> list[Sequence[int]]:
    from cllm.bench.kv_types.quality import parts_of

    if len(tokens) < FEWEST:
        raise BenchError(f"{text} is {len(tokens)} tokens long; give a text of at least {FEWEST}")
    return parts_of(tokens, min(context, QUICK_TOKENS if quick else LONGEST), 1 if quick else None)


def _say(line: str) -> None:
    # No spinner: its thread would take turns with those that are measured.
    print(line, file=sys.stderr, flush=True)

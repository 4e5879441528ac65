"""`cllm simulate`: what would happen, without a model. What a run needs is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cllm.cli.command_list import CommandList
from cllm.observe.json_option import JsonOption, only_json

app = typer.Typer(
    cls=CommandList,
    help="Simulate the scheduler and the KV cache on a trace: sweeps of settings, several servers.",
    add_completion=False,
    rich_markup_mode=None,
)

TraceFile = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="JSONL with one request per line; Mooncake's format too.")
]
Synthetic = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="poisson, chats, agents, conversation or toolagent, the last two like Mooncake's. [default: chats]",
    ),
]
Requests = Annotated[int | None, typer.Option(min=1, help="How many. [default: 2000; of a file: all]")]
Rate = Annotated[float | None, typer.Option(help="Requests a second. [default: 1; of a file: its own]")]
ShapeText = Annotated[
    str, typer.Option("--shape", metavar="KEY=VALUE,...", help="Lengths and sharing; see docs/simulate.md.")
]
HashTokens = Annotated[int, typer.Option(min=1, help="Tokens per hash in the trace's hash_ids.")]
Blocks = Annotated[int | None, typer.Option(min=2, help="KV memory, in blocks. [default: 2048]")]
BlockSize = Annotated[int | None, typer.Option(min=1, help="Tokens in a block. [default: 16]")]
Replicas = Annotated[
    str | None, typer.Option(metavar="N,...", help="Identical servers; several numbers: each in turn. [default: 1]")
]
Routing = Annotated[
    str | None,
    typer.Option(
        metavar="HOW,...",
        help="round-robin, prefix, random, least-loaded, consistent-hash, or all of them. [default: round-robin]",
    ),
]
PerReplica = Annotated[bool, typer.Option("--per-replica", help="--requests and --rate are for each replica.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other setting; may be repeated.")
]
WhatIf = Annotated[
    list[str] | None,
    typer.Option("--what-if", metavar="KEY=V1,V2,...", help="Vary a setting, or rate; repeated: every combination."),
]
Cost = Annotated[str, typer.Option(metavar="NAME|FILE", help="Cost model of a step.")]
Report = Annotated[Path | None, typer.Option(metavar="DIR", help="Also write a page with tables and plots there.")]
Seed = Annotated[int, typer.Option(min=0, help="Random seed of synthetic traces.")]


@app.callback(invoke_without_command=True)
@only_json
def run(
    context: typer.Context,
    trace: TraceFile = None,
    synthetic: Synthetic = None,
    requests: Requests = None,
    rate: Rate = None,
    shape: ShapeText = "",
    hash_tokens: HashTokens = 512,
    blocks: Blocks = None,
    block_size: BlockSize = None,
    replicas: Replicas = None,
    routing: Routing = None,
    per_replica: PerReplica = False,
    set_: Set = None,
    what_if: WhatIf = None,
    cost: Cost = "smollm2",
    seed: Seed = 0,
    json: JsonOption = None,
    report: Report = None,
) -> None:
    """Simulate the scheduler and the KV cache on a trace: sweeps of settings, several servers."""
    if context.invoked_subcommand is not None:
        return
    from cllm_bench.pages.extras import check_report
    from cllm_bench.simulate.commands import TraceSource, run_grid
    from cllm_bench.simulate.settings import ROUTINGS, Settings, changed, parse_assignment

    if routing == "all":
        routing = ",".join(ROUTINGS)
    given = {"block-size": block_size, "blocks": blocks, "replicas": replicas, "routing": routing}
    values = {key: str(value) for key, value in given.items() if value is not None}
    swept = {key: f"{key}={value}" for key, value in values.items() if "," in value}
    assignments = dict(parse_assignment(f"{key}={value}") for key, value in values.items() if key not in swept)
    assignments |= dict(parse_assignment(text) for text in set_ or [])
    sweeps = [*filter(None, [swept.get("replicas")]), *(what_if or []), *filter(None, [swept.get("routing")])]
    source = TraceSource(trace, synthetic, requests, rate, shape, hash_tokens, seed, per_replica)
    base = changed(Settings(), assignments)
    complete = run_grid(source, base, sweeps, cost, json, check_report(report))
    if not complete:
        raise typer.Exit(130)


@app.command()
def fit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where the cost model goes.")],
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="A known name, a .gguf file or hf:org/repo/file.gguf.")
    ] = "smollm2",
    backend: Annotated[str, typer.Option(metavar="NAME", help="auto, native, llama_cpp or fake.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Passes over all prompts.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the prompts.")] = 0,
) -> None:
    """Measure the steps of the real engine on this machine, and write their cost model for --cost."""
    from cllm_bench.simulate.measure import fit_model

    typer.echo(fit_model(model, backend, repeats, file, seed))

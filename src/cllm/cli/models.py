"""`cllm models`, `pull` and `export-tokenizer`: models on this machine, their memory and tokenizers, and new ones."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cllm.cli import completion
from cllm.cli.options import (
    MODEL_HELP,
    BackendOption,
    ConfigOption,
    ModelArgument,
    SetOption,
    load_settings,
    open_console,
    print_status,
)
from cllm.errors import CLLMError
from cllm.observe.json_option import JsonOption, write_or_show

if TYPE_CHECKING:
    from cllm.config import Config
    from cllm.models.gguf_choice import Choice

MIB = 1 << 20


def models(
    places: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Models or directories to list, instead of the caches.",
            autocompletion=completion.models,
        ),
    ] = None,
    backend: BackendOption = None,
    config_file: ConfigOption = None,
    assignments: SetOption = None,
    support: Annotated[bool, typer.Option("--support", help="List the architectures that native can run.")] = False,
    json_file: JsonOption = None,
) -> None:
    """List the models on this machine and their memory use. Searches cLLM's cache and Hugging Face's, and shows the
    memory for the weights and for the K/V of 1,000 tokens."""
    from cllm.models.registry import local_models

    if support:
        _show_support(json_file)
        return
    config = load_settings(config_file, assignments, {"backend.type": backend}).config
    logging.getLogger("cllm").setLevel(logging.ERROR)  # the table shows which backend would run it
    found = _named(places) if places else local_models()
    rows = [_row(config, name, path) for name, path in found]
    write_or_show(json_file, rows, lambda: _print(rows, asked=places or ()))
    if any("problem" in row and row["name"] in (places or ()) for row in rows):  # only for models given by name
        raise typer.Exit(2)


def _show_support(json_file: Path | None) -> None:
    from rich.table import Table

    from cllm.models.architectures import ARCHITECTURES

    table = Table("architecture", "models", box=None, pad_edge=False, header_style="bold")
    rows = [{"architecture": name, "models": each.models} for name, each in ARCHITECTURES.items()]
    for row in rows:
        table.add_row(*row.values())
    write_or_show(json_file, rows, lambda: open_console().print(table))


def _named(places: list[str]) -> list[tuple[str, Path | None]]:
    from cllm.models.registry import models_in

    found: list[tuple[str, Path | None]] = []
    for place in places:
        inside = models_in(place)
        found += [(place, Path(place))] if inside is None else [(str(path), path) for path in inside]
    return found


def _row(config: Config, name: str, path: Path | None) -> dict[str, Any]:
    """A model that cannot be run has a "problem" instead of numbers."""
    from cllm.config import ModelEntry, config_of
    from cllm.loading.estimate import estimate

    row: dict[str, Any] = {"name": name, "path": None if path is None else str(path)}
    if path is None:
        return {**row, "problem": f"not downloaded yet; run: cllm pull {name}"}
    try:
        about = estimate(config_of(config, ModelEntry(name=name)))
    except CLLMError as error:
        return {**row, "problem": str(error)}
    return {
        **row,
        "file_bytes": _size(path),
        "weight_type": about.weight_type,
        "backend": about.kind,
        "weights_bytes": about.weights,
        "kv_bytes_per_1000_tokens": 1000 * about.token_bytes,
        "context": about.context,
        "context_bytes": about.context_bytes,
        "sampling_defaults": about.sampling.recommended,
    }


def _size(path: Path) -> int | None:
    """The size of the file, or of the files in the directory."""
    files = [path] if path.is_file() else [each for each in path.iterdir() if each.is_file()] if path.is_dir() else []
    return sum(file.stat().st_size for file in files) if files else None


def _print(rows: list[dict[str, Any]], asked: Collection[str]) -> None:
    """Problems of models that were asked for by name are errors."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model", no_wrap=True)
    for column in (
        "file MiB",
        "type",
        "backend",
        "weights MiB",
        "K/V MiB / 1,000 tokens",
        "context",
        "K/V MiB / context",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("sampling")
    for row in (row for row in rows if "problem" not in row):
        table.add_row(
            row["name"],
            "" if row["file_bytes"] is None else _mib(row["file_bytes"]),
            row["weight_type"] or "",
            row["backend"],
            _mib(row["weights_bytes"]),
            _mib(row["kv_bytes_per_1000_tokens"]),
            f"{row['context']:,}",
            _mib(row["context_bytes"]),
            ", ".join(f"{name} {value:g}" for name, value in row["sampling_defaults"].items()),
        )
    if table.row_count:
        open_console().print(table)
    for row in rows:
        if "problem" in row:
            name, problem = row["name"], row["problem"]
            typer.echo(problem if "/" in name and name in problem else f"{name}: {problem}", err=name in asked)


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f}"


# -- pull --------------------------------------------------------------------------------------------------------------


def pull(model: ModelArgument = None) -> None:
    """Download or update a model, and print its path. If a repository has several .gguf files, all are listed and the
    best one that fits into memory is chosen, Q4_K_M if possible."""
    from cllm.models.registry import DEFAULT_MODEL, resolve

    typer.echo(resolve(model or DEFAULT_MODEL, refresh=True, on_choice=_show_choice))


def _show_choice(choice: Choice) -> None:
    for file in choice.files:
        mark = "→" if file is choice.chosen else " "
        print_status(f"{mark} {file.quantisation or '?':8} {file}")
    print_status(f"using {choice.chosen.name}, {choice.why}")


# -- export-tokenizer --------------------------------------------------------------------------------------------------


def export_tokenizer(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] DIR",
            help=f"{MODEL_HELP} DIR is the directory to write to.",
            show_default=False,
            autocompletion=completion.models,
        ),
    ],
) -> None:
    """Export a model's tokenizer as a Hugging Face directory, for load testers and other tools that count tokens."""
    from cllm.loading.backend_choice import open_model_file
    from cllm.models.hf_directory import HFModel
    from cllm.text.export import export_tokenizer as export
    from cllm.text.hf_tokenizer import load_hf_chat_template
    from cllm.text.template_source import load_chat_template

    if len(names) > 2:
        raise CLLMError(f"export-tokenizer takes a model and a directory, not {len(names)} arguments")
    flags = {"model.name": names[0]} if len(names) == 2 else {}
    model = open_model_file(load_settings(None, None, flags).config)
    template = load_hf_chat_template(model) if isinstance(model, HFModel) else load_chat_template(model)
    for path in export(model, template, Path(names[-1])):
        typer.echo(path)

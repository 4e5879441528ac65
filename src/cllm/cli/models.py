"""`cllm models`: the models on this machine, and the memory they need."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cllm.cli import completion
from cllm.cli.options import BackendOption, ConfigOption, SetOption, load_settings, open_console
from cllm.errors import CLLMError
from cllm.observe.json_option import JsonOption, write_or_show

if TYPE_CHECKING:
    from cllm.config import Config

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
    json_file: JsonOption = None,
) -> None:
    """List the models on this machine and their memory use. Searches cLLM's cache and Hugging Face's, and shows the
    memory for the weights and for the K/V of 1,000 tokens."""
    from cllm.models.registry import local_models

    config = load_settings(config_file, assignments, {"backend.type": backend}).config
    logging.getLogger("cllm").setLevel(logging.ERROR)  # the table shows which backend would run it
    found = _named(places) if places else local_models()
    rows = [_row(config, name, path) for name, path in found]
    write_or_show(json_file, rows, lambda: _print(rows, asked=places or ()))
    if any("problem" in row and row["name"] in (places or ()) for row in rows):  # only for models given by name
        raise typer.Exit(2)


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

"""`cllm models`: what can be served here, and what it takes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cllm.cli.options import BackendOption, ConfigOption, JsonOption, SetOption, is_stdout, load_settings, write_json
from cllm.errors import CLLMError

if TYPE_CHECKING:
    from cllm.config import Config

MIB = 1 << 20


def models(
    places: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="Models, or directories of them, instead of those in the cache."),
    ] = None,
    backend: BackendOption = None,
    config_file: ConfigOption = None,
    assignments: SetOption = None,
    json_file: JsonOption = None,
) -> None:
    """List the models that are here, in cLLM's cache and the Hugging Face client's, with the memory they take: weights,
    and K/V for 1,000 tokens; and the names of models that can be fetched."""
    from cllm.models.registry import local_models

    config = load_settings(config_file, assignments, {"backend.type": backend}).config
    logging.getLogger("cllm").setLevel(logging.ERROR)  # which backend it would be is in the table
    found = _named(places) if places else local_models()
    rows = [_row(config, name, path) for name, path in found]
    if json_file:
        write_json(json_file, rows)
    if not is_stdout(json_file):
        _print(rows)
    if any("problem" in row and row["name"] in (places or ()) for row in rows):  # one that was asked for by name
        raise typer.Exit(2)


def _named(places: list[str]) -> list[tuple[str, Path | None]]:
    from cllm.models.registry import models_in

    found: list[tuple[str, Path | None]] = []
    for place in places:
        inside = models_in(place)
        found += [(place, Path(place))] if inside is None else [(str(path), path) for path in inside]
    return found


def _row(config: Config, name: str, path: Path | None) -> dict[str, Any]:
    """One that cannot be run has a reason instead of numbers."""
    from cllm.choosing import estimate
    from cllm.config import ModelEntry, config_of

    row: dict[str, Any] = {"name": name, "path": None if path is None else str(path)}
    if path is None:
        return {**row, "problem": f"not here yet; fetch it with: cllm pull {name}"}
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
    """Of the file, or of what is in the directory."""
    files = [path] if path.is_file() else [each for each in path.iterdir() if each.is_file()] if path.is_dir() else []
    return sum(file.stat().st_size for file in files) if files else None


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model", no_wrap=True)
    for column in ("file MiB", "type", "backend", "weights MiB", "K/V MiB / 1,000 tokens", "context", "its K/V MiB"):
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
        console = Console(markup=False, highlight=False)
        if not console.is_terminal:
            console.width = 200
        console.print(table)
    for row in rows:
        if "problem" in row:
            problem = row["problem"].removeprefix(f"{row['name']}: ")
            typer.echo(f"{row['name']}: {problem}")


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f}"

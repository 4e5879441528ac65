"""`cllm cache`: show or clear the KV cache on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cllm.cli.options import ConfigOption, SetOption, load_settings, open_console
from cllm.errors import CLLMError
from cllm.observe.json_option import JsonOption, write_or_show

if TYPE_CHECKING:
    from cllm.kv.disk.overview import ModelOnDisk, Overview

MIB = 1 << 20

app = typer.Typer(help="Show or clear the KV cache on disk.", invoke_without_command=True, rich_markup_mode=None)


@app.callback()
def show(
    context: typer.Context,
    config_file: ConfigOption = None,
    assignments: SetOption = None,
    json_file: JsonOption = None,
) -> None:
    """Show or clear the KV cache on disk."""
    directory, limit = _where(config_file, assignments)
    context.obj = directory
    if context.invoked_subcommand is not None:
        return
    found = _look(directory)
    write_or_show(json_file, _as_json(found, directory, limit), lambda: _print(found, directory, limit))


@app.command()
def clear(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="NAME", help="Only this model: a name or id from `cllm cache`."),
    ] = None,
) -> None:
    """Delete the KV cache on disk, of all models or of one. Servers may keep running."""
    from cllm.kv.disk.overview import clear as clear_directory

    def wanted(found: ModelOnDisk) -> bool:
        return model is None or found.name == model or (len(model) >= 4 and found.folder.startswith(model))

    directory: Path = context.obj
    known = _look(directory).models
    if model is not None and not any(map(wanted, known)):
        names = ", ".join(sorted({found.name for found in known}))
        there = f"models there: {names}" if names else "it is empty"
        raise CLLMError(f"{directory} has no K/V of {model!r}; {there}")
    try:
        files, size = clear_directory(directory, wanted)
    except OSError as error:
        raise CLLMError(f"cannot clear {directory}: {error.strerror or error}") from error
    typer.echo(f"removed {_files(files)} ({size / MIB:.1f} MiB) from {directory}")


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"


def _where(config_file: Path | None, assignments: list[str] | None) -> tuple[Path, int]:
    from cllm.models.registry import kv_directory

    disk = load_settings(config_file, assignments).config.kv.disk
    return kv_directory(disk.directory), int(disk.max_mb * MIB)


def _look(directory: Path) -> Overview:
    from cllm.kv.disk.overview import overview

    try:
        if directory.exists() and not directory.is_dir():
            raise CLLMError(f"{directory} is not a directory: choose another kv.disk.directory")
        return overview(directory)
    except OSError as error:
        raise CLLMError(f"cannot read {directory}: {error.strerror or error}") from error


def _as_json(found: Overview, directory: Path, limit: int) -> dict[str, Any]:
    return {
        "directory": str(directory),
        "bytes": found.bytes,
        "limit_bytes": limit,
        "foreign_files": found.foreign,
        "models": [
            {
                "id": model.folder,
                "about": model.about,
                "files": model.segments,
                "bytes": model.bytes,
                "blocks": model.blocks,
                "tokens": model.tokens,
                "sequences": model.sequences,
                "damaged_files": model.damaged,
                "unreadable_files": model.unreadable,
                "files_of_other_versions": model.other_versions,
                "last_used": model.used_ns / 1e9,
            }
            for model in found.models
        ],
    }


def _print(found: Overview, directory: Path, limit: int) -> None:
    from datetime import datetime

    from rich.table import Table

    typer.echo(f"{directory}: {found.bytes / MIB:.1f} MiB of K/V, at most {limit / MIB:.0f} MiB (kv.disk.max_mb)")
    if found.foreign:
        typer.echo(f"{_files(found.foreign)} not written by cLLM, left alone")
    if unreadable := sum(model.unreadable for model in found.models):
        typer.echo(f"{_files(unreadable)} cannot be read: check the permissions and the disk")
    if not found.models:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("id", "model", "K/V", "tokens", "sequences", "files", "damaged", "MiB", "last used"):
        table.add_column(column, no_wrap=True)
    for model in found.models:
        kinds = "/".join(str(model.about[key]) for key in ("kv_type_k", "kv_type_v") if key in model.about)
        try:
            used = datetime.fromtimestamp(model.used_ns / 1e9).strftime("%Y-%m-%d %H:%M")
        except (OverflowError, ValueError, OSError):
            used = "?"
        numbers = (model.tokens, model.sequences, model.segments, model.damaged)
        table.add_row(
            model.folder[:12],
            model.name,
            kinds,
            *(f"{number:,}" for number in numbers),
            f"{model.bytes / MIB:.1f}",
            used,
        )
    open_console().print(table)

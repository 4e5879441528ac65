"""`cllm config`: what is effective and where it comes from, and whether a file is right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cllm.cli.options import ConfigOption, JsonOption, SetOption, is_stdout, load_settings, write_json

if TYPE_CHECKING:
    from cllm.config import LoadedConfig

PIPED_WIDTH = 200
"""Columns when nobody watches: no line of the table is broken, so that grep works."""
MEANING_WIDTH = 120
"""Narrower terminals do without the descriptions."""


def show(config_file: ConfigOption = None, assignments: SetOption = None, json_file: JsonOption = None) -> None:
    """Print every setting: its value, where that came from, and what it is for."""
    rows = _rows(load_settings(config_file, assignments))
    if json_file:
        write_json(json_file, rows)
    if not is_stdout(json_file):
        _print_table(rows)


def check(file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML configuration file.")]) -> None:
    """Validate a configuration file; every problem is one line, and the exit code then is 2."""
    from cllm.config import InvalidConfigError, load_config
    from cllm.errors import ConfigError

    try:
        load_config(file, environ={})
    except ConfigError as error:
        for problem in error.problems if isinstance(error, InvalidConfigError) else (str(error),):
            typer.echo(problem, err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{file}: ok")


def _rows(loaded: LoadedConfig) -> dict[str, dict[str, Any]]:
    from cllm.config.keys import KEYS, SECRET_KEYS
    from cllm.config.problems import HIDDEN

    values = loaded.config.model_dump(mode="json")
    rows = {}
    for key, field in KEYS.items():
        value: Any = values
        for part in key.split("."):
            value = value[part]
        if key in SECRET_KEYS and value is not None:
            value = HIDDEN
        rows[key] = {"value": value, "source": loaded.sources[key], "description": field.description}
    return rows


def _print_table(rows: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from cllm.config.problems import as_written

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("key", no_wrap=True)
    table.add_column("value")
    table.add_column("from")
    with_meaning = console.width >= MEANING_WIDTH
    if with_meaning:
        table.add_column("meaning")
    for key, row in rows.items():
        cells = [key, as_written(row["value"]), row["source"]] + [row["description"]] * with_meaning
        table.add_row(*cells, style=None if row["source"] == "default" else "bold green")
    console.print(table)

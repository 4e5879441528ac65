"""`cllm config`: show the effective settings and where they come from, or check a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cllm.cli.command_list import CommandList
from cllm.cli.options import ConfigOption, SetOption, load_settings, open_console
from cllm.observe.json_option import JsonOption, write_or_show

if TYPE_CHECKING:
    from cllm.config import LoadedConfig

MEANING_WIDTH = 120
"""Narrower terminals do not show the descriptions."""

app = typer.Typer(cls=CommandList, help="Show or check the configuration.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def show(config_file: ConfigOption = None, assignments: SetOption = None, json_file: JsonOption = None) -> None:
    """Print every setting: its value, where it was set, and what it does."""
    rows = _rows(load_settings(config_file, assignments))
    write_or_show(json_file, rows, lambda: _print_table(rows))


@app.command()
def check(file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML configuration file.")]) -> None:
    """Check a configuration file. Prints one line per problem, and exits with 2 if there are any."""
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
    from cllm.config.errors import REDACTED
    from cllm.config.keys import KEYS, SECRET_KEYS

    values = loaded.config.model_dump(mode="json")
    rows = {}
    for key, field in KEYS.items():
        value: Any = values
        for part in key.split("."):
            value = value[part]
        if key in SECRET_KEYS and value is not None:
            value = REDACTED
        rows[key] = {"value": value, "source": loaded.sources[key], "description": field.description}
    return rows


def _print_table(rows: dict[str, dict[str, Any]]) -> None:
    from rich.table import Table

    from cllm.config.errors import as_yaml

    console = open_console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("key", no_wrap=True)
    table.add_column("value")
    table.add_column("from")
    with_meaning = console.width >= MEANING_WIDTH
    if with_meaning:
        table.add_column("meaning")
    for key, row in rows.items():
        cells = [key, as_yaml(row["value"]), row["source"]] + [row["description"]] * with_meaning
        table.add_row(*cells, style=None if row["source"] == "default" else "bold green")
    console.print(table)

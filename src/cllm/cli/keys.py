"""`cllm keys`: named keys that clients send, kept as digests in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cllm.cli.options import ConfigOption, SetOption, load_settings, say
from cllm.errors import ConfigError

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Shown in the log and in metrics.")]
FileOption = Annotated[
    Path | None,
    typer.Option("--file", "-f", metavar="FILE", help="The file of keys. [default: server.api_keys]"),
]

app = typer.Typer(help="Make, list and remove named API keys.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def add(
    name: NameArgument,
    max_concurrent: Annotated[
        int | None, typer.Option(metavar="N", help="Most requests at once. [default: no limit]")
    ] = None,
    file: FileOption = None,
    config_file: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Make a key and print it, once: only a digest of it is kept."""
    from cllm.server.key_file import add_key

    path = _path(file, config_file, assignments)
    print(add_key(path, name, max_concurrent))
    say(f"Kept as a digest in {path}; it cannot be shown again. A server that uses the file takes it within a second.")


@app.command("list")
def list_keys(file: FileOption = None, config_file: ConfigOption = None, assignments: SetOption = None) -> None:
    """Print the names of the keys, their limits and when they were made."""
    from cllm.server.key_file import read_keys

    keys = read_keys(_path(file, config_file, assignments)).keys
    width = max([4, *(len(key.name) for key in keys)])
    print(f"{'name':{width}}  {'max_concurrent':>14}  created")
    for key in keys:
        limit = "-" if key.max_concurrent is None else key.max_concurrent
        print(f"{key.name:{width}}  {limit:>14}  {key.created}")


@app.command()
def remove(
    name: NameArgument, file: FileOption = None, config_file: ConfigOption = None, assignments: SetOption = None
) -> None:
    """Take a key back; what it has running ends in its own time."""
    from cllm.server.key_file import remove_key

    path = _path(file, config_file, assignments)
    remove_key(path, name)
    say(f"{name} is no longer in {path}. A server that uses the file refuses it within a second.")


def _path(file: Path | None, config_file: Path | None, assignments: list[str] | None) -> Path:
    path = file or load_settings(config_file, assignments).config.server.api_keys
    if path is None:
        raise ConfigError(
            "no file of keys is named: give one with --file FILE, and to the server with --set server.api_keys=FILE"
        )
    return path

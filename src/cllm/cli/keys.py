"""`cllm keys`: named API keys, stored as digests in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cllm.cli.options import ConfigOption, SetOption, load_settings, print_status
from cllm.errors import ConfigError

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the key, shown in logs and metrics.")]
FileOption = Annotated[
    Path | None, typer.Option("--file", "-f", metavar="FILE", help="Key file. [default: server.api_keys]")
]

app = typer.Typer(help="Create, list and remove named API keys.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def add(
    name: NameArgument,
    max_concurrent: Annotated[
        int | None, typer.Option(metavar="N", help="Maximum number of concurrent requests. [default: no limit]")
    ] = None,
    file: FileOption = None,
    config_file: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Create a key and print it. It is shown only once: the file stores a digest."""
    from cllm.server.auth.key_file import add_key

    path = _path(file, config_file, assignments)
    print(add_key(path, name, max_concurrent))
    print_status(
        f"Save the key now: {path} stores only a digest. Servers that use this file accept it within a second."
    )


@app.command("list")
def list_keys(file: FileOption = None, config_file: ConfigOption = None, assignments: SetOption = None) -> None:
    """List the keys with their limits and creation times."""
    from cllm.server.auth.key_file import read_keys

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
    """Remove a key. Its running requests still finish."""
    from cllm.server.auth.key_file import remove_key

    path = _path(file, config_file, assignments)
    remove_key(path, name)
    print_status(f"Removed {name} from {path}. Servers that use this file refuse the key within a second.")


def _path(file: Path | None, config_file: Path | None, assignments: list[str] | None) -> Path:
    path = file or load_settings(config_file, assignments).config.server.api_keys
    if path is None:
        raise ConfigError(
            "no key file: give one with --file FILE, and start the server with --set server.api_keys=FILE"
        )
    return path

"""`cllm pull`, and fetching a model at first use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cllm.cli.options import MODEL_HELP


def pull(name: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)] = "") -> None:
    """Fetch a model into the cache and print where it is."""
    from cllm.models.registry import DEFAULT_MODEL

    typer.echo(fetch_model(name or DEFAULT_MODEL))


def fetch_model(name: str) -> Path:
    """The model's file, fetched with a progress bar if it is not there yet."""
    from cllm.models.registry import resolve

    return resolve(name)

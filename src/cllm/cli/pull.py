"""`cllm pull`: fetch a model before it is needed."""

from __future__ import annotations

from typing import Annotated

import typer

from cllm.cli.options import MODEL_HELP


def pull(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)] = None,
) -> None:
    """Fetch a model into the cache, or a newer version of it, and print where it is."""
    from cllm.models.registry import DEFAULT_MODEL, resolve

    typer.echo(resolve(model or DEFAULT_MODEL, refresh=True))

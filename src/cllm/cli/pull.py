"""`cllm pull`: fetch a model before it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cllm.cli.options import MODEL_HELP, say

if TYPE_CHECKING:
    from cllm.models.gguf_choice import Choice


def pull(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)] = None,
) -> None:
    """Fetch a model into the cache, or a newer version of it, and print where it is. Of a repository with several .gguf
    files, list them and take the one that suits: Q4_K_M, if it fits the memory."""
    from cllm.models.registry import DEFAULT_MODEL, resolve

    typer.echo(resolve(model or DEFAULT_MODEL, refresh=True, on_choice=_show))


def _show(choice: Choice) -> None:
    for file in choice.files:
        mark = "→" if file is choice.chosen else " "
        say(f"{mark} {file.quantisation or '?':8} {file}")
    say(f"taking {choice.chosen.name}, {choice.why}")

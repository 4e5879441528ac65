"""`cllm pull`: download a model before it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from cllm.cli.options import ModelArgument, print_status

if TYPE_CHECKING:
    from cllm.models.gguf_choice import Choice


def pull(model: ModelArgument = None) -> None:
    """Download or update a model, and print its path. If a repository has several .gguf files, all are listed and the
    best one that fits into memory is chosen, Q4_K_M if possible."""
    from cllm.models.registry import DEFAULT_MODEL, resolve

    typer.echo(resolve(model or DEFAULT_MODEL, refresh=True, on_choice=_show))


def _show(choice: Choice) -> None:
    for file in choice.files:
        mark = "→" if file is choice.chosen else " "
        print_status(f"{mark} {file.quantisation or '?':8} {file}")
    print_status(f"using {choice.chosen.name}, {choice.why}")

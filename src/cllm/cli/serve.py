"""`cllm serve`: the options. The work is in `serving.py`."""

from __future__ import annotations

from typing import Annotated

import typer

from cllm.cli.memory import check_room
from cllm.cli.options import MODEL_HELP, BackendOption, ConfigOption, DeviceOption, SetOption, load_settings


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help=f"{MODEL_HELP} Several, or a directory of them, share memory."),
    ] = None,
    backend: BackendOption = None,
    device: DeviceOption = None,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on. [default: 127.0.0.1]")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", "-p", help="Port to listen on; 0 takes any free one. [default: 8000]")
    ] = None,
    config_file: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Serve a model, or several, over HTTP: OpenAI's API and cLLM's own."""
    check_room()
    flags = {
        **_flags_of(models or []),
        "backend.type": backend,
        "backend.torch.device": device,
        "server.host": host,
        "server.port": port,
    }
    config = load_settings(config_file, assignments, flags).config

    from cllm.cli import standard
    from cllm.cli.serving import run_server

    standard.never_block()

    raise typer.Exit(run_server(config))


def _flags_of(models: list[str]) -> dict[str, object]:
    """One model is `model.name` as ever; several, or a directory of models, are entries."""
    from cllm.models.registry import models_in

    if not models:
        return {}
    if len(models) == 1 and models_in(models[0]) is None:
        return {"model.name": models[0], "models": ()}
    return {"models": tuple(models)}

"""`cllm serve`: the options. http_server.py does the work."""

from __future__ import annotations

from typing import Annotated

import typer

from cllm.cli import completion
from cllm.cli.options import (
    MODEL_HELP,
    BackendOption,
    ConfigOption,
    DeviceOption,
    SetOption,
    check_device,
    load_settings,
)
from cllm.cli.out_of_memory import check_memory


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help=f"{MODEL_HELP} Several models, or a directory of them, share the memory.",
            autocompletion=completion.models,
        ),
    ] = None,
    backend: BackendOption = None,
    device: DeviceOption = None,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on. [default: 127.0.0.1]")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", "-p", help="Port to listen on; 0: any free port. [default: 8000]")
    ] = None,
    config_file: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Serve one or more models over HTTP, with the APIs of OpenAI, Anthropic and Ollama, and cLLM's own."""
    check_memory()
    flags = {
        **_flags_of(models or []),
        "backend.type": backend,
        "backend.torch.device": device,
        "server.host": host,
        "server.port": port,
    }
    config = load_settings(config_file, assignments, flags).config
    check_device(config, device)

    from cllm.cli import stdio
    from cllm.cli.http_server import run_server

    stdio.limit_blocking()

    raise typer.Exit(run_server(config))


def _flags_of(models: list[str]) -> dict[str, object]:
    """One model sets `model.name`; several, or a directory of models, set `models`."""
    from cllm.models.registry import models_in

    if not models:
        return {}
    if len(models) == 1 and models_in(models[0]) is None:
        return {"model.name": models[0], "models": ()}
    return {"models": tuple(models)}

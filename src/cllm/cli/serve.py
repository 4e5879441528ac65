"""`cllm serve`: the options. The work is in `serving.py`."""

from __future__ import annotations

from typing import Annotated

import typer

from cllm.cli.memory import check_room
from cllm.cli.options import MODEL_HELP, BackendOption, ConfigOption, DeviceOption, SetOption, load_settings


def serve(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = None,
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
    """Serve a model over HTTP: OpenAI's API and cLLM's own."""
    check_room()
    flags = {
        "model.name": model,
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

"""`cllm chat`: the options. The conversation is in `conversation.py`."""

from __future__ import annotations

from typing import Annotated

import typer

from cllm.cli.memory import check_room
from cllm.cli.options import (
    BackendOption,
    ConfigOption,
    DeviceOption,
    JsonOption,
    ModelOption,
    SeedOption,
    SetOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    write_json,
)


def chat(
    model: ModelOption = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.", show_default=False)] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens in an answer.")] = 512,
    temperature: TemperatureOption = 0.7,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    seed: SeedOption = None,
    stop: StopOption = None,
    backend: BackendOption = None,
    device: DeviceOption = None,
    config_file: ConfigOption = None,
    assignments: SetOption = None,
    json_file: JsonOption = None,
) -> None:
    """Talk with a model. Inside, /help lists the commands."""
    check_room()
    from cllm.cli.conversation import run_chat
    from cllm.cli.local import prepare
    from cllm.engine.params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=tuple(stop or ())
    )
    config = prepare(config_file, assignments, model, backend, device)
    result = run_chat(config, params, system)
    if json_file:
        write_json(json_file, result)

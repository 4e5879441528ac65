"""`cllm chat`: the options. session.py runs the conversation."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cllm.cli import completion
from cllm.cli.options import (
    BackendOption,
    ConfigOption,
    DeviceOption,
    ModelArgument,
    SeedOption,
    SetOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    sampling_flags,
)
from cllm.cli.out_of_memory import check_memory
from cllm.errors import CLLMError
from cllm.observe.json_option import JsonOption, is_stdout, write_json


def chat(
    model: ModelArgument = None,
    named: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="MODEL", help="Same as MODEL.", autocompletion=completion.models),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.", show_default=False)] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Maximum number of tokens in an answer.")] = 512,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    backend: BackendOption = None,
    device: DeviceOption = None,
    config_file: ConfigOption = None,
    assignments: SetOption = None,
    json_file: JsonOption = None,
) -> None:
    """Chat with a model. In the chat, /help lists the commands."""
    check_memory()
    if model is not None and named not in (None, model):
        raise CLLMError(f"two models given, {model} and {named}: give one")
    from cllm.cli.chat.session import run_chat
    from cllm.cli.local import prepare

    settings = sampling_flags(temperature, top_p, top_k, seed, stop) | {"max_tokens": max_tokens}
    config = prepare(config_file, assignments, model or named, backend, device)
    result = run_chat(config, settings, system, sys.stderr if is_stdout(json_file) else sys.stdout)
    if json_file:
        write_json(json_file, result)

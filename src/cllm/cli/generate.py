"""`cllm generate`: one prompt, one answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cllm.cli.options import (
    BackendOption,
    ConfigOption,
    DeviceOption,
    ModelOption,
    SeedOption,
    SetOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    print_status,
    sampling_flags,
)
from cllm.cli.out_of_memory import check_memory, explain_bus_errors
from cllm.errors import InvalidRequestError
from cllm.observe.json_option import JsonOption, is_stdout, write_json

if TYPE_CHECKING:
    from cllm.config import Config
    from cllm.engine.params import SamplingParams


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="Text to continue; - or no argument reads stdin.", show_default=False),
    ] = None,
    model: ModelOption = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Maximum number of tokens to generate.")] = 128,
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
    """Continue a text. It is streamed to stdout, statistics go to stderr."""
    check_memory()
    import asyncio

    from cllm.cli.local import prepare
    from cllm.engine.params import SamplingParams

    flags = sampling_flags(temperature, top_p, top_k, seed, stop)
    params = SamplingParams.with_model_defaults(max_tokens=max_tokens, **flags)
    text = _read_prompt(prompt)
    config = prepare(config_file, assignments, model, backend, device)
    try:
        asyncio.run(_generate(config, text, params, json_file))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


async def _generate(config: Config, prompt: str, params: SamplingParams, json_file: Path | None) -> None:
    from cllm.cli.local import as_json, statistics
    from cllm.dialect.deltas import ChatDelta, Delta
    from cllm.llm import AsyncLLM

    json_on_stdout = is_stdout(json_file)

    def write(delta: ChatDelta) -> None:
        if isinstance(delta, Delta) and not json_on_stdout:
            print(delta.text, end="", flush=True)

    async with AsyncLLM(config, before_mapping=explain_bus_errors) as llm:
        (completion,) = await llm.submit(prompt, params).collect(on_delta=write)
        result = {
            "model": llm.model_name,
            "backend": llm.text.facts.traits.name,
            "prompt": prompt,
            **as_json(completion),
        }
    if not json_on_stdout:
        print()
    print_status(statistics(completion))
    if json_file:
        write_json(json_file, result)


def _read_prompt(argument: str | None) -> str:
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise InvalidRequestError("no prompt: give one as an argument, or pipe it in", "prompt")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the prompt on stdin is not UTF-8 text: {error}", "prompt") from error

"""Options that several commands share, and loading the configuration from them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cllm.cli import completion
from cllm.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from cllm.config import Config, LoadedConfig

PIPED_WIDTH = 200
"""Columns of a table if stdout is not a terminal."""
_LEAST_COLUMNS = 20
"""Narrower terminals break lines themselves."""

MODEL_HELP = (
    "smollm2, a .gguf file, a Hugging Face directory, hf:org/repo, hf:org/repo:Q4_K_M or hf:org/repo/file.gguf. "
    "[default: smollm2]"
)

ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False, autocompletion=completion.models)
]
ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", metavar="MODEL", help=MODEL_HELP, autocompletion=completion.models)
]
BackendOption = Annotated[
    str | None,
    typer.Option(
        "--backend",
        "-b",
        metavar="NAME",
        help="auto, native, llama_cpp, torch or fake. [default: auto]",
        autocompletion=completion.backends,
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="auto, cpu, cuda or cuda:1; a GPU needs torch. [default: auto]",
        autocompletion=completion.devices,
    ),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="YAML configuration file.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="Set any key that `cllm config show` lists; repeatable.",
        autocompletion=completion.settings,
    ),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        "--temperature", "-t", help="Sampling temperature; 0 is greedy. [default: the model's]", show_default=False
    ),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        help="Sample from the most likely tokens that add up to this probability. [default: the model's]",
        show_default=False,
    ),
]
TopKOption = Annotated[
    int | None,
    typer.Option(
        "--top-k", help="Sample from the K most likely tokens; 0: all. [default: the model's]", show_default=False
    ),
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", help="Random seed; the same seed gives the same output.", show_default=False)
]
StopOption = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="Stop before this text; repeatable.")
]


def load_settings(
    file: Path | None, assignments: Sequence[str] | None, flags: Mapping[str, Any] | None = None
) -> LoadedConfig:
    """Load the configuration. `flags` maps dotted keys to values; None means that the flag was not given."""
    from cllm.config import load_config, parse_assignment

    overrides = dict(parse_assignment(text) for text in assignments or ())
    overrides.update({key: value for key, value in (flags or {}).items() if value is not None})
    return load_config(file, overrides)


def check_device(config: Config, device: str | None) -> None:
    """Only torch runs on a GPU. `--device cpu` is true of every backend."""
    backend = config.backend.type
    if device not in (None, "auto", "cpu") and backend not in ("auto", "torch"):
        raise ConfigError(f"--device is {device}, but the {backend} backend runs on the CPU; use --backend torch")


def sampling_flags(
    temperature: float | None, top_p: float | None, top_k: int | None, seed: int | None, stop: Sequence[str] | None
) -> dict[str, Any]:
    """The sampling parameters that were given; the model's defaults apply to the others."""
    flags = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    return given | ({"stop": tuple(stop)} if stop else {})


def open_console() -> Console:
    """For tables. Lines are not wrapped unless stdout is a terminal, so that grep works."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    return console


def print_status(message: str) -> None:
    """Print lines to stderr, broken between words at a terminal; stdout is for results."""
    at_terminal = sys.stderr.isatty()
    typer.secho(_wrapped(message) if at_terminal else message, err=True, dim=at_terminal)


def _wrapped(message: str) -> str:
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        columns = 0
    if columns < _LEAST_COLUMNS:
        return message
    lines = (wrap(line, columns, break_long_words=False, break_on_hyphens=False) for line in message.split("\n"))
    return "\n".join("\n".join(line) for line in lines)

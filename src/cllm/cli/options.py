"""Options that several commands share, and how they become a configuration."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cllm.errors import CLLMError

if TYPE_CHECKING:
    from cllm.config import LoadedConfig

MODEL_HELP = (
    "A known name, a .gguf file, a Hugging Face directory, hf:org/repo, hf:org/repo:Q4_K_M or hf:org/repo/file.gguf. "
    "[default: smollm2]"
)

ModelOption = Annotated[str | None, typer.Option("--model", "-m", metavar="MODEL", help=MODEL_HELP)]
BackendOption = Annotated[
    str | None,
    typer.Option("--backend", "-b", metavar="NAME", help="auto, native, llama_cpp, torch or fake. [default: auto]"),
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="Where torch computes: auto, cpu, cuda or cuda:1. [default: auto]"),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="YAML configuration file.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Any key of `cllm config show`; may be repeated."),
]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the result as JSON (- is stdout).", show_default=False),
]
TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", "-t", help="0 is greedy. [default: the model's]", show_default=False)
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        "--top-p", help="Sample from the likeliest tokens up to this share. [default: the model's]", show_default=False
    ),
]
TopKOption = Annotated[
    int | None,
    typer.Option("--top-k", help="Sample from this many tokens; 0 is all. [default: the model's]", show_default=False),
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Same seed, same output.", show_default=False)]
StopOption = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="Stop at it; may be repeated.")]


def load_settings(
    file: Path | None, assignments: Sequence[str] | None, flags: Mapping[str, Any] | None = None
) -> LoadedConfig:
    """The effective configuration; `flags` are dotted keys, and those that are None were not given."""
    from cllm.config import load_config, parse_assignment

    overrides = dict(parse_assignment(text) for text in assignments or ())
    overrides.update({key: value for key, value in (flags or {}).items() if value is not None})
    return load_config(file, overrides)


def sampling_flags(
    temperature: float | None, top_p: float | None, top_k: int | None, seed: int | None, stop: Sequence[str] | None
) -> dict[str, Any]:
    """The sampling parameters that were given; the others are the model's to say."""
    flags = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    return given | ({"stop": tuple(stop)} if stop else {})


def is_stdout(path: Path | None) -> bool:
    return path == Path("-")


def write_json(path: Path, data: object) -> None:
    text = json.dumps(data, indent=2, ensure_ascii=False)
    if is_stdout(path):
        print(text)
        return
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise CLLMError(f"cannot write {path}: {error.strerror}") from error


def say(message: str) -> None:
    """A line for the person at the terminal; stdout is for results."""
    typer.secho(message, err=True, dim=sys.stderr.isatty())

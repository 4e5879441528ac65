"""Reading settings from a YAML file, the environment and flags, each with the place it stands at."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cllm.config.keys import KEYS, SECRET_KEYS, SECTIONS, children, is_nullable, is_text, suggest
from cllm.errors import ConfigError

ENV_PREFIX = "CLLM_"
OTHER_VARIABLES = frozenset({"CLLM_CACHE_DIR"})
"""Variables of ours that are no settings: where models are kept has to be known without a configuration."""


@dataclass(frozen=True, slots=True)
class Setting:
    key: str
    value: Any
    source: str
    """The kind of place: "file PATH", "env NAME" or "flag"."""
    origin: str
    """The exact place, for messages: "PATH:LINE" for a file, otherwise as `source`."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """Something that is no setting."""

    problem: str


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, and 1e-3 is a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


MOST_CHARACTERS = 1 << 20
"""Of a configuration file. Some files have no end: /dev/zero takes all memory before it takes a minute."""


def read_file(path: Path) -> Iterator[Setting | Misfit]:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration file {path} is not UTF-8 text") from error
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"the configuration file {path} has more than {MOST_CHARACTERS} characters: give another one")
    lines: dict[str, int] = {}
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        # Before construction, which expands merge keys in place and would make an override look like a duplicate.
        twice = list(_find_lines(root, "", lines))
        tree = None if root is None else loader.construct_document(root)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_line_and_reason(error)}") from error
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{path}:1: expected sections such as 'server:', found {tree!r}")
    yield from (Misfit(f"{path}:{lines[key]}: {key} is given twice: keep one") for key in twice)
    for key, value in _flatten(tree or {}, ""):
        origin = f"{path}:{lines[key]}" if key in lines else str(path)
        if problem := _misfit(key, value):
            yield Misfit(f"{origin}: {problem}")
        else:
            yield Setting(key, value, f"file {path}", origin)


def read_environment(environ: Mapping[str, str]) -> Iterator[Setting | Misfit]:
    for name, text in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX) or name in OTHER_VARIABLES:
            continue
        key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
        if key in SECTIONS:
            yield Misfit(
                f"environment variable {name} is a section: set its keys, such as {_variable(children(key)[0])}"
            )
            continue
        if key not in KEYS:
            yield Misfit(f"unknown environment variable {name}: {suggest(key, _variable)}")
            continue
        try:
            yield Setting(key, parse_value(key, text), f"env {name}", f"env {name}")
        except ConfigError as error:
            yield Misfit(f"environment variable {name}: {error}")


def read_overrides(overrides: Mapping[str, Any]) -> Iterator[Setting | Misfit]:
    for key, value in _flatten(overrides, ""):
        if problem := _misfit(key, value):
            yield Misfit(problem)
        else:
            yield Setting(key, value, "flag", "flag")


def parse_assignment(text: str) -> tuple[str, Any]:
    """`server.port=8001` as key and value. An unknown key is reported by `load_config`, like any other."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r} is not of the form key=value, such as server.port=8001")
    key = key.strip()
    return key, parse_value(key, value) if key in KEYS else value


def parse_value(key: str, text: str) -> Any:
    """Text settings are taken as written; numbers, switches and lists are read as YAML.

    Nothing at all stands for null, but not where it would silently take a lock off: an empty key is refused.
    """
    if is_text(key):
        nothing = ("null", "~") if key in SECRET_KEYS else ("", "null", "~")
        return None if text in nothing and is_nullable(key) else text
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key} is {text!r}, which is not valid YAML") from error


def _variable(key: str) -> str:
    return ENV_PREFIX + key.replace(".", "__").upper() + ("__..." if key in SECTIONS else "")


def _flatten(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values. Descends into known sections only; an empty section is no setting."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key not in SECTIONS:
            yield key, value
        elif isinstance(value, Mapping):
            yield from _flatten(value, f"{key}.")
        elif value is not None:
            yield key, value


def _misfit(key: str, value: Any) -> str | None:
    if key in SECTIONS:
        return f"{key} is {value!r}, but it is a section: write its keys below it"
    return None if key in KEYS else f"unknown key {key}: {suggest(key)}"


def _find_lines(node: yaml.Node | None, prefix: str, lines: dict[str, int]) -> Iterator[str]:
    """Fill `lines` with the line of every key that `_flatten` finds; yield the keys given twice."""
    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        key = f"{prefix}{name.value}"
        twice = key in lines
        lines[key] = name.start_mark.line + 1
        if twice:
            yield key
        if key in SECTIONS:
            yield from _find_lines(value, f"{key}.", lines)


def _line_and_reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        reason = " ".join(filter(None, (error.context, error.problem)))
        return f":{error.problem_mark.line + 1}: not valid YAML: {reason}"
    return f": not valid YAML: {' '.join(str(error).split())}"

"""Reads settings from a YAML file, the environment and flags, and records where each one comes from."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cllm.config.keys import KEYS, SECRET_KEYS, SECTIONS, children, is_nullable, is_text, suggest
from cllm.errors import ConfigError

ENV_PREFIX = "CLLM_"
NOT_SETTINGS = frozenset({"CLLM_CACHE_DIR"})
"""CLLM_ variables that are not settings: the cache directory must be known without a configuration."""


@dataclass(frozen=True, slots=True)
class Setting:
    key: str
    value: Any
    source: str
    """"file PATH", "env NAME" or "flag"."""
    origin: str
    """For error messages: "PATH:LINE" for a file, otherwise the same as `source`."""


@dataclass(frozen=True, slots=True)
class InvalidSetting:
    """Something in a source that is not a valid setting."""

    problem: str


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, but 1e-3 is a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


MAX_CHARACTERS = 1 << 20
"""Maximum size of a configuration file. Some files never end: reading /dev/zero would use up all memory."""


def read_file(path: Path) -> Iterator[Setting | InvalidSetting]:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the configuration file {path} is not UTF-8 text") from error
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"the configuration file {path} has more than {MAX_CHARACTERS} characters")
    lines: dict[str, int] = {}
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        # Before construction, which expands merge keys in place, so that an override would look like a duplicate.
        twice = list(_find_lines(root, "", lines))
        tree = None if root is None else loader.construct_document(root)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{_line_and_reason(error)}") from error
    except RecursionError:
        raise ConfigError(f"{path}: not valid YAML: nested too deeply") from None
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{path}:1: expected sections such as 'server:', found {reprlib.repr(tree)}")
    yield from (InvalidSetting(f"{path}:{lines[key]}: {key} is set twice: keep one") for key in twice)
    for key, value in _flatten(tree or {}, ""):
        origin = f"{path}:{lines[key]}" if key in lines else str(path)
        if problem := _find_problem(key, value):
            yield InvalidSetting(f"{origin}: {problem}")
        else:
            yield Setting(key, value, f"file {path}", origin)


def read_environment(environ: Mapping[str, str]) -> Iterator[Setting | InvalidSetting]:
    for name, text in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX) or name in NOT_SETTINGS:
            continue
        key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
        if key in SECTIONS:
            yield InvalidSetting(
                f"environment variable {name} names a section: set its keys, such as {_variable(children(key)[0])}"
            )
            continue
        if key not in KEYS:
            yield InvalidSetting(f"unknown environment variable {name}: {suggest(key, _variable)}")
            continue
        try:
            yield Setting(key, parse_value(key, text), f"env {name}", f"env {name}")
        except ConfigError as error:
            yield InvalidSetting(f"environment variable {name}: {error}")


def read_overrides(overrides: Mapping[str, Any]) -> Iterator[Setting | InvalidSetting]:
    for key, value in _flatten(overrides, ""):
        if problem := _find_problem(key, value):
            yield InvalidSetting(problem)
        else:
            yield Setting(key, value, "flag", "flag")


def parse_assignment(text: str) -> tuple[str, Any]:
    """`server.port=8001` as key and value. An unknown key is reported by `load_config`, like any other."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r}: expected KEY=VALUE, such as server.port=8001")
    key = key.strip()
    return key, parse_value(key, value) if key in KEYS else value


def parse_value(key: str, text: str) -> Any:
    """Take text settings as written, and parse numbers, booleans and lists as YAML.

    An empty value is null, except for secrets: an empty API key must not silently remove the protection.
    """
    if is_text(key):
        nothing = ("null", "~") if key in SECRET_KEYS else ("", "null", "~")
        return None if text in nothing and is_nullable(key) else text
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key} is {text!r}, which is not valid YAML") from error
    except RecursionError:
        raise ConfigError(f"{key} is not valid YAML: nested too deeply") from None


def _variable(key: str) -> str:
    return ENV_PREFIX + key.replace(".", "__").upper() + ("__..." if key in SECTIONS else "")


def _flatten(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values. Descends into known sections only, and skips empty ones."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key not in SECTIONS:
            yield key, value
        elif isinstance(value, Mapping):
            yield from _flatten(value, f"{key}.")
        elif value is not None:
            yield key, value


def _find_problem(key: str, value: Any) -> str | None:
    if key in SECTIONS:
        return f"{key} is {value!r}, but it is a section: put its keys below it"
    return None if key in KEYS else f"unknown key {key}: {suggest(key)}"


def _find_lines(node: yaml.Node | None, prefix: str, lines: dict[str, int]) -> Iterator[str]:
    """Fill `lines` with the line of every key that `_flatten` finds; yield keys that are set twice."""
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

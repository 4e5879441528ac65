"""Merges the sources of settings, validates the result, and explains what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import Repr
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from cllm.config.errors import REDACTED, InvalidConfigError, as_yaml
from cllm.config.keys import KEYS, SECRET_KEYS, holds_objects, is_nullable
from cllm.config.model_entry import SHARED_KEYS, ModelEntry, find_name_clashes
from cllm.config.schema import Config
from cllm.config.sources import InvalidSetting, Setting, read_environment, read_file, read_overrides

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_SHORT = Repr()  # a value may be a whole prompt: show its beginning and end
_SHORT.maxstring = 60


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    config: Config
    sources: dict[str, str]
    """For every key: "default", "file PATH", "env NAME" or "flag"."""


def load_config(
    file: Path | None = None, overrides: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ
) -> LoadedConfig:
    """Defaults < `file` < `environ` < `overrides` (dotted keys). Raises `ConfigError` naming every problem."""
    settings: dict[str, Setting] = {}
    problems: list[str] = []
    for found in (*(read_file(file) if file else ()), *read_environment(environ), *read_overrides(overrides or {})):
        if isinstance(found, InvalidSetting):
            problems.append(found.problem)
        else:
            settings[found.key] = found
    config = _validated(settings, problems)
    if config is not None:
        problems += _check_entries(config)
    if problems or config is None:
        raise InvalidConfigError(problems)
    return LoadedConfig(config, {key: settings[key].source if key in settings else "default" for key in KEYS})


def _check_entries(config: Config) -> list[str]:
    problems: list[str] = []
    backends: list[str] = []
    for number, entry in enumerate(config.models):
        backend = config.backend.type
        try:
            backend = config_of(config, entry).backend.type
        except InvalidConfigError as error:
            problems += [f"models[{number}]: {problem}" for problem in error.problems]
        backends.append(backend)
    return problems + find_name_clashes(config.models, backends)


def config_of(config: Config, entry: ModelEntry) -> Config:
    """The configuration of one of several models: the common settings, overridden by its own."""
    common = config.model_dump(exclude_unset=True, exclude={"model", "models"})
    settings: dict[str, Setting] = {}
    problems: list[str] = []
    for tree, origin in ((common, "for all models"), (entry.overrides(), entry.name)):
        for found in read_overrides(tree):
            if isinstance(found, InvalidSetting):
                problems.append(found.problem)
            elif tree is not common and found.key in SHARED_KEYS:
                shown = as_yaml(found.value)
                problems.append(
                    f"{found.key} is {shown} ({origin}): it applies to all models, so set it outside of models"
                )
            else:
                settings[found.key] = replace(found, origin=origin)
    validated = _validated(settings, problems)
    if problems or validated is None:
        raise InvalidConfigError(problems)
    return validated


def _validated(settings: Mapping[str, Setting], problems: list[str]) -> Config | None:
    """None if it is invalid; the reasons are added to `problems`."""
    origins = {key: settings[key].origin if key in settings else "default" for key in KEYS}
    try:
        return Config.model_validate(_nest(settings), context={"origins": origins})
    except ValidationError as error:
        problems += [_explain(detail, settings) for detail in error.errors(include_url=False)]
    except InvalidConfigError as error:
        problems += error.problems
    return None


def _nest(settings: Mapping[str, Setting]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, setting in settings.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = setting.value
    return tree


def _explain(detail: ErrorDetails, settings: Mapping[str, Setting]) -> str:
    path = [str(part) for part in detail["loc"]]
    if path[0] == "models" and len(path) > 1:
        return _explain_entry(detail, settings["models"])
    key = next(key for end in range(len(path), 0, -1) if (key := ".".join(path[:end])) in settings)
    inner = detail["loc"][len(key.split(".")) :]
    if inner and holds_objects(key):
        place = key + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inner)
        return f"{place} is {_SHORT.repr(detail['input'])} ({settings[key].origin}): it must be {_wanted(detail)}"
    value = settings[key].value
    # Keys written where the path of their file belongs are secrets, too.
    secret = (key in SECRET_KEYS and str(value).strip()) or (key == "server.api_keys" and not isinstance(value, str))
    shown = REDACTED if secret else repr(value) if isinstance(value, str) else as_yaml(value)
    wanted = _wanted(detail)
    if len(path) > len(key.split(".")):
        wanted = f"a list in which each item is {wanted}"
    if is_nullable(key):
        wanted += " or null"
    default = as_yaml(KEYS[key].default)
    return f"{key} is {shown} ({settings[key].origin}): it must be {wanted} (default {default})"


def _explain_entry(detail: ErrorDetails, setting: Setting) -> str:
    """Explain an error in an entry of `models`."""
    _, number, *names = detail["loc"]
    field = f"models[{number}]" + "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names)
    if detail["type"] == "extra_forbidden":
        return f"unknown key {field} ({setting.origin}): choose from {', '.join(ModelEntry.model_fields)}"
    if detail["type"] == "missing":
        return f"{field} is missing ({setting.origin}): every model needs a name"
    value = detail["input"]
    shown = repr(value) if isinstance(value, str) else as_yaml(value)
    wanted = "a name, or an object with a name and settings" if not names else _wanted(detail)
    return f"{field} is {shown} ({setting.origin}): it must be {wanted}"


_TYPES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string (put it in quotes)",
    "path_type": "a path",
    "tuple_type": "a list such as [a, b]",
    "dict_type": "an object of settings and values",
    "string_too_short": "a non-empty string",
    "too_short": "a non-empty list",
    "model_type": "a string or an object",
    "extra_forbidden": "removed: there is no such key",
    "missing": "given",
}
_LIMITS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def _wanted(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in _LIMITS:
        words, limit = _LIMITS[kind]
        bound = context[limit]
        return f"{words} {bound if isinstance(bound, int) else format(bound, 'g')}"
    if kind == "literal_error":
        return str(context["expected"]).replace("'", "")
    if kind == "string_pattern_mismatch":
        return f"a string that matches {context['pattern']}"
    if kind == "pattern":
        return detail["msg"]
    return _TYPES.get(kind, detail["msg"].lower())

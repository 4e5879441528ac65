"""Errors in a configuration, and values as YAML for their messages."""

from __future__ import annotations

from collections.abc import Sequence

from cllm.errors import ConfigError

REDACTED = "********"
"""Shown instead of a secret."""


class InvalidConfigError(ConfigError):
    """Every problem of a configuration, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


def as_yaml(value: object) -> str:
    """A value as a YAML file would have it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return repr(list(value)) if isinstance(value, tuple) else str(value)

"""How a wrong configuration is reported."""

from __future__ import annotations

from collections.abc import Sequence

from cllm.errors import ConfigError

HIDDEN = "********"
"""Shown instead of a secret."""


class InvalidConfigError(ConfigError):
    """All that is wrong with a configuration, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


def as_written(value: object) -> str:
    """A value the way a YAML file has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return repr(list(value)) if isinstance(value, tuple) else str(value)

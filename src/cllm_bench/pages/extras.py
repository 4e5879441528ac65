"""Checks before the work begins: packages that a default install lacks, and files that cannot be written."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from cllm.errors import CLLMError
from cllm.machine import install_extra


def check_extra(module: str, what: str, extra: str = "bench") -> None:
    if find_spec(module) is None:
        raise CLLMError(f"{what} needs {module}; install it with: {install_extra(extra)}")


def check_report(directory: Path | None) -> Path | None:
    """For the option --report."""
    if directory is not None:
        check_extra("matplotlib", "--report")
    return directory

"""The command that installs missing packages into the Python that runs this. cLLM itself is on no package index."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[3]


def install_extra(extra: str) -> str:
    """In a checkout with its own script, elsewhere with pip and what the extra consists of."""
    script = _CHECKOUT / "scripts" / "install.py"
    if script.is_file():
        return shlex.join([_shown(sys.executable), _shown(str(script)), extra])
    return install_packages(*_requirements(extra))


def install_packages(*requirements: str) -> str:
    return shlex.join([_shown(sys.executable), "-m", "pip", "install", *requirements])


def _requirements(extra: str) -> list[str]:
    declared: list[str] = []
    with suppress(importlib.metadata.PackageNotFoundError):
        declared = importlib.metadata.requires("cllm") or []
    pattern = re.compile(rf"extra == ['\"]{re.escape(extra)}['\"]")
    return [line.partition(";")[0].strip() for line in declared if pattern.search(line.partition(";")[2])]


def _shown(path: str) -> str:
    """Relative to the working directory if it lies in it. A virtual environment's Python is a link: not resolved."""
    with suppress(OSError, ValueError):
        if (here := Path.cwd()) != Path("/"):
            return str(Path(path).relative_to(here))
    return path

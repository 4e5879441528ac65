"""The npm package `openai`, installed once into pytest's cache."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

PACKAGE = "openai@6"


def node_environment(config: pytest.Config) -> dict[str, str]:
    """In which node finds the package."""
    assert config.cache is not None
    directory = config.cache.mkdir(PACKAGE.replace("@", "-"))
    modules = directory / "node_modules"
    if not modules.is_dir():
        with TemporaryDirectory(dir=directory) as draft:
            install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", draft, PACKAGE]
            ran = subprocess.run(install, capture_output=True, text=True, timeout=120, check=False)
            assert ran.returncode == 0, ran.stderr
            with suppress(OSError):  # somebody else was faster
                (Path(draft) / "node_modules").rename(modules)
    return {**os.environ, "NODE_PATH": str(modules)}

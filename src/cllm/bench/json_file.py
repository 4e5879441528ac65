"""The files that `--json` names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cllm.bench.http import BenchError


def check_writable(file: Path) -> None:
    """Before minutes are spent. A file that is there stays as it is."""
    was_there = file.exists()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab"):
            pass
        if not was_there:
            file.unlink()
    except OSError as error:
        raise _unwritable(file, error) from error


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise _unwritable(file, error) from error


def _unwritable(file: Path, error: OSError) -> BenchError:
    return BenchError(f"cannot write {file}: {error.strerror or error}")

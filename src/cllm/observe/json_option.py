"""`--json -` for commands that also print: only the JSON goes to stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ParamSpec

P = ParamSpec("P")
_NAME = "cllm-to-stdout.json"


def only_json(command: Callable[P, None]) -> Callable[P, None]:
    """Decorates a command that has the option `json`. With `-`, what it prints goes to stderr, and the JSON file it
    writes (however often) to stdout when it ends."""

    @wraps(command)
    def run(*args: P.args, **options: P.kwargs) -> None:
        if options.get("json") != Path("-"):
            command(*args, **options)
            return
        stdout = sys.stdout
        with TemporaryDirectory(prefix="cllm-") as directory, redirect_stdout(sys.stderr):
            file = Path(directory) / _NAME
            options["json"] = file
            try:
                command(*args, **options)
            finally:
                if file.exists():
                    print(file.read_text(encoding="utf-8"), end="", file=stdout, flush=True)

    return run


def goes_to_stdout(file: Path) -> bool:
    """Whether this file will be copied to stdout."""
    return file.name == _NAME

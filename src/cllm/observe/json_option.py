"""`--json FILE`, the same in every command: checked before the work begins, missing directories are created, `-` is
stdout, and then nothing else is."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, ParamSpec

import typer

from cllm.errors import CLLMError

P = ParamSpec("P")
_NAME = "cllm-to-stdout.json"


def is_stdout(file: Path | None) -> bool:
    return file == Path("-")


def check_writable(option: str, file: Path | None) -> None:
    """Creates the directory of the file. Pipes and devices are not tried."""
    if file is None or (file.exists() and not file.is_file() and not file.is_dir()):
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        is_new = not file.exists()
        file.open("ab").close()
        if is_new:
            file.unlink()
    except OSError as error:
        raise CLLMError(f"{option}: cannot write {file}: {error.strerror or error}") from error


def _check(file: Path | None) -> Path | None:
    if not is_stdout(file):
        check_writable("--json", file)
    return file


JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        callback=_check,
        help="Write the results as JSON to FILE (- for stdout).",
        show_default=False,
    ),
]


def write_json(file: Path, data: object) -> None:
    text = json.dumps(data, indent=2, ensure_ascii=False)
    if is_stdout(file):
        print(text)
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise CLLMError(f"cannot write {file}: {error.strerror or error}") from error


def write_or_show(file: Path | None, data: object, show: Callable[[], None]) -> None:
    """The results of a command: as JSON if that was asked for, and for people unless stdout has the JSON."""
    if file:
        write_json(file, data)
    if not is_stdout(file):
        show()


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

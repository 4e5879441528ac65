"""JSON files that came with a model: of bounded size, without a key twice, one line for whatever is wrong."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from cllm.errors import ModelError
from cllm.models.gguf_header import short

AGAIN = "fetch the model again"


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; whoever put a pipe or a device in its place would have us wait for ever."""
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "it is no regular file")
    return os.fdopen(number, "rb")


def read_text(path: Path, most_bytes: int) -> str | None:
    """The file's text, or None if there is no such file."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > most_bytes:
                raise ModelError(
                    f"{path}: has more than {most_bytes >> 10} KiB, so it is not what it should be; {AGAIN}"
                )
            return file.read(most_bytes + 1).decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error}); {AGAIN}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: is not UTF-8 text; {AGAIN}") from error


def read_json(path: Path, most_bytes: int) -> dict[str, Any] | None:
    """The file's object, or None if there is no such file."""
    text = read_text(path, most_bytes)
    return None if text is None else parse_json(text, path)


def parse_json(text: str | bytes, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is no JSON ({str(error) or 'nested too deeply'}); {AGAIN}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: holds {short(found)}, not an object; {AGAIN}")
    return found


def _without_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {short(key)} occurs twice")
        found[key] = value
    return found


class Fields:
    """The values of one JSON object, given out only as what they should be."""

    def __init__(self, path: Path, values: dict[str, Any], inside: str = "") -> None:
        """`inside` is the name of the object, if it is not the whole file."""
        self.path = path
        self.values = values
        self._prefix = f"{inside}." if inside else ""

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def size(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if type(value) is not int or not 0 < value < 2**31:
            raise self.wrong(key, "a usable size")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or not value > 0:
            raise self.wrong(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if type(value) is not str:
            raise self.wrong(key, "text")
        return value

    def part(self, key: str) -> Fields | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Fields(self.path, value, self._prefix + key)

    def wrong(self, key: str, wanted: str) -> ModelError:
        return ModelError(f"{self.path}: {self._prefix}{key} is {short(self.values.get(key))}, not {wanted}; {AGAIN}")

    def refusal(self, key: str, reason: str) -> ModelError:
        """For a value that is right, but asks for something we do not do."""
        return ModelError(
            f"{self.path}: {self._prefix}{key} is {short(self.values.get(key))}, {reason}; "
            "give another model, or a .gguf file of this one with --backend llama_cpp"
        )

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.path}: {self._prefix}{key} is missing; {AGAIN}")
        return value

"""JSON files of a model, read safely: with a size limit, without duplicate keys, and with errors of one line."""

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

FETCH_AGAIN = "download the model again"


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; a pipe or device could block forever."""
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(number, "rb")


def read_text(path: Path, most_bytes: int) -> str | None:
    """The file's text, or None if there is no such file."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > most_bytes:
                raise ModelError(f"{path}: is larger than {most_bytes >> 10} KiB, so it cannot be right; {FETCH_AGAIN}")
            return file.read(most_bytes + 1).decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror or error}); {FETCH_AGAIN}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: is not UTF-8 text; {FETCH_AGAIN}") from error


def read_json(path: Path, most_bytes: int) -> dict[str, Any] | None:
    """The file's object, or None if there is no such file."""
    text = read_text(path, most_bytes)
    return None if text is None else parse_json(text, path)


def parse_json(text: str | bytes, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not valid JSON ({str(error) or 'nested too deeply'}); {FETCH_AGAIN}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: contains {short(found)}, not an object; {FETCH_AGAIN}")
    return found


def _without_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {short(key)} occurs twice")
        found[key] = value
    return found


class Fields:
    """The values of a JSON object, with type checks."""

    def __init__(self, path: Path, values: dict[str, Any], inside: str = "") -> None:
        """`inside`: the name of the object, if it is not the whole file."""
        self.path = path
        self.values = values
        self._prefix = f"{inside}." if inside else ""

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def size(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if type(value) is not int or not 0 < value < 2**31:
            raise self.invalid(key, "a valid size")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or not value > 0:
            raise self.invalid(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.invalid(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if type(value) is not str:
            raise self.invalid(key, "a string")
        return value

    def numbers(self, key: str, count: int) -> list[float]:
        value = self._get(key, None)
        if not isinstance(value, list) or len(value) != count:
            raise self.invalid(key, f"a list of {count} numbers")
        return [Fields(self.path, {key: each}, self._prefix[:-1]).number(key) for each in value]

    def part(self, key: str) -> Fields | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.invalid(key, "an object")
        return Fields(self.path, value, self._prefix + key)

    def invalid(self, key: str, wanted: str) -> ModelError:
        return ModelError(
            f"{self.path}: {self._prefix}{key} is {short(self.values.get(key))}, not {wanted}; {FETCH_AGAIN}"
        )

    def unsupported(self, key: str, reason: str) -> ModelError:
        """For a valid value that is not supported."""
        return ModelError(
            f"{self.path}: {self._prefix}{key} is {short(self.values.get(key))}, {reason}; "
            "use another model, or a .gguf file of this one with --backend llama_cpp"
        )

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.path}: {self._prefix}{key} is missing; {FETCH_AGAIN}")
        return value

"""What a worker process may be asked to do: in tests, everything that must not harm the server."""

from __future__ import annotations

import os
import signal
import time

from cllm.errors import InvalidRequestError
from cllm.work import process

_held: list[bytes] = []


def add(one: int, other: int) -> int:
    return one + other


def echo(data: bytes) -> bytes:
    return data


def spin(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def allocate(size: int) -> int:
    return len(bytes(size))


def keep(size: int) -> int:
    """And never give back."""
    _held.append(b"x" * size)
    return os.getpid()


def double() -> None:
    text = "x"
    while True:
        text += text


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def recurse() -> None:
    recurse()


def refuse() -> None:
    raise ValueError("makes no sense")


def refuse_by_name() -> None:
    raise InvalidRequestError("x is wrong", "x", "code_x")


def fail() -> None:
    raise KeyError("surprise")


def pid() -> int:
    return os.getpid()


def no_json() -> object:
    return object()


def load(text: str) -> str:
    if text == "broken":
        raise OSError("no such file")
    return f"loaded {text}"


def loaded() -> list[object]:
    return [process.loaded, os.getppid()]


def variables() -> list[str]:
    return sorted(os.environ)


def large(size: int) -> bytes:
    return bytes(size)

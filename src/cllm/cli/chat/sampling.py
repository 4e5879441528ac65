"""The sampling parameters that `/set` changes, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cllm.engine.params import ContextWindow, SamplingParams
from cllm.errors import InvalidRequestError

_NUMBERS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("max_tokens", "min_tokens", "seed"),
)
NAMES = (*_NUMBERS, "stop", "context_window")
RESET = "default"
OFF = "off"


def parse(name: str, text: str) -> Any:
    """Parse the value of a parameter. `validate` checks the ranges of all of them together."""
    check_name(name)
    if name == "stop":
        return (text,)
    if name == "context_window" and text == OFF:
        return None
    value: Any = _number(name, text)
    return ContextWindow(value) if name == "context_window" else value


def check_name(name: str) -> None:
    if name not in NAMES:
        raise InvalidRequestError(f"unknown parameter {name}; choose from {', '.join(NAMES)}", name)


def _number(name: str, text: str) -> int | float:
    try:
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError:
        raise InvalidRequestError(f"{name} is {text!r}; it must be a number, or {RESET}", name) from None


def validate(given: Mapping[str, Any]) -> SamplingParams:
    """Build the sampling parameters. Raises `InvalidRequestError` for an invalid value."""
    seed = given.get("seed")
    if seed is not None and (type(seed) is not int or not -(2**63) <= seed < 2**63):
        raise InvalidRequestError(f"seed is {seed!r}; it must be a whole number", "seed")
    return SamplingParams.with_model_defaults(**given)


def as_json(given: Mapping[str, Any]) -> dict[str, Any]:
    shown = dict(given)
    window = shown.get("context_window")
    if isinstance(window, ContextWindow):
        shown["context_window"] = {"recent": window.recent, "keep": window.keep}
    return shown


def from_json(found: object) -> dict[str, Any]:
    """Settings from a file. Raises `InvalidRequestError`."""
    if not isinstance(found, dict):
        raise InvalidRequestError("settings must be an object", "settings")
    given = dict(found)
    for name in given:
        check_name(name)
    window = given.get("context_window")
    if isinstance(window, dict) and set(window) <= {"recent", "keep"} and "recent" in window:
        given["context_window"] = ContextWindow(**window)
    elif window is not None:
        raise InvalidRequestError(f"context_window is {window!r}; it must have recent and keep", "context_window")
    stop = given.get("stop", ())
    if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) for text in stop):
        raise InvalidRequestError("stop must be a list of strings", "stop")
    validate(given)
    return given

"""Sampling from a row of logits: by the native extension if it is built, else by the numpy code of draw.py."""

from __future__ import annotations

from typing import Protocol

from cllm.engine import draw
from cllm.engine.draw import Ids, Mask, Row
from cllm.errors import ConfigError


class RowSampler(Protocol):
    """draw.py documents the functions. A row's result depends on the row and the arguments alone.

    Two samplers may differ by rounding: if `u` is within a millionth of the border between two tokens, or a token that
    close to being cut off.
    """

    def argmax(self, values: Row) -> int: ...

    def masked(self, values: Row, mask: Mask) -> Row: ...

    def draw(
        self, values: Row, peak: float, u: float, *, temperature: float, top_k: int, top_p: float, min_p: float
    ) -> int: ...

    def log_total(self, values: Row, peak: float) -> float: ...

    def largest(self, values: Row, count: int) -> Ids: ...


def fastest_sampler(instruction_set: str = "auto") -> RowSampler:
    """The native one with kernels for `backend.native.instruction_set`, if it is built."""
    try:
        from cllm._native import RowSampler as NativeRowSampler
    except ImportError:
        return draw
    try:
        return NativeRowSampler(instruction_set)
    except ValueError as error:
        raise ConfigError(f"backend.native.{error}") from error  # the message starts with the setting


DEFAULT_SAMPLER = fastest_sampler()
"""Used unless another one is passed."""

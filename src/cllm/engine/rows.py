"""What works on rows of logits: the native extension where it is built, the numpy code of draw.py where it is not."""

from __future__ import annotations

from typing import Protocol

from cllm.engine import draw
from cllm.engine.constraint import Mask
from cllm.engine.draw import Ids, Row
from cllm.errors import ConfigError


class RowSampler(Protocol):
    """draw.py says what the functions mean. A row's result depends on nothing but the row and the arguments.

    Two samplers may differ where rounding decides: if `u` is within a millionth of a border between two tokens, or a
    token that close to being cut off.
    """

    def argmax(self, values: Row) -> int: ...

    def masked(self, values: Row, mask: Mask) -> Row: ...

    def draw(
        self, values: Row, peak: float, u: float, *, temperature: float, top_k: int, top_p: float, min_p: float
    ) -> int: ...

    def log_total(self, values: Row, peak: float) -> float: ...

    def largest(self, values: Row, count: int) -> Ids: ...


def fastest(instruction_set: str = "auto") -> RowSampler:
    """The best there is; of the extension, the kernels of `backend.native.instruction_set`."""
    try:
        from cllm._native import RowSampler as NativeRowSampler
    except ImportError:
        return draw
    try:
        return NativeRowSampler(instruction_set)
    except ValueError as error:
        raise ConfigError(f"backend.native.{error}") from error  # it begins with the setting


ROWS = fastest()
"""What is used where nothing else is asked for."""

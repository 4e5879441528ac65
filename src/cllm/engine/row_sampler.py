"""Drawing tokens from rows of logits, which the native extension does."""

from __future__ import annotations

from cllm.errors import ConfigError

try:
    from cllm._native import RowSampler
except ImportError as error:
    raise ImportError(f"cLLM's extension does not load ({error}); reinstall cLLM") from error

__all__ = ["DEFAULT_SAMPLER", "RowSampler", "open_sampler"]


def open_sampler(instruction_set: str) -> RowSampler:
    """With kernels for `backend.native.instruction_set`."""
    try:
        return RowSampler(instruction_set)
    except ValueError as error:
        raise ConfigError(f"backend.native.{error}") from error  # the message starts with the setting


DEFAULT_SAMPLER = RowSampler("auto")
"""Used unless another one is passed."""

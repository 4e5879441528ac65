"""cLLM: an LLM inference server built around its KV cache.

`from cllm import LLM, SamplingParams`
"""

from __future__ import annotations

TYPE_CHECKING = False  # the module typing takes as long to import as Python takes to start

if TYPE_CHECKING:
    from typing import Any

    from cllm.engine.params import ContextWindow, SamplingParams
    from cllm.llm import AsyncLLM
    from cllm.offline import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "ContextWindow", "SamplingParams"]

_HOMES = {
    "LLM": "cllm.offline",
    "AsyncLLM": "cllm.llm",
    "ContextWindow": "cllm.engine.params",
    "SamplingParams": "cllm.engine.params",
}


def __getattr__(name: str) -> Any:
    """Imports heavy modules on first use, so that `cllm --help` is fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cllm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)

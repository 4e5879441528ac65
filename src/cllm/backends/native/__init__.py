"""Our own engine: the C++ of csrc/, over blocks of K/V memory.

loader.py    a GGUF file into the engine's packed weights; what it cannot run, and why
backend.py   the Backend: chunks into arrays, one call a step
"""

from cllm.backends.native.backend import NativeBackend
from cllm.backends.native.loader import unsupported

__all__ = ["NativeBackend", "unsupported"]

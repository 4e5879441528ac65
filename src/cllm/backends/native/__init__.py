"""Our own engine: the C++ of csrc/, over blocks of K/V memory.

loader.py    loads a GGUF file into the engine's packed weights; says what it cannot run, and why
sizes.py     how much memory packed weights take
backend.py   the Backend: chunks to arrays, one call per step
"""

from cllm.backends.native.backend import NativeBackend
from cllm.backends.native.loader import unsupported

__all__ = ["NativeBackend", "unsupported"]

"""llama.cpp through llama-cpp-python's low-level API.

library.py   the shared library, bound for long and for short calls; its log
model.py     the weights, and the model's shape
batch.py     one llama_batch over numpy arrays; how llama.cpp will cut it
context.py   one llama_context: decode, logits, abort
slots.py     memory operations on sequences
state.py     the form in which a sequence is saved
backend.py   the Backend that ties them together
"""

from cllm.backends.llama_cpp.backend import LlamaCppBackend

__all__ = ["LlamaCppBackend"]

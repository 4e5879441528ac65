"""llama.cpp through its C API. All that this project does with it goes through library.py.

discovery.py     which package has the library: llama-cpp-python or xllamacpp
declarations.py  what we call of llama.h
layouts.py       its structs of parameters, which differ between versions, and how to tell
library.py       the shared library, checked, bound for long and for short calls; its log
model.py         the weights, and the model's sizes
batch.py         one llama_batch over numpy arrays; how llama.cpp will cut it
context.py       one llama_context: decode, logits, abort
slots.py         memory operations on sequences
state.py         the form in which a sequence is saved
backend.py       the Backend that ties them together
"""

from cllm.backends.llama_cpp.backend import LlamaCppBackend

__all__ = ["LlamaCppBackend"]

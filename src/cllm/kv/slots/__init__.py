"""The KV cache of a backend that keeps whole sequences in numbered slots (llama.cpp)."""

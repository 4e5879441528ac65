"""The KV cache: who holds which memory, what is shared, what goes first. Knows nothing of models or requests."""

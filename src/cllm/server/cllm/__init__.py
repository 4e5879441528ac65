"""cLLM's own endpoints: generate, tokenize, operations, models, warm prefixes."""

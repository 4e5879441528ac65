"""The HTTP face: OpenAI's API, cLLM's own, and operations."""

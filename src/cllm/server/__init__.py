"""The HTTP server: OpenAI's, Anthropic's and Ollama's APIs, cLLM's own, and a page."""

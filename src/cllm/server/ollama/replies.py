"""Replies of Ollama's API as models, for the API's description."""

from __future__ import annotations

from pydantic import BaseModel


class OllamaError(BaseModel):
    error: str

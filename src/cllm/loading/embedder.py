"""Embeddings and ranks from a loaded model, and why it has none if so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cllm.engine.params import SamplingParams
from cllm.engine.reading import PromptPooling
from cllm.errors import InvalidRequestError
from cllm.loading.facts import ModelFacts
from cllm.text.rerank import PairEncoder
from cllm.text.tokenizer import Tokenizer

EMBEDDING = SamplingParams(max_tokens=0, context_window=None)
"""Parameters of a request that only embeds its prompt."""


@dataclass(frozen=True, slots=True)
class Embedder:
    name: str
    """The model's, as clients know it."""
    facts: ModelFacts
    tokenizer: Tokenizer
    text_end: Sequence[int] = ()
    """Tokens that the model expects after a text to embed."""
    pairs: PairEncoder | None = None
    """Encodes a query with a document, if the model is a reranker."""

    @property
    def no_embeddings(self) -> str | None:
        """Why the model cannot embed texts; None if it can."""
        traits = self.facts.traits
        if traits.pooling is None or traits.no_reading is not None:
            return traits.no_reading or f"{traits.name} makes no embeddings"
        return f"{self.name} ranks documents and makes no embeddings: use /v1/rerank" if traits.ranks else None

    @property
    def no_ranking(self) -> str | None:
        """Why the model cannot rank documents; None if it can."""
        if self.pairs is not None:
            return None
        return f"{self.name} cannot rank documents (its pooling_type is not rank); serve a reranker"

    def encode_text(self, text: str) -> list[int]:
        return [*self.tokenizer.encode(text), *self.text_end]

    def encode_pair(self, query: str, document: str) -> list[int]:
        if self.pairs is None:
            raise InvalidRequestError(self.no_ranking or "", "model")
        return self.pairs(query, document)

    def pooling(self) -> PromptPooling:
        """For one request: an embedding, or a rank."""
        traits = self.facts.traits
        if traits.pooling is None:
            raise InvalidRequestError(self.no_embeddings or "", "model")
        return PromptPooling(traits.pooling, ranks=traits.ranks)

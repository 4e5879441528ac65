"""Everything that turns requests into tokens and tokens into text. It needs the model's file, but not its weights, so
that an ingress can prepare requests for models that run elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from cllm.config import Config
from cllm.dialect.dialect import Dialect, dialect_of
from cllm.loading.embedder import Embedder
from cllm.loading.facts import ModelFacts
from cllm.loading.open_model import OpenedText, TokenizerCache, open_text
from cllm.loading.sampling_defaults import SamplingDefaults
from cllm.loading.windows import Windows
from cllm.structured.compiler import Compiler
from cllm.structured.vocabulary import Vocabulary
from cllm.text.chat_template import ChatTemplate
from cllm.text.tokenizer import Tokenizer


@dataclass(slots=True)
class TextParts:
    facts: ModelFacts
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    dialect: Dialect
    embedder: Embedder
    compiler: Compiler
    sampling: SamplingDefaults
    windows: Windows

    def close(self) -> None:
        """Calling it again does nothing."""
        self.compiler.close()


def build_text_parts(config: Config, opened: OpenedText, facts: ModelFacts, cache: TokenizerCache) -> TextParts:
    """Raises `ConfigError`."""
    public_name = config.model.alias or facts.name
    return TextParts(
        facts=facts,
        tokenizer=opened.tokenizer,
        chat_template=opened.chat_template,
        dialect=dialect_of(opened.chat_template, opened.tokenizer, config.chat),
        embedder=Embedder(public_name, facts, opened.tokenizer, opened.text_end, opened.pairs),
        compiler=Compiler(_vocabulary(opened.tokenizer, facts.shape.n_vocab, cache), config.structured),
        sampling=opened.sampling,
        windows=Windows(config.kv.window, facts),
    )


def load_text_parts(config: Config, facts: ModelFacts) -> TextParts:
    """For a model that runs elsewhere, and has told its facts. Raises `ModelError` or `ConfigError`."""
    cache = TokenizerCache()
    return build_text_parts(config, open_text(config, cache), facts, cache)


def _vocabulary(tokenizer: Tokenizer, size: int, cache: TokenizerCache) -> Vocabulary:
    if cache.vocabulary is None or cache.vocabulary.tokenizer is not tokenizer:
        cache.vocabulary = Vocabulary(tokenizer, size)
    return cache.vocabulary

"""Everything that turns requests into tokens and tokens into text. It needs the model's file, but not its weights, so
that an ingress can prepare requests for models that run elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from cllm.config import Config
from cllm.dialect.dialect import Dialect
from cllm.loading.embedder import Embedder
from cllm.loading.facts import ModelFacts
from cllm.loading.open_model import OpenedText, TokenizerCache, open_text
from cllm.loading.sampling_defaults import SamplingDefaults
from cllm.loading.text_work import TextWork, examine_template
from cllm.loading.windows import Windows
from cllm.structured.compiler import Compiler
from cllm.structured.vocabulary import Vocabulary
from cllm.text.template_source import TemplateSource
from cllm.text.tokenizer import Tokenizer
from cllm.work.pool import Workers


@dataclass(slots=True)
class TextParts:
    facts: ModelFacts
    tokenizer: Tokenizer
    chat_template: TemplateSource
    dialect: Dialect
    work: TextWork
    embedder: Embedder
    compiler: Compiler
    sampling: SamplingDefaults
    windows: Windows

    def close(self) -> None:
        """Calling it again does nothing."""
        self.compiler.close()
        self.work.close()


def build_text_parts(
    config: Config, opened: OpenedText, facts: ModelFacts, cache: TokenizerCache, workers: Workers
) -> TextParts:
    """On another thread than the event loop's. Raises `ModelError` or `ConfigError`."""
    public_name = config.model.alias or facts.name
    dialect = Dialect(examine_template(opened.chat_template, workers), opened.tokenizer, config.chat)
    n_vocab = facts.spec.n_vocab
    work = TextWork(config, workers, opened.tokenizer, opened.chat_template, dialect, opened.model, n_vocab)
    return TextParts(
        facts=facts,
        tokenizer=opened.tokenizer,
        chat_template=opened.chat_template,
        dialect=dialect,
        work=work,
        embedder=Embedder(public_name, facts, opened.tokenizer, opened.text_end, opened.pairs),
        compiler=Compiler(_vocabulary(opened.tokenizer, n_vocab, cache), config.structured, work.try_structure),
        sampling=opened.sampling,
        windows=Windows(config.kv.window, facts),
    )


def load_text_parts(config: Config, facts: ModelFacts, workers: Workers) -> TextParts:
    """For a model that runs elsewhere, and has told its facts. Raises `ModelError` or `ConfigError`."""
    cache = TokenizerCache()
    return build_text_parts(config, open_text(config, cache), facts, cache, workers)


def _vocabulary(tokenizer: Tokenizer, size: int, cache: TokenizerCache) -> Vocabulary:
    if cache.vocabulary is None or cache.vocabulary.tokenizer is not tokenizer:
        cache.vocabulary = Vocabulary(tokenizer, size)
    return cache.vocabulary

"""What worker processes load of a model to tokenise large texts and to compile large grammars, and what they do with
it."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cllm.config import Config
from cllm.dialect.dialect import Dialect
from cllm.dialect.grammar import AnswerForm
from cllm.errors import ModelError
from cllm.loading.open_model import TokenizerCache, open_text
from cllm.models.unchanged_file import FileStamp
from cllm.structured.building import Builder
from cllm.structured.structure import Structure
from cllm.structured.vocabulary import Vocabulary
from cllm.text.chat_template import ChatTemplate, PromptOptions
from cllm.text.template_source import TemplateSource
from cllm.text.tokenizer import Tokenizer, TokenLimit, encode_prompt
from cllm.text.volatile import VolatilePatterns
from cllm.work import process


@dataclass(frozen=True, slots=True)
class TextTools:
    tokenizer: Tokenizer
    template: ChatTemplate
    dialect: Dialect
    volatile: VolatilePatterns
    builder: Builder | None


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a text becomes tokens."""

    special: bool = False
    add_bos: bool = True
    whole_prompt: bool = False
    """It may have been made by a chat template: special tokens by name, and a single BOS."""
    most: int | None = None
    """Cut it to so many tokens,"""
    end: tuple[int, ...] = ()
    """the last of which are these."""

    def tokens(self, tokenizer: Tokenizer, text: str) -> list[int]:
        if self.whole_prompt:
            return encode_prompt(tokenizer, text)
        ids = tokenizer.encode(text, special=self.special, add_bos=self.add_bos)
        return [*(ids if self.most is None else ids[: max(self.most - len(self.end), 0)]), *self.end]

    def checked(self, tokenizer: Tokenizer, text: str, limit: TokenLimit, param: str) -> list[int]:
        limit.check_text(tokenizer, text, param, special=self.special or self.whole_prompt)
        ids = self.tokens(tokenizer, text)
        limit.check(ids, param)
        return ids


WHOLE_PROMPT = Encoding(whole_prompt=True)


def load(config: bytes, stamp: FileStamp | None, source: TemplateSource, n_vocab: int) -> TextTools:
    """`config`: pickled. `stamp`: of the model's file, which must be the one that the server has read."""
    settings: Config = pickle.loads(config)
    opened = open_text(settings, TokenizerCache())
    if stamp is not None and getattr(opened.model, "stamp", stamp) != stamp:
        raise ModelError(f"{settings.model.name} has changed since the server read it; restart the server")
    template = ChatTemplate.of(source)
    vocabulary = Vocabulary(opened.tokenizer, n_vocab)
    return TextTools(
        opened.tokenizer,
        template,
        Dialect(template.facts, opened.tokenizer, settings.chat),
        VolatilePatterns(settings.prompt.volatile_patterns),
        Builder(vocabulary) if vocabulary.tokens is not None else None,
    )


def encode_chat(messages: Sequence[Mapping[str, Any]], options: PromptOptions, limit: TokenLimit) -> bytes:
    tools = _tools()
    prepared, options = tools.dialect.prepare(tools.volatile.strip(messages), options)
    return _packed(tools.template.encode(tools.tokenizer, prepared, limit, options))


def encode_text(text: str, how: Encoding, limit: TokenLimit, param: str) -> bytes:
    return _packed(how.checked(_tools().tokenizer, text, limit, param))


def write_grammar(form: AnswerForm) -> str:
    return _tools().dialect.grammar(form)


def try_structure(structure: Structure) -> dict[str, Any]:
    builder = _tools().builder
    assert builder is not None
    return builder.try_out(structure)


def unpacked(data: bytes) -> list[int]:
    """The tokens that one of these made."""
    ids = array("i")
    ids.frombytes(data)
    return ids.tolist()


def _packed(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()


def _tools() -> TextTools:
    assert isinstance(process.loaded, TextTools)
    return process.loaded

"""Encodes a query and a document as one prompt, for rerankers."""

from __future__ import annotations

import re
from collections.abc import Callable

from cllm.models.gguf import GGUFModel
from cllm.text.tokenizer import Tokenizer

PairEncoder = Callable[[str, str], list[int]]

_PLACES = re.compile(r"(\{query\}|\{document\})")


def load_pair_encoder(model: GGUFModel, tokenizer: Tokenizer) -> PairEncoder:
    """By the model's rerank template, or as: BOS, query, EOS, separator, document, EOS."""
    template = model.get("tokenizer.chat_template.rerank", "")
    if template:
        return lambda query, document: _filled(template, tokenizer, query, document)
    before, between, after = _marks(model)
    encode = tokenizer.encode

    def pair(query: str, document: str) -> list[int]:
        return [*before, *encode(query, add_bos=False), *between, *encode(document, add_bos=False), *after]

    return pair


def _filled(template: str, tokenizer: Tokenizer, query: str, document: str) -> list[int]:
    """Names of special tokens in the query or document stay text."""
    ids: list[int] = []
    for part in _PLACES.split(template):
        if part == "{query}":
            ids += tokenizer.encode(query, add_bos=False)
        elif part == "{document}":
            ids += tokenizer.encode(document, add_bos=False)
        elif part:
            ids += tokenizer.encode(part, special=True, add_bos=False)
    return ids


def _marks(model: GGUFModel) -> tuple[list[int], list[int], list[int]]:
    def token(name: str) -> list[int]:
        found = model.get(f"tokenizer.ggml.{name}_token_id", -1)
        return [found] if found >= 0 else []

    begin = token("cls") or token("bos")
    separator = token("seperator") or token("separator")  # all converters use the first spelling
    if model.get("tokenizer.ggml.model", "") == "bert":
        return begin, separator, separator
    end = token("eos") or separator
    return begin, end + (separator if model.get("tokenizer.ggml.add_sep_token", True) else []), end

"""Sentencepiece BPE with byte fallback (Llama 2, Mistral) on the `tokenizers` library, equal to llama.cpp's.

Sentencepiece has no list of merges: two neighbours merge when together they are a token, best score first, leftmost
first among equals. The library wants ranked merges, so they are made from the vocabulary and its scores.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Tokenizer, models

from cllm.errors import ModelError
from cllm.models.gguf import GGUFModel
from cllm.text.bpe import Encoder
from cllm.text.vocab import TokenKind, Vocabulary

SPACE = "\u2581"
_BYTE_NAMES = [f"<0x{byte:02X}>" for byte in range(256)]
_MERGEABLE = frozenset({TokenKind.NORMAL, TokenKind.USER_DEFINED, TokenKind.UNUSED})


def is_byte(text: str) -> bool:
    """Whether this is the name of a byte."""
    return text in _BYTE_NAMES


def token_bytes(text: str, kind: TokenKind) -> bytes:
    """What an ordinary token of a sentencepiece vocabulary stands for."""
    if kind == TokenKind.BYTE:
        return bytes([_BYTE_NAMES.index(text)]) if text in _BYTE_NAMES else b""
    return text.encode() if kind == TokenKind.USER_DEFINED else text.replace(SPACE, " ").encode()


class Rules(NamedTuple):
    """How a sentencepiece vocabulary splits text."""

    size: int
    ids: dict[str, int]
    """Of the tokens that text may become, and of `parts`."""
    parts: list[str]
    """Characters that are no token by themselves, but part of one. Each has an id behind the vocabulary, and is spelt
    out in bytes if it is left alone."""
    byte_ids: list[int]
    merges: list[tuple[str, str]]
    prefix: str
    """What goes before every text."""

    def whole_merges(self) -> list[tuple[str, str]]:
        """Those that need no parts."""
        return [pair for pair in self.merges if all(self.ids[each] < self.size for each in pair)]


def read_rules(model: GGUFModel, vocab: Vocabulary) -> Rules:
    if any(name not in vocab.ids for name in _BYTE_NAMES):
        raise ModelError(f"{model.path}: its tokenizer lacks the byte tokens <0x00> to <0xFF>; give another model")
    ids = {text: i for i, text in enumerate(vocab.tokens) if vocab.kinds[i] in _MERGEABLE}
    size = len(vocab.tokens)
    parts = sorted({char for text in ids for char in text} - ids.keys())
    ids |= {char: size + n for n, char in enumerate(parts)}
    prefix = SPACE if model.get("tokenizer.ggml.add_space_prefix", True) else ""
    byte_ids = [vocab.ids[name] for name in _BYTE_NAMES]
    return Rules(size, ids, parts, byte_ids, _rank_merges(model, vocab, ids), prefix)


def build_encoder(model: GGUFModel, vocab: Vocabulary) -> Encoder:
    size, ids, parts, byte_ids, merges, prefix = read_rules(model, vocab)
    spelt = {size + n: [byte_ids[byte] for byte in char.encode()] for n, char in enumerate(parts)}
    known = ids | dict(zip(_BYTE_NAMES, byte_ids, strict=True))
    tokenizer = Tokenizer(models.BPE(vocab=known, merges=merges, byte_fallback=True))

    def encode(texts: list[str]) -> list[list[int]]:
        escaped = [prefix + text.replace(" ", SPACE) for text in texts]
        found = (each.ids for each in tokenizer.encode_batch_fast(escaped, add_special_tokens=False))
        return [[i for token in each for i in spelt.get(token, (token,))] for each in found]

    return encode


def _rank_merges(model: GGUFModel, vocab: Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    scores = model.numbers("tokenizer.ggml.scores", float) or [0.0] * len(vocab.tokens)
    if len(scores) < len(vocab.tokens):
        raise ModelError(
            f"{model.path}: has {len(vocab.tokens)} tokens but {len(scores)} scores; give another .gguf file"
        )
    # Runs of one character (spaces above all) often share one score. Leftmost first then means that a run grows
    # as long as it can before the next one begins: the longer token ranks higher.
    whole = [text for text, i in ids.items() if i < len(scores) and len(text) > 1]
    whole.sort(key=lambda text: (-scores[ids[text]], -len(text), ids[text]))
    return [
        (text[:cut], text[cut:])
        for text in whole
        for cut in range(len(text) - 1, 0, -1)
        if text[:cut] in ids and text[cut:] in ids
    ]

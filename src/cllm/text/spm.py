"""Sentencepiece BPE with byte fallback (Llama 2, Mistral) on the `tokenizers` library, equal to llama.cpp's.

Sentencepiece has no list of merges: two neighbours merge if together they are a token, best score first, leftmost first
among equals. The library needs ranked merges, so they are derived from the vocabulary and its scores.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Tokenizer, models

from cllm.errors import ModelError
from cllm.models.gguf import GGUFModel
from cllm.text.bpe import Encoder
from cllm.text.vocab import TokenKind, Vocabulary

SPACE = "\u2581"
BYTE_NAMES = [f"<0x{byte:02X}>" for byte in range(256)]
_MERGEABLE = frozenset({TokenKind.NORMAL, TokenKind.USER_DEFINED, TokenKind.UNUSED})


def token_bytes(text: str, kind: TokenKind) -> bytes:
    """The bytes of an ordinary token of a sentencepiece vocabulary."""
    if kind == TokenKind.BYTE:
        return bytes([BYTE_NAMES.index(text)]) if text in BYTE_NAMES else b""
    return text.encode() if kind == TokenKind.USER_DEFINED else text.replace(SPACE, " ").encode()


class Rules(NamedTuple):
    """How a sentencepiece tokenizer splits text."""

    size: int
    ids: dict[str, int]
    """Ids of the tokens that ordinary text may become, and of `parts`."""
    parts: list[str]
    """Characters that are only part of tokens. Each has an id after the vocabulary, and becomes byte tokens if left
    over."""
    byte_ids: list[int]
    merges: list[tuple[str, str]]
    prefix: str
    """Put before every text."""

    def whole_merges(self) -> list[tuple[str, str]]:
        """The merges that need no parts."""
        return [pair for pair in self.merges if all(self.ids[each] < self.size for each in pair)]


def read_rules(model: GGUFModel, vocab: Vocabulary) -> Rules:
    if any(name not in vocab.ids for name in BYTE_NAMES):
        raise ModelError(f"{model.path}: its tokenizer has no byte tokens <0x00> to <0xFF>; use another model")
    ids = {text: i for i, text in enumerate(vocab.tokens) if vocab.kinds[i] in _MERGEABLE}
    size = len(vocab.tokens)
    parts = sorted({char for text in ids for char in text} - ids.keys())
    ids |= {char: size + n for n, char in enumerate(parts)}
    prefix = SPACE if model.get("tokenizer.ggml.add_space_prefix", True) else ""
    byte_ids = [vocab.ids[name] for name in BYTE_NAMES]
    return Rules(size, ids, parts, byte_ids, _rank_merges(model, vocab, ids), prefix)


def build_encoder(model: GGUFModel, vocab: Vocabulary) -> Encoder:
    size, ids, parts, byte_ids, merges, prefix = read_rules(model, vocab)
    spelt = {size + n: [byte_ids[byte] for byte in char.encode()] for n, char in enumerate(parts)}
    known = ids | dict(zip(BYTE_NAMES, byte_ids, strict=True))
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
            f"{model.path}: has {len(vocab.tokens)} tokens but {len(scores)} scores; use another .gguf file"
        )
    # Runs of one character (mostly spaces) often have the same score. Leftmost first then means that a run grows as
    # long as possible before the next one begins: the longer token ranks higher.
    whole = [text for text, i in ids.items() if i < len(scores) and len(text) > 1]
    whole.sort(key=lambda text: (-scores[ids[text]], -len(text), ids[text]))
    return [
        (text[:cut], text[cut:])
        for text in whole
        for cut in range(len(text) - 1, 0, -1)
        if text[:cut] in ids and text[cut:] in ids
    ]

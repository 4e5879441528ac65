"""Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) on the `tokenizers` library, equal to llama.cpp's.

The library differs from llama.cpp in two ways, which are corrected here:

- Both drop bytes that have no token, but in the library their neighbours may then merge. Such bytes get placeholder ids
  after the vocabulary, which are removed after encoding.
- The library uses the letters and digits of a newer Unicode version.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from cllm.errors import ModelError
from cllm.models.gguf import GGUFModel
from cllm.models.gguf_header import short
from cllm.text.vocab import SPECIAL_KINDS, TokenKind, Vocabulary

# The library would use all cores, which the engine needs.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

Encoder = Callable[[list[str]], list[list[int]]]
"""Encodes several texts without special tokens; releases the GIL."""

# Letters, digits and punctuation that are new in Unicode 16; llama.cpp uses 15.1.
_NEWER = (
    r"\x{1B4E}-\x{1B4F}\x{1B7F}\x{1C89}-\x{1C8A}\x{A7CB}-\x{A7CD}\x{A7DA}-\x{A7DC}\x{105C0}-\x{105F3}"
    r"\x{10D40}-\x{10D65}\x{10D6E}-\x{10D85}\x{10EC2}-\x{10EC4}\x{11380}-\x{11389}\x{1138B}\x{1138E}"
    r"\x{11390}-\x{113B5}\x{113B7}\x{113D1}\x{113D3}-\x{113D5}\x{113D7}-\x{113D8}\x{116D0}-\x{116E3}"
    r"\x{11BC0}-\x{11BE1}\x{11BF0}-\x{11BF9}\x{13460}-\x{143FA}\x{16100}-\x{1611D}\x{16130}-\x{16139}"
    r"\x{16D40}-\x{16D79}\x{18CFF}\x{1CCF0}-\x{1CCF9}\x{1E5D0}-\x{1E5ED}\x{1E5F0}-\x{1E5FA}\x{1E5FF}"
)
_L, _M, _N, _P = (rf"[\p{{{category}}}&&[^{_NEWER}]]" for category in "LMNP")

_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?{_L}+| ?{_N}+| ?[^\s{_L}{_N}]+|\s+(?!\S)|\s+"
_CONTRACTION = "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_WORDS = rf"{_CONTRACTION}|[^\r\n{_L}{_N}]?{_L}+"
_REST = rf" ?[^\s{_L}{_N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (rf"{_WORDS}|{_N}{{1,3}}|{_REST}",)
_QWEN2 = (rf"{_WORDS}|{_N}|{_REST}",)
_QWEN35 = (rf"{_CONTRACTION}|[^\r\n{_L}{_N}]?[{_L}{_M}]+|{_N}| ?[^\s{_L}{_M}{_N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",)
_SMOLLM = (_N, _GPT2)
_NOT_LOWER, _NOT_UPPER = (rf"[\p{{L}}&&[^{_NEWER}{letters}]]" for letters in ("a-z", "A-Z"))
_REST_WITH_SLASHES = rf" ?[^\s{_L}{_N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased_words(end: str) -> str:
    """Words of capitals first, then of other letters."""
    before = rf"[^\r\n{_L}{_N}]?"
    return rf"{before}{_NOT_LOWER}*{_NOT_UPPER}+{end}|{before}{_NOT_LOWER}+{_NOT_UPPER}*{end}"


_TEKKEN = (rf"{_cased_words('')}|{_N}|{_REST_WITH_SLASHES}",)
_GPT4O = (rf"{_cased_words(f'(?:{_CONTRACTION})?')}|{_N}{{1,3}}|{_REST_WITH_SLASHES}",)

# Each pattern splits what the previous ones left unsplit.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "default": (rf"[{_P}$+<=>^~|]+", _GPT2, rf"{_N}+", "[0-9]{3}"),
    "gpt-2": (_GPT2,),
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "command-r": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "pixtral": _LLAMA3,
    "falcon3": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "glm4": _LLAMA3,
    "chatglm-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
}
# In these, a word that is a token becomes that token whatever the merges are, and prompts begin with BOS.
WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "pixtral", "falcon3", "lfm2", "tekken"})


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's mapping of bytes: printable Latin-1 to itself, the others to characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}


_BYTE_TO_CHAR = _byte_alphabet()
_TO_LATIN1 = str.maketrans({char: chr(byte) for byte, char in _BYTE_TO_CHAR.items()})


def token_bytes(text: str, kind: TokenKind) -> bytes:
    """The bytes of an ordinary token of a byte-level vocabulary."""
    if kind == TokenKind.USER_DEFINED:
        return text.encode()
    try:
        return text.translate(_TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:  # not in the byte alphabet: an added token in plain text
        return text.encode()


class Rules(NamedTuple):
    """How a byte-level tokenizer splits text."""

    ids: dict[str, int]
    """Ids of the tokens that ordinary text may become."""
    merges: list[tuple[str, str]]
    missing: list[str]
    """Bytes without a token, as characters of the byte alphabet."""
    patterns: tuple[str, ...]
    whole_words_first: bool

    def splits(self) -> list[pre_tokenizers.PreTokenizer]:
        """Split text into words, and map words to the byte alphabet."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def read_rules(model: GGUFModel, vocab: Vocabulary) -> Rules:
    pre = model.get("tokenizer.ggml.pre", "") or "default"
    if pre not in _PATTERNS:
        known = ", ".join(sorted(_PATTERNS))
        raise ModelError(
            f"{model.path}: its pre-tokenizer {short(pre)} is not supported (supported: {known}); use another model"
        )
    ids = {text: i for i, text in enumerate(vocab.tokens) if vocab.kinds[i] not in SPECIAL_KINDS}
    missing = [char for char in _BYTE_TO_CHAR.values() if char not in ids]
    return Rules(ids, _read_merges(model, ids), missing, _PATTERNS[pre], pre in WHOLE_WORDS_FIRST)


def build_encoder(model: GGUFModel, vocab: Vocabulary) -> Encoder:
    rules = read_rules(model, vocab)
    size, is_complete = len(vocab.tokens), not rules.missing  # `encode` must not keep the rules in memory
    bpe = models.BPE(
        vocab=rules.ids | {char: size + n for n, char in enumerate(rules.missing)},
        merges=rules.merges,
        ignore_merges=rules.whole_words_first,
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(rules.splits())

    def encode(texts: list[str]) -> list[list[int]]:
        found = (each.ids for each in tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        return list(found) if is_complete else [[i for i in each if i < size] for each in found]

    return encode


def _read_merges(model: GGUFModel, ids: dict[str, int]) -> list[tuple[str, str]]:
    lines = model.strings("tokenizer.ggml.merges")
    if not lines:
        raise ModelError(f"{model.path}: its tokenizer has no merges; use a complete .gguf file")
    # The first of equal merges counts; merges that do not make a token are never used.
    merges: dict[tuple[str, str], None] = {}
    for line in lines:
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut > 0 and left in ids and right in ids and left + right in ids:
            merges.setdefault((left, right))
    return list(merges)

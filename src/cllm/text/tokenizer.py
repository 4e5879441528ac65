"""Text to tokens and back.

`load_tokenizer` builds one from a GGUF file. It splits text exactly as llama.cpp does. The name of a special token in
ordinary text (`special=False`) stays text. Lone surrogates, which UTF-8 cannot represent, are encoded as U+FFFD.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from cllm.errors import InvalidRequestError, ModelError
from cllm.machine import can_reserve
from cllm.models.gguf import GGUFModel
from cllm.models.gguf_header import short
from cllm.text import bpe, spm
from cllm.text.bpe import Encoder
from cllm.text.infill import InfillTokens, find_infill_tokens
from cllm.text.vocab import TokenKind, read_infill_tokens, read_vocabulary

# The most memory that building a tokenizer takes, including a thread's share of the allocator. The library ends the
# process if it cannot allocate.
ROOM_BYTES = 192 << 20
ROOM_PER_TOKEN = 2048
_LONE_SURROGATES = re.compile("[\ud800-\udfff]")


class Tokenizer(Protocol):
    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]
    """Every token that ends an answer."""
    add_bos: bool
    """Whether prompts of this model begin with BOS."""
    special_tokens: Mapping[str, int]
    """The tokens that `special=True` recognises by name."""
    whole_tokens: Mapping[str, int]
    """Tokens of ordinary text that is always written with them."""
    infill: InfillTokens | None
    """The fill-in-the-middle tokens, if the model has them."""
    longest_token: int
    """The maximum number of bytes that one token stands for."""

    def encode(
        self, text: str, *, special: bool = False, add_bos: bool = True, literal: Sequence[int] = ()
    ) -> list[int]:
        """`literal`: ascending positions of characters that must not become part of a special token."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of the tokens; invalid UTF-8 becomes U+FFFD.

        For sentencepiece, the space that encoding put before the first word stays.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token, `b""` for special tokens."""

    def token_text(self, token_id: int) -> str:
        """One token as readable text: special tokens by name."""


class TableTokenizer:
    """A tokenizer with a table of tokens and an encoder for ordinary text."""

    def __init__(
        self,
        pieces: Sequence[bytes],
        *,
        encoder: Encoder,
        special_tokens: Mapping[str, int],
        whole_tokens: Mapping[str, int],
        bos_id: int | None,
        eos_ids: frozenset[int],
        add_bos: bool,
        infill: InfillTokens | None = None,
    ) -> None:
        """`whole_tokens`: tokens that are recognised in all text but are ordinary text. `infill`: for models whose
        fill-in-the-middle tokens have unusual names."""
        self._pieces = pieces
        self._encode = encoder
        self._names = {token_id: name for name, token_id in special_tokens.items()}
        self._whole = _longest_first(whole_tokens.items())
        self._whole_or_special = _longest_first([*whole_tokens.items(), *special_tokens.items()])
        self.special_tokens = special_tokens
        self.whole_tokens = whole_tokens
        self.longest_token = max(1, *map(len, pieces), *(len(name.encode()) for name in special_tokens))
        self.vocab_size = len(pieces)
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self.add_bos = add_bos
        self.infill = infill or find_infill_tokens(special_tokens)

    def encode(
        self, text: str, *, special: bool = False, add_bos: bool = True, literal: Sequence[int] = ()
    ) -> list[int]:
        if not text.isascii():
            text = _LONE_SURROGATES.sub("\ufffd", text)
        markers = self._whole_or_special if special else self._whole
        fragments = _cut_out(text, markers, literal)
        ids = [self.bos_id] if add_bos and self.add_bos and self.bos_id is not None else []
        return ids + self._encode_fragments(fragments)

    def _encode_fragments(self, fragments: Sequence[str | int]) -> list[int]:
        """Encode text fragments; ids between them are kept."""
        return join_encoded(fragments, self._encode)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        if skip_special:
            return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
        parts = (self._names[i].encode() if i in self._names else self.token_bytes(i) for i in ids)
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequestError(
                f"token id {token_id} is not in the vocabulary; ids go from 0 to {self.vocab_size - 1}"
            )
        return self._pieces[token_id]

    def token_text(self, token_id: int) -> str:
        return self._names.get(token_id) or self.token_bytes(token_id).decode("utf-8", "replace")


class ByteTokenizer(TableTokenizer):
    """For the fake backend: one token per byte, `<bos>` (256), `<eos>` (257), and fillers without text."""

    BOS_ID = 256
    EOS_ID = 257

    def __init__(self, vocab_size: int = 258) -> None:
        super().__init__(
            [*(bytes([byte]) for byte in range(256)), *[b""] * (vocab_size - 256)],
            encoder=lambda texts: [list(text.encode()) for text in texts],
            special_tokens={"<bos>": self.BOS_ID, "<eos>": self.EOS_ID},
            whole_tokens={},
            bos_id=self.BOS_ID,
            eos_ids=frozenset({self.EOS_ID}),
            add_bos=False,
        )


def load_tokenizer(model: GGUFModel) -> Tokenizer:
    vocab = read_vocabulary(model)
    if not can_reserve(ROOM_BYTES + len(vocab.tokens) * ROOM_PER_TOKEN):
        raise ModelError(f"{model.path}: not enough memory or address space (ulimit -v) for its tokenizer")
    family = model.get("tokenizer.ggml.model", "")
    if family == "gpt2":
        encoder, token_bytes = bpe.build_encoder(model, vocab), bpe.token_bytes
        add_bos = model.get("tokenizer.ggml.pre", "") in bpe.WHOLE_WORDS_FIRST
    elif family == "llama":
        encoder, token_bytes, add_bos = spm.build_encoder(model, vocab), spm.token_bytes, True
    else:
        raise ModelError(
            f"{model.path}: its tokenizer {short(family)} is not supported (supported: gpt2, which is BPE, and llama, "
            "which is sentencepiece); use another model"
        )
    tokens = list(zip(vocab.tokens, vocab.kinds, strict=True))
    return TableTokenizer(
        [b"" if vocab.is_special(i) else token_bytes(*token) for i, token in enumerate(tokens)],
        encoder=encoder,
        special_tokens={text: i for i, (text, _) in enumerate(tokens) if vocab.is_special(i)},
        whole_tokens={text: i for i, (text, kind) in enumerate(tokens) if kind == TokenKind.USER_DEFINED},
        bos_id=vocab.bos_id,
        eos_ids=vocab.eos_ids,
        add_bos=model.get("tokenizer.ggml.add_bos_token", add_bos),
        infill=read_infill_tokens(model, len(vocab.tokens)),
    )


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """A whole prompt, which may have been made by a chat template: special tokens by name, and a single BOS."""
    ids = tokenizer.encode(text, special=True, add_bos=False)
    if not tokenizer.add_bos or tokenizer.bos_id is None or ids[:1] == [tokenizer.bos_id]:
        return ids
    return [tokenizer.bos_id, *ids]


def join_encoded(fragments: Sequence[str | int], encode: Encoder) -> list[int]:
    encoded = iter(encode([each for each in fragments if isinstance(each, str)]))
    ids: list[int] = []
    for fragment in fragments:
        if isinstance(fragment, str):
            ids.extend(next(encoded))
        else:
            ids.append(fragment)
    return ids


def _longest_first(tokens: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """The order in which tokens are matched: of two that overlap, the longer one wins."""
    return sorted(tokens, key=lambda token: -len(token[0].encode()))


def _cut_out(text: str, markers: list[tuple[str, int]], literal: Sequence[int]) -> list[str | int]:
    """The text with every marker replaced by its id."""
    spans: list[tuple[int, int, int | None]] = [(0, len(text), None)] if text else []
    for marker, token_id in markers:
        if marker in text:
            spans = [cut for span in spans for cut in _cut_span(text, span, marker, token_id, literal)]
    return [text[start:stop] if token_id is None else token_id for start, stop, token_id in spans]


def _cut_span(
    text: str, span: tuple[int, int, int | None], marker: str, token_id: int, literal: Sequence[int]
) -> Iterable[tuple[int, int, int | None]]:
    start, stop, taken = span
    if taken is not None:
        yield span
        return
    at = text.find(marker, start, stop)
    while at >= 0:
        end = at + len(marker)
        nearest = bisect_left(literal, at)
        if nearest < len(literal) and literal[nearest] < end:
            at = text.find(marker, at + 1, stop)
            continue
        if at > start:
            yield start, at, None
        yield at, end, token_id
        start = end
        at = text.find(marker, start, stop)
    if start < stop:
        yield start, stop, None


PIECE = 32_768
"""Characters tokenised at a time. A shorter text is tokenised at once."""
SLACK = 16
"""Extra tokens that cutting a text may cause, besides the token that is cut, which may become one token per byte.
Merges change near a cut, but not a few words away. No more than 7 have been observed."""


CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class TokenLimit(NamedTuple):
    most: int
    reason: str
    """For the error message: why there is no more room."""
    what: str = "the prompt"
    code: str | None = None
    """The error code."""
    advice: str = ""
    """What else to do than to shorten the text."""
    context: int = 0
    """The context's length, if that is the limit."""

    @classmethod
    def of_context(cls, context: int, *, answers: bool = True, advice: str = "") -> TokenLimit:
        """Clients look for this wording and code to shorten a conversation automatically. `answers`: leave room for at
        least one token."""
        reason = f"this model's maximum context length is {context} tokens"
        if answers:
            reason += ", of which at least one is for the answer"
        return cls(context - answers, reason, code=CONTEXT_LENGTH_EXCEEDED, advice=advice, context=context)

    def error(self, has: str, param: str, tokens: int = 0) -> InvalidRequestError:
        """`has`: the length of the text, in words. `tokens`: as far as it was counted."""
        if self.code is None:
            return InvalidRequestError(f"{self.what} has {has}; {self.reason}", param)
        reason = self.reason[0].upper() + self.reason[1:]
        message = f"{reason}. However, {self.what} has {has}. " + f"Shorten it. {self.advice}".strip()
        # In llama-server's words.
        numbers = {"n_prompt_tokens": max(tokens, self.most + 1), "n_ctx": self.context}
        return InvalidRequestError(message, param, self.code, numbers)

    def check(self, ids: Sequence[int], param: str) -> None:
        if len(ids) > self.most:
            raise self.error(f"{len(ids)} tokens", param, len(ids))

    def check_text(self, tokenizer: Tokenizer, text: str, param: str, *, special: bool = False) -> None:
        """Refuse a text that is certainly too long: first by its size, given the longest token, then by tokenising it
        piece by piece until there are too many. A text that passes may still be slightly too long, which `check` finds.
        """
        if len(text) * 4 <= self.most:
            return
        size = len(text.encode(errors="replace"))
        if size > self.most * tokenizer.longest_token:
            raise self.error(
                f"{size} bytes of text, which are more than {self.most} tokens (the longest has "
                f"{tokenizer.longest_token} bytes)",
                param,
                -(-size // tokenizer.longest_token),
            )
        if size > self.most and len(text) > PIECE:
            self._count(tokenizer, text, param, special=special)

    def _count(self, tokenizer: Tokenizer, text: str, param: str, *, special: bool) -> None:
        count, slack = 0, tokenizer.longest_token + SLACK
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            count += max(len(tokenizer.encode(piece, special=special, add_bos=False)) - slack, 0)
            if count > self.most:
                raise self.error(
                    f"more than {self.most} tokens in the first {start + len(piece)} of its {len(text)} characters",
                    param,
                    count,
                )


def validate_ids(prompt: Sequence[int], limit: TokenLimit, vocab: int) -> array[int]:
    """The prompt as an array, which is fast to check however long it is."""
    if not len(prompt):
        raise InvalidRequestError("the prompt is empty: it needs at least one token", "prompt")
    limit.check(prompt, "prompt")
    try:
        ids = array("i", prompt)
        values = np.frombuffer(ids, np.int32)
        known = values.min() >= 0 and values.max() < vocab
    except OverflowError:
        known = False
    if not known:
        wrong = next(i for i in prompt if not 0 <= i < vocab)
        raise InvalidRequestError(f"the prompt contains token id {wrong}; ids go from 0 to {vocab - 1}", "prompt")
    return ids

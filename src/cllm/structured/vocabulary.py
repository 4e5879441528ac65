"""The model's tokens for llguidance: their bytes, which are special, and which end an answer."""

from __future__ import annotations

from llguidance import LLTokenizer, TokenizerWrapper

from cllm.text.tokenizer import Tokenizer

_MARK = "\x01"
"""Stands before text that does not begin a prompt; no token holds it together with what follows."""


class Vocabulary:
    """Building one holds the GIL: 0.1 s for 50,000 tokens. So it is built while the model is loaded."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        """`n_vocab`: how many tokens the model gives logits for; the tokenizer may know fewer."""
        self.tokenizer = tokenizer
        self.n_vocab = n_vocab
        self.end_id = min(tokenizer.eos_ids, default=None)
        """The token that ends an answer; None: the model has none."""
        self.tokens: LLTokenizer | None = None
        if self.end_id is not None:
            spelling = TokenizerWrapper(_Spelling(tokenizer, n_vocab, self.end_id))
            ends = [self.end_id, *sorted(tokenizer.eos_ids - {self.end_id})]
            self.tokens = LLTokenizer(spelling, n_vocab=n_vocab, eos_token=ends)


class _Spelling:
    """What `TokenizerWrapper` asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int, end_id: int) -> None:
        names = {token: name.encode() for name, token in tokenizer.special_tokens.items() if token < n_vocab}
        known = min(n_vocab, tokenizer.vocab_size)
        self._tokenizer = tokenizer
        self.tokens = [names.get(token) or tokenizer.token_bytes(token) for token in range(known)]
        self.tokens += [b""] * (n_vocab - known)
        self.special_token_ids = sorted(names)
        self.eos_token_id = end_id
        self.bos_token_id = tokenizer.bos_id
        self._marks = len(self._encode(_MARK))

    def __call__(self, text: str) -> list[int]:
        """The text's tokens where it does not begin the prompt: sentencepiece would put a space before it."""
        if isinstance(text, bytes):
            raise TypeError("text is given as a string")
        ids = self._encode(text)
        if b"".join(map(self._tokenizer.token_bytes, ids)) == text.encode():
            return ids
        return self._encode(_MARK + text)[self._marks :]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, special=False, add_bos=False)

"""Texts that are hard to split, and a vocabulary to split them with."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path
from typing import Any

from cllm.backends.llama_cpp.library import load_library
from gguf_kit import LLAMA_KEYS

CORPUS = [
    "",
    " ",
    "  ",
    "Hello, world!",
    " leading and trailing ",
    "a  b   c    d     e",
    " " * 100 + "x" + " " * 33,
    "tab\tand\t\ttabs\t\n\tmore",
    "\n\n\n \n  \n\r\n\r\n \r \r\n x\r\ny\rz",
    "\x0b\x0c\x1c\x1f\x85\xa0\u1680\u2000\u200a\u2028\u2029\u202f\u205f\u3000x",
    "I'm you're we've they'll he'd it's 'Tis 'S 'LL 'Re don'T 'ſ ''' 'x",
    "123 4567 1,234.56 0x1F 1e-9 ٣٤٥ Ⅷ ½ ² ၁၂၃ 12345678901234567890",
    "naïve café e\u0301 a\u0300\u0301\u0302 ẞ ß ſ Ǆ ǅ ʰ ﬁ",
    "漢字かな交じり文 中文，标点。한국어 조선말",
    "العربية لُغَة מְנֻקָּד हिन्दी தமிழ் ไทย",
    "😀 👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 ❤️ 🇩🇪 \u200d\ufe0f",
    "def f(x):\n    return {'a': x[0], \"b\": -1}  # <- ok?\n\n\n\tif x != y && z:\n",
    "https://example.org/a/b?c=d&e=f#g user@example.org C:\\dir\\file.txt",
    "\x00\x01\x02\x03\x04\x05\x06\x07\x08\x10\x13\x14\x16\x1b\x1d\x7f",
    "a\x04b\x06c h\x13e\x14l\x16l\x1do",
    "\ufeffBOM \ufffd \ufffe \uffff \ue000 \U000e0001 \U0010ffff",
    "\ua7cb \U00010d41\U00010d45 \U0001e5d0\U0001e5f1 \U00013460 \u1b4e",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|> <|im_end <im_end|> <|im_start|><|im_start|>",
    "<s> </s> <unk> <0x0A> <0xFF> ▁ ▁▁x <repo_name><reponame><jupyter_code>",
    "!?.,;:-_()[]{}<>=+*/\\|~`@#$%^&\"' ...--- ==>> ;;) €£¥ —…",
    "a" * 5000,
    "ab" * 3000 + "!" * 3000 + "\n" * 500,
    "Donaudampfschifffahrtsgesellschaft" * 50,
    "".join(chr(code) for code in range(0x20, 0x2000)),
]


def sentencepiece_keys() -> dict[str, Any]:
    """A vocabulary like Llama 2's: bytes, pieces with falling scores, runs of spaces that all share the worst score."""
    shuffler = random.Random(7)
    letters = "abcdeé漢 ".replace(" ", "▁")
    pieces = {"".join(shuffler.choices(letters[:5], k=shuffler.randint(2, 5))) for _ in range(150)}
    pieces |= {"▁" + piece for piece in sorted(pieces)[:60]} | {"=" * n for n in (2, 3, 4, 8)} | {"▁é", "漢字", "é漢"}
    ordered = sorted(pieces)
    shuffler.shuffle(ordered)
    runs = ["▁" * n for n in range(2, 17)]
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *runs,
        *ordered,
        *letters,
        "=",
        "[tool]",
    ]
    scores = [0.0] * 259 + [-1e9] * len(runs) + [-1.0 - n for n in range(len(ordered) + len(letters) + 1)] + [0.0]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 260) + [4]
    return LLAMA_KEYS | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


class LlamaVocabulary:
    """llama.cpp's tokenizer on the same file."""

    def __init__(self, path: Path) -> None:
        library = load_library()
        library.take_log()
        self._api = library.api
        params = self._api.llama_model_default_params()
        params.vocab_only = True
        self._model = self._api.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, f"llama.cpp does not load {path}"
        self._vocab = self._api.llama_model_get_vocab(self._model)
        self.size = self._api.llama_vocab_n_tokens(self._vocab)

    def close(self) -> None:
        self._api.llama_model_free(self._model)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        raw = text.encode()
        room = (self._api.llama_token * (3 * len(raw) + 8))()  # a space may take three byte tokens
        count = self._api.llama_tokenize(self._vocab, raw, len(raw), room, len(room), True, special)
        assert count >= 0
        return room[:count]

    def piece(self, token_id: int) -> bytes:
        room = ctypes.create_string_buffer(512)
        count = self._api.llama_token_to_piece(self._vocab, token_id, room, len(room), 0, False)
        assert count >= 0
        return room.raw[:count]

    def ends(self) -> frozenset[int]:
        return frozenset(i for i in range(self.size) if self._api.llama_vocab_is_eog(self._vocab, i))

"""The vocabulary of a GGUF file: its tokens and their kinds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from cllm.errors import ModelError
from cllm.models.gguf import GGUFModel
from cllm.text.infill import INFILL_NAMES, InfillTokens, infill_tokens


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type` in the file."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_KINDS = {kind.value: kind for kind in TokenKind}
SPECIAL_KINDS = frozenset({TokenKind.UNKNOWN, TokenKind.CONTROL})
"""Tokens that structure a prompt; text becomes one of them only if the caller allows it."""

# Files seldom list every token that ends an answer, so these are recognised by name, as in llama.cpp (but not "</s>",
# which is an ordinary token in some vocabularies).
_END_NAMES = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>",
    "[e~[", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>",
    "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
})  # fmt: skip
_PARTS_END: tuple[frozenset[str], ...] = (frozenset({"<|return|>", "<|call|>"}), frozenset({"<|calls|>", "<|flush|>"}))
"""Where a vocabulary has these, "<|end|>" ends only a part of an answer (gpt-oss, Solar)."""
MAX_TOKEN_LENGTH = 1024
"""The longest tokens of real vocabularies are 128 or 256 spaces. Building one takes quadratic time in this."""
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2}
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Control tokens that some files mark as user-defined.
_CONTROL_NAMES = _END_NAMES | INFILL_NAMES | {"<|prefix|>", "<|suffix|>", "<|middle|>"}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokens: list[str]
    """As in the file: ordinary tokens in byte-level or sentencepiece spelling, special ones in plain text."""
    kinds: list[TokenKind]
    ids: dict[str, int]
    bos_id: int | None
    eos_ids: frozenset[int]

    def is_special(self, token_id: int) -> bool:
        return self.kinds[token_id] in SPECIAL_KINDS


def read_vocabulary(model: GGUFModel) -> Vocabulary:
    tokens = model.strings("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{model.path}: has no tokenizer (tokenizer.ggml.tokens); use a complete .gguf file")
    longest = max(map(len, tokens))
    if longest > MAX_TOKEN_LENGTH:
        raise ModelError(
            f"{model.path}: its vocabulary has a token of {longest} characters, more than {MAX_TOKEN_LENGTH}; "
            "use another .gguf file"
        )
    tokens = [text or f"[EMPTY_{token_id}]" for token_id, text in enumerate(tokens)]
    ids = {text: token_id for token_id, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise ModelError(f"{model.path}: its vocabulary has a duplicate token; use another .gguf file")
    kinds = model.numbers("tokenizer.ggml.token_type", int) or [TokenKind.NORMAL] * len(tokens)
    if len(kinds) < len(tokens):
        raise ModelError(f"{model.path}: has {len(tokens)} tokens but {len(kinds)} token types; use another .gguf file")
    ends = {ids[name] for name in _END_NAMES if name in ids}
    if any(ids.keys() >= names for names in _PARTS_END):
        ends.discard(ids.get("<|end|>", -1))
    ends.update(token_id for key in _END_KEYS if (token_id := _read_id(model, key, len(tokens))) is not None)
    return Vocabulary(
        tokens=tokens,
        kinds=[
            TokenKind.CONTROL if text in _CONTROL_NAMES else _KINDS.get(kind, TokenKind.NORMAL)
            for kind, text in zip(kinds, tokens, strict=False)
        ],
        ids=ids,
        bos_id=_read_id(model, "bos", len(tokens)),
        eos_ids=frozenset(ends),
    )


def read_infill_tokens(model: GGUFModel, size: int) -> InfillTokens | None:
    """The fill-in-the-middle tokens, if the file names them."""
    return infill_tokens([_read_id(model, key, size) for key in ("fim_pre", "fim_suf", "fim_mid")])


def special_name(model: GGUFModel, key: str) -> str:
    """The name of the token with this role ("bos", "eos"), or an empty string."""
    tokens = model.strings("tokenizer.ggml.tokens")
    token_id = _read_id(model, key, len(tokens))
    return "" if token_id is None else tokens[token_id]


def _read_id(model: GGUFModel, key: str, size: int) -> int | None:
    default = _SENTENCEPIECE_IDS.get(key, -1) if model.get("tokenizer.ggml.model", "") == "llama" else -1
    token_id = model.get(f"tokenizer.ggml.{key}_token_id", default)
    return token_id if 0 <= token_id < size else None

"""The vocabulary of a GGUF file: which tokens there are and what each of them is for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import cast

from cllm.errors import ModelError
from cllm.models.gguf import GGUFModel


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type` in the file."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL_KINDS = frozenset({TokenKind.UNKNOWN, TokenKind.CONTROL})
"""Tokens that structure a prompt; text becomes one of them only where the caller says so."""

# Files seldom list every token that ends an answer, so these are recognised by name, as llama.cpp does it.
_END_NAMES = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>",
    "[e~[", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>",
    "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
})  # fmt: skip
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Control tokens in function that some files mark as user-defined.
_CONTROL_NAMES = _END_NAMES | frozenset({
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
    "<|code_prefix|>", "<|prefix|>", "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>",
    "<SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>", "<|fim_middle|>", "<fim-middle>", "<fim_middle>",
    "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>", "<|middle|>",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokens: list[str]
    """As written in the file: byte-level or sentencepiece spelling for ordinary tokens, plain for special ones."""
    kinds: list[TokenKind]
    ids: dict[str, int]
    bos_id: int | None
    eos_ids: frozenset[int]

    def is_special(self, token_id: int) -> bool:
        return self.kinds[token_id] in SPECIAL_KINDS


def read_vocabulary(model: GGUFModel) -> Vocabulary:
    tokens = model.get("tokenizer.ggml.tokens", cast("list[str]", []))
    if not tokens:
        raise ModelError(f"{model.path}: has no tokenizer (tokenizer.ggml.tokens); give a complete .gguf model")
    tokens = [text or f"[EMPTY_{token_id}]" for token_id, text in enumerate(tokens)]
    ids = {text: token_id for token_id, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise ModelError(f"{model.path}: its vocabulary holds a token twice; give another .gguf file")
    kinds = model.get("tokenizer.ggml.token_type", cast("list[int]", [])) or [TokenKind.NORMAL] * len(tokens)
    if len(kinds) < len(tokens):
        raise ModelError(
            f"{model.path}: has {len(tokens)} tokens but {len(kinds)} token types; give another .gguf file"
        )
    named = {f"{key}_token_id": _read_id(model, key, len(tokens)) for key in ("bos", *_END_KEYS)}
    bos_id = named.pop("bos_token_id")
    ends = {ids[name] for name in _END_NAMES if name in ids}
    ends.update(token_id for token_id in named.values() if token_id is not None)
    return Vocabulary(
        tokens=tokens,
        kinds=[_effective_kind(kind, text) for kind, text in zip(kinds, tokens, strict=False)],
        ids=ids,
        bos_id=bos_id,
        eos_ids=frozenset(ends),
    )


def _read_id(model: GGUFModel, key: str, size: int) -> int | None:
    token_id = model.get(f"tokenizer.ggml.{key}_token_id", -1)
    return token_id if 0 <= token_id < size else None


def _effective_kind(kind: int, text: str) -> TokenKind:
    if text in _CONTROL_NAMES:
        return TokenKind.CONTROL
    return TokenKind(kind) if 1 <= kind <= 6 else TokenKind.NORMAL
